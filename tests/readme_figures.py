"""The README's figures, with the texts for those who can't see them. Run as a program it draws and writes both anew."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdn_kernels import MODELS, notebook, plots
from gdn_kernels import figures_recurrence as figures
from gdn_kernels.drift.report import lines_of
from gdn_kernels.latency.model import Modelled, model_block

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "notebooks/figures"
MODEL = "Qwen3.5-35B-A3B"
POLICIES = {
    "bf16_state": "state kept in bf16",
    "hf_bf16": "transformers, bf16",
    "nkilib": "NKI Library's roundings",
    "ours": "this kernel",
    "exact": "float64 steps, fp32 state",
}


@dataclass(frozen=True)
class Drawn:
    """A figure of the README: what writes it to a path, and its alternative text."""

    draw: Callable[[Path], None]
    alt: str


def microseconds(modelled: Modelled) -> Drawn:
    """Where the time of one decode step goes."""
    (schedule,) = modelled.schedules
    ends = {name: max(end for _, end in spans) for name, spans in figures.stream_spans(schedule).items()}
    title = (
        f"One decode step of a GDN layer of {MODEL}, one sequence, one core: {modelled.modelled_us:.0f} us, modelled"
    )
    alt = (
        f"What is on its way when, modelled. Weights of q, k and v stream until {ends['weights of q, k, v']:.0f} us, "
        f"then those of z until {ends['weights of z']:.0f} us; the states come in, the delta rule is done and the "
        f"results leave under z's weights. {modelled.modelled_us:.0f} us in all, {modelled.ratio:.2f} of the floor."
    )
    return Drawn(lambda path: _write(notebook.png(figures.stream_order(schedule, title)), path), alt)


def drift(policies: Mapping[str, str] = POLICIES) -> Drawn:
    """Errors over tokens, from the saved rollouts."""
    data = ROOT / "data/drift/seeds"
    found = {name: notebook.rollouts(data, policy=name, stream="independent") for name in policies}
    errors = {name: lines_of(results, "state_error", np.max)[0] for name, results in found.items()}
    lines = [plots.Line(policies[name], line.tokens, line.errors) for name, line in errors.items()]
    tokens = int(lines[0].tokens[-1])
    last = "; ".join(f"{line.label}: {np.median(line.errors[:, -1]):.1e}" for line in lines)
    title = f"Error of the recurrent state, worst head, over {tokens:,} decoded tokens"
    alt = f"{title}, log-log, median and range of {len(lines[0].errors)} seeds. At the end: {last}."
    return Drawn(lambda path: plots.drift_errors({"independent tokens, emulated": lines}, title, path), alt)


def readme_figures() -> dict[str, Drawn]:
    """By the names of their files."""
    return {"microseconds.png": microseconds(model_block(MODELS[MODEL].dims, B=1)), "drift.png": drift()}


def with_alts(readme: str, drawn: dict[str, Drawn]) -> str:
    """The README with these alternative texts."""
    for name, figure in drawn.items():
        text = f"![{figure.alt}]({FOLDER}/{name})"
        readme, places = re.subn(rf"!\[[^]]*\]\({FOLDER}/{re.escape(name)}\)", lambda _, text=text: text, readme)
        assert places == 1, f"README.md shows {name} {places} times"
    return readme


def _write(data: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


if __name__ == "__main__":
    every = readme_figures()
    for file, one in every.items():
        one.draw(ROOT / FOLDER / file)
    (ROOT / "README.md").write_text(with_alts((ROOT / "README.md").read_text(), every))
