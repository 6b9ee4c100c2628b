"""What the notebooks share: the first cell, a kernel's source read from its file, pictures, checks and takeaways.

Everything shown has a plain-text form, which is what a comparison with stored outputs sees.
"""

from __future__ import annotations

import ast
import base64
import io
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

import numpy as np
import numpy.typing as npt

from gdn_kernels import backends, sample
from gdn_kernels.latency import tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gdn_kernels.drift.store import Result

PACKAGE = Path(__file__).parent
VERSIONS = ("gdn-kernels", "numpy", "ml_dtypes", "matplotlib", "nki")
LARGEST_PICTURE = 150_000  # characters as stored; a notebook stays light enough for a browser
SCREEN, SHARP = 96, 144  # dots an inch: of a page, and of a PNG, so that it is crisp on a dense screen
WIDEST = 880  # dots of a page: what JupyterLab leaves beside its file browser on a laptop; it cuts off what is wider
SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
FRAME = "border: 2px solid #3a86d8; padding: 0.6em 1em; text-align: left; font-size: 110%"


def environment() -> None:
    """Print versions and the backend that "auto" takes here: what the outputs below were made with."""
    print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    for name in VERSIONS:
        try:
            print(f"{name:12} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name:12} not installed")
    chosen = backends.choose()
    print(f"{'backend':12} {chosen}: {next(b.why for b in backends.available() if b.name == chosen)}")


def sample_step(form: str = "bf16") -> dict[str, npt.NDArray[Any]]:
    """The 11 arguments of `gdn_block_tkg` by name, B = 1, for the sample layer's first decode step after its prefill.

    `form`: "bf16" or "fp32"; ValueError for another name.
    """
    recording = sample.load_recording(form)
    weights = sample.load_weights()
    of_form = weights.astype_fp32() if form == "fp32" else weights
    states = {"conv_state": recording.conv_state[0], "recurrent_state": recording.recurrent_state[0]}
    return {"hidden": recording.hidden[0], **of_form.arguments(), **states}


def random_recurrence(rng: np.random.Generator, B: int, Hv: int, K: int, V: int) -> dict[str, npt.NDArray[Any]]:
    """The arguments of `gdn_tkg` by name, fp32, at random: heads from very slow to very fast, and a full state.

    q, k [B * Hv, K], v, z [B * Hv, V], a, b [B * Hv], A_log, dt_bias [Hv], norm_weight [V], state_in [B * Hv, K, V].
    """
    BH = B * Hv
    shapes = {"q": (BH, K), "k": (BH, K), "v": (BH, V), "z": (BH, V), "a": (BH,), "b": (BH,), "dt_bias": (Hv,)}
    arguments = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    gain = 1 + 0.1 * rng.standard_normal(V)
    state = rng.standard_normal((BH, K, V))
    return {
        **arguments,
        "A_log": np.linspace(-8, 2, Hv, dtype=np.float32),
        "norm_weight": gain.astype(np.float32),
        "state_in": state.astype(np.float32),
    }


