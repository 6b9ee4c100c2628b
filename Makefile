# `make run` and `make test` share one virtual environment; `make test` adds torch, transformers and the test tools.
# An installation is redone only when pyproject.toml or constraints.txt changed since.

VENV ?= .venv
JOBS ?= 2
# Left empty, PYTHON becomes the first interpreter below that works, the oldest supported version first.
PYTHON ?=
PYTHONS := $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3)

# A name on PATH is not enough: version managers leave shims that fail, and Debian's python3 may lack ensurepip.
USABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PYTEST := HF_HUB_OFFLINE=1 $(VENV)/bin/python -m pytest

.PHONY: help run test lint check-timing check check-notebooks lab notebooks bench clean
.DEFAULT_GOAL := help

help:
	@echo "make run     decode the sample layer with the kernel and compare every step; RUN_ARGS=... is passed on"
	@echo "make test    lint and all tests; PYTEST_ARGS=... is passed on, JOBS=$(JOBS) processes"
	@echo "make lab     open the notebooks in JupyterLab; LAB_ARGS=... is passed on, such as --no-browser"
	@echo "make notebooks  execute them all, HTML in build/notebooks; NOTEBOOK_ARGS=--save also stores the outputs"
	@echo "make lint    ruff, the formatting, mypy"
	@echo "make bench   time the interpreter beside bare NumPy, and rollouts beside transformers' own rule in torch"
	@echo "make clean   remove $(VENV), build/ and the caches"

run: $(VENV)/installed-run
	@$(VENV)/bin/python -m gdn_kernels run $(RUN_ARGS)
	@echo "Next: 'make lab' opens the notebooks, which explain this step by step,"
	@echo "      'make notebooks' executes them all and leaves HTML in build/notebooks/."

test: lint check-timing check check-notebooks

lint: $(VENV)/installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Seconds are measured on a machine that does nothing else, so never beside the parallel tests, even under `make -j`.
check-timing: $(VENV)/installed-test | lint
	$(PYTEST) -m timing $(PYTEST_ARGS) || test $$? -eq 5 # 5: PYTEST_ARGS selected no such test

# One thread for each process: BLAS threads of several processes on the same cores only wait for one another.
check: $(VENV)/installed-test | check-timing
	OMP_NUM_THREADS=1 $(PYTEST) -m "not timing" -n $(JOBS) $(PYTEST_ARGS)

# Every cell is run again and its output compared with the stored one; pictures aren't, nor cells that say so. loadfile:
# a notebook is one program. PYTEST_ARGS select among the tests above, not here.
check-notebooks: $(VENV)/installed-test | check
	OMP_NUM_THREADS=1 $(PYTEST) --nbval --nbval-sanitize-with notebooks/nbval.cfg -n $(JOBS) --dist loadfile notebooks

lab: $(VENV)/installed-notebooks
	$(VENV)/bin/jupyter lab notebooks/00_start_here.ipynb $(LAB_ARGS)

notebooks: $(VENV)/installed-notebooks
	@OMP_NUM_THREADS=2 $(VENV)/bin/python -m gdn_kernels notebooks $(NOTEBOOK_ARGS)

bench: $(VENV)/installed-test
	@OMP_NUM_THREADS=1 $(VENV)/bin/python tests/benchmarks/interpreter.py $(BENCH_ARGS)
	@OMP_NUM_THREADS=1 $(VENV)/bin/python tests/benchmarks/drift.py

$(VENV)/bin/python:
	@for candidate in $(PYTHONS); do \
	    if $$candidate -c '$(USABLE)' 2>/dev/null; then \
	        echo "making $(VENV) with $$($$candidate --version)"; \
	        exec $$candidate -m venv $(VENV); \
	    fi; \
	done; \
	echo "no usable Python 3.11 to 3.13 with venv among: $(PYTHONS); set PYTHON=/path/to/one" >&2; exit 1

# matplotlib draws the figure of `run`; it is no dependency of the package.
$(VENV)/installed-run: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the package"
	$(PIP_INSTALL) --editable . matplotlib
	@touch $@

$(VENV)/installed-notebooks: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the package, torch, transformers and JupyterLab"
	$(PIP_INSTALL) --editable '.[hf,notebooks]'
	@touch $@ $(VENV)/installed-run

$(VENV)/installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the package, torch, transformers, JupyterLab and the test tools"
	$(PIP_INSTALL) --editable '.[test,hf,notebooks]'
	@touch $@ $(VENV)/installed-run $(VENV)/installed-notebooks

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
