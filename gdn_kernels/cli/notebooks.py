"""gdn-kernels notebooks: execute the notebooks from top to bottom and leave them as HTML."""

from __future__ import annotations

import argparse
import html
import re
import sys
import time
from pathlib import Path
from typing import Any

LONGEST_CELL = 300  # seconds; the slowest takes a few
PAGE = (
    '<!doctype html><meta charset="utf-8"><title>gdn_kernels notebooks</title><h1>Notebooks</h1><ol start="0">{}</ol>'
)


class CellFailed(Exception):
    """A cell raised an error, or none could run. The message names the notebook and the cell."""


def add_parser(subparsers: Any) -> None:
    """Add `notebooks` to the command line."""
    parser = subparsers.add_parser(
        "notebooks",
        help="execute the notebooks and leave them as HTML",
        description="Execute every notebook of a source tree in a fresh kernel and write HTML with an index. Exit "
        "code 0: all ran; 1: a cell failed, which is named; 2: could not run.",
    )
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="FILE", help="default: all of notebooks/")
    parser.add_argument("--out", type=Path, default=Path("build/notebooks"), metavar="DIR", help="where the HTML goes")
    parser.add_argument("--save", action="store_true", help="also store the new outputs in the notebooks themselves")


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, 1 (a cell failed) or 2 (could not run)."""
    try:
        import nbformat
        from nbconvert import HTMLExporter
    except ImportError as error:
        print(f"gdn-kernels notebooks: {error}; install 'gdn-kernels[notebooks]'", file=sys.stderr)
        return 2
    paths = args.notebooks or sorted(Path("notebooks").glob("*.ipynb"))
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        print(f"gdn-kernels notebooks: no such notebook: {', '.join(missing) or 'notebooks/*.ipynb'}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    failed, start = 0, time.perf_counter()
    for path in paths:
        notebook, begun = nbformat.read(path, as_version=4), time.perf_counter()
        try:
            execute(notebook, path)
        except CellFailed as error:
            failed += 1
            print(error, file=sys.stderr)
        else:
            print(f"{path}: {time.perf_counter() - begun:.1f} s", flush=True)
            if args.save:
                nbformat.write(notebook, path)
        body, _ = HTMLExporter(template_name="lab").from_notebook_node(notebook)
        (args.out / f"{path.stem}.html").write_text(re.sub(r'(href="[\w./-]+)\.ipynb', r"\1.html", body))
    _write_index(args.out)
    print(f"{args.out / 'index.html'}: {len(paths) - failed} of {len(paths)} ran, {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


def execute(notebook: Any, path: Path) -> None:
    """Run all cells in a fresh kernel, in the notebook's own folder, with progress; leaves tidy outputs in it.

    Raises:
        CellFailed: at the first cell that raises an error, or if no kernel starts.
    """
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from tqdm import tqdm

    resources = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(notebook, timeout=LONGEST_CELL, resources=resources, record_timing=False)
    client.extra_arguments = ["--log-level=ERROR"]  # a warning of each kernel that it listens on a port helps nobody
    client.reset_execution_trackers()
    try:
        with client.setup_kernel():
            for index, cell in enumerate(tqdm(notebook.cells, desc=path.stem, unit="cell", leave=False)):
                try:
                    client.execute_cell(cell, index)
                except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
                    first = cell.source.splitlines()[0]
                    raise CellFailed(f"{path}, cell {index} ({first}):\n{error}") from None
    except (RuntimeError, NoSuchKernel) as error:
        raise CellFailed(f"{path}: no kernel: {error}") from None
    finally:
        tidy(notebook)


def tidy(notebook: Any) -> None:
    """Drop what differs from one execution or machine to the next: timing, versions; one output for each stream."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)


def _joined(outputs: list[Any]) -> list[Any]:
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def _write_index(out: Path) -> None:
    """A page with a link to every notebook's HTML in the folder."""
    names = [page.stem for page in sorted(out.glob("*.html")) if page.stem != "index"]
    links = "".join(f'<li><a href="{name}.html">{html.escape(name)}</a></li>' for name in names)
    (out / "index.html").write_text(PAGE.format(links))