class Launches:
    """Runs a kernel by its name on the backend that "auto" takes, and keeps what went in and what came out.

    Attributes:
        kept: kernel -> (arguments, results) of its last launch.
    """

    def __init__(self) -> None:
        self.kept: dict[str, tuple[Mapping[str, Any], tuple[Any, ...]]] = {}

    def __call__(self, kernel: str, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        results: Any = backends.run(kernel, arguments, lnc=None, backend="auto")
        self.kept[kernel] = arguments, results if isinstance(results, tuple) else (results,)
        return self.kept[kernel][1]


def source(module: str, name: str, first: str = "", last: str = "") -> str:
    """The text of a top-level function, class or constant of a module of this package, read from its file; nothing is
    imported.

    Args:
        module: such as "kernels.conv1d".
        name: of the function, class or constant.
        first, last: show only the lines from the first one that contains `first` to the next that contains `last`.

    Raises:
        ValueError: naming the argument that isn't found.
    """
    file = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    if not file.is_file():
        raise ValueError(f"module must be one of gdn_kernels with a file of its own, got {module!r}")
    text = file.read_text()
    lines = text.splitlines()
    found = [node for node in ast.parse(text).body if name in _names(node)]
    if not found:
        raise ValueError(f"name must be a function, class or constant of {module}, got {name!r}")
    node: Any = found[0]
    begin = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
    end = node.end_lineno
    if first:
        begin = _line_with("first", first, lines, begin, end)
    if last:
        end = _line_with("last", last, lines, begin, end) + 1
    return "\n".join(lines[begin:end])


def _names(node: ast.stmt) -> list[str]:
    """What a statement defines."""
    targets: list[ast.AST] = getattr(node, "targets", [getattr(node, "target", node)])
    return [str(getattr(target, "name", getattr(target, "id", ""))) for target in targets]


def _line_with(argument: str, text: str, lines: Sequence[str], begin: int, end: int) -> int:
    for number in range(begin, end):
        if text in lines[number]:
            return number
    raise ValueError(f"{argument} must be part of a line of the function, got {text!r}")


def show_source(module: str, name: str, first: str = "", last: str = "") -> None:
    """Display what `source` returns, with the file's name above it."""
    text = source(module, name, first, last)
    title = f"gdn_kernels/{module.replace('.', '/')}.py"
    _display(f"# {title}\n{text}", "text/markdown", f"`{title}`\n\n```python\n{text}\n```")


def takeaway(text: str) -> None:
    """Display one sentence in a box; `code` in backquotes."""
    parts = escape(text).split("`")
    marked = "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
    _display(
        f"Takeaway: {text}", "text/html", f'<table><tr><td style="{FRAME}"><b>Takeaway.</b> {marked}</td></tr></table>'
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Display a table, its first column to the left and the others to the right."""
    text = tables.table(headings, [[str(cell) for cell in row] for row in rows], markdown=True)
    _display(text, "text/markdown", text)


def check(what: str, error: float, below: float) -> None:
    """Print that an error is below its limit. The error itself would differ in its last digits on another machine.

    Raises:
        AssertionError: if it isn't.
    """
    if not error < below:
        raise AssertionError(f"{what}: {error:.3g}, expected below {below:.3g}")
    print(f"ok  {what}: below {below:.0e}" if below < 1 else f"ok  {what}: below {below:g}")


def picture(figure: Figure, alt: str) -> None:
    """Display a figure with `alt` as its alternative text: as SVG, or as PNG if it holds an image, which GitHub drops
    from an SVG.

    Raises:
        ValueError: if it takes more than 150 KB.
    """
    if any(ax.images for ax in figure.axes):
        _display_png(png(figure), alt)
    else:
        _display(alt, "image/svg+xml", _not_too_large(svg(figure, alt)), {"image/svg+xml": {"alt": alt}})


def drawing(draw: Callable[[Path], None], alt: str) -> None:
    """Display the PNG that `draw` writes to the path it is given, such as a figure of `plots`, with `alt` as its
    alternative text.

    Raises:
        ValueError: if it takes more than 150 KB.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.png"
        draw(path)
        _display_png(path.read_bytes(), alt)


def _display_png(data: bytes, alt: str) -> None:
    text = _not_too_large(base64.b64encode(data).decode())
    _display(alt, "image/png", text, {"image/png": {"alt": alt, "width": _page_width(data)}})


def _page_width(data: bytes) -> int:
    """The width of a PNG in dots of a page, of which its own are a fraction."""
    from PIL import Image

    picture = Image.open(io.BytesIO(data))
    return min(WIDEST, round(picture.width * SCREEN / picture.info["dpi"][0]))


def _not_too_large(text: str) -> str:
    if len(text) > LARGEST_PICTURE:
        raise ValueError(f"figure must take at most {LARGEST_PICTURE} characters, got {len(text)}")
    return text


def png(figure: Figure) -> bytes:
    """A figure as PNG without a background, in dots for a dense screen."""
    data = io.BytesIO()
    figure.savefig(data, format="png", transparent=True, dpi=SHARP, metadata={"Software": None})
    return data.getvalue()


def svg(figure: Figure, alt: str) -> str:
    """A figure as SVG without a background. The same figure gives the same text: no date, fixed ids.

    Text stays text, and what matplotlib draws by reference is drawn where it stands: GitHub drops references.
    """
    import matplotlib

    data = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "gdn_kernels", "svg.fonttype": "none"}):
        figure.savefig(data, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", SVG.strip("{}"))
    root = ElementTree.fromstring(data.getvalue())
    _without_references(root)
    _made_to_fit(root)
    text = ElementTree.tostring(root, encoding="unicode")
    return text.replace("<svg ", f'<svg role="img" aria-label={quoteattr(alt)} ', 1).rstrip() + "\n"


def _made_to_fit(root: ElementTree.Element) -> None:
    """An SVG wider than WIDEST is shown smaller, as a whole."""
    width, height = (float(root.attrib[name].removesuffix("pt")) for name in ("width", "height"))
    scale = min(1.0, WIDEST / SCREEN * 72 / width)
    root.set("width", f"{width * scale:g}pt")
    root.set("height", f"{height * scale:g}pt")


def _without_references(root: ElementTree.Element) -> None:
    """Every <use> of an SVG replaced by what it refers to, the definitions and the metadata dropped."""
    defined = {element.get("id"): element for element in root.iter(f"{SVG}path") if element.get("id")}
    for parent in list(root.iter()):
        for place, child in enumerate(list(parent)):
            if child.tag == f"{SVG}use":
                original = defined[child.get(f"{XLINK}href", "").removeprefix("#")]
                style = "; ".join(part for part in (child.get("style"), original.get("style")) if part)
                moved = f"translate({child.get('x', '0')} {child.get('y', '0')})"
                parent[place] = ElementTree.Element(
                    f"{SVG}path", {"d": original.get("d", ""), "transform": moved, "style": style}
                )
            elif child.tag == f"{SVG}metadata":
                parent.remove(child)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag == f"{SVG}defs" and all(part.tag == f"{SVG}path" for part in child):
                parent.remove(child)


def slider(draw: Callable[[int], Figure], values: Sequence[int], what: str) -> None:
    """Display a slider over `values` and the figure that `draw` makes of the chosen one.

    Only where somebody can move it: a run without a person, whose outputs are stored, prints one line instead, and so
    does one without ipywidgets. What the slider shows has to stand beside it as a picture.

    Args:
        what: the values are, in words.
    """
    if not _somebody_is_there():
        print(f"Run this cell in JupyterLab for a slider over {what}, {values[0]:,} to {values[-1]:,}.")
        return
    try:
        _display_slider(draw, values, what)
    except ImportError:
        print(f"A slider over {what} needs ipywidgets: pip install ipywidgets")


def _somebody_is_there() -> bool:
    """Whether the front end that asked for this cell can ask a person; nbclient and nbval can't."""
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    return kernel is not None and bool(kernel.get_parent().get("content", {}).get("allow_stdin", False))


def _display_slider(draw: Callable[[int], Figure], values: Sequence[int], what: str) -> None:
    from IPython.display import display
    from ipywidgets import HTML, SelectionSlider, VBox  # type: ignore[import-untyped]

    choice = SelectionSlider(options=[(f"{value:,}", value) for value in values], description=what)
    shown = HTML()

    def show(_: object = None) -> None:
        data = png(draw(choice.value))
        image = base64.b64encode(data).decode()
        shown.value = f'<img src="data:image/png;base64,{image}" width="{_page_width(data)}" alt="{choice.label}">'

    choice.observe(show, "value")
    show()
    display(VBox([choice, shown]))


def rollouts(folder: Path, **fields: object) -> list[Result]:
    """The saved rollouts in a folder whose config has these values, in order of their seeds.

    Raises:
        ValueError: if there is none.
    """
    found = [result for result in _saved(folder) if all(result.config[name] == value for name, value in fields.items())]
    if not found:
        raise ValueError(f"folder must hold a rollout with {fields}, got none in {folder}; data/README.md makes them")
    return sorted(found, key=lambda result: int(result.config["seed"]))


@cache
def _saved(folder: Path) -> list[Result]:
    from gdn_kernels.drift import store

    return [store.load(path) for path in sorted(folder.rglob("*.npz")) if "checkpoint" not in path.name]


def _display(plain: str, kind: str, rich: str, details: dict[str, Any] | None = None) -> None:
    from IPython.display import display

    display({"text/plain": plain, kind: rich}, raw=True, metadata=details or {})
