"""What the notebooks show, as they hand it to a front end: pictures, sliders, saved rollouts, kept launches."""

import base64
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdn_kernels import figures_drift, notebook
from gdn_kernels import figures_recurrence as figures

pytest.importorskip("matplotlib")
pytest.importorskip("IPython")
SVG = "image/svg+xml"
PNG = b"\x89PNG"
SAVED = Path(__file__).resolve().parent.parent / "data" / "drift"


def curve(head: int = 0) -> Any:
    errors = np.geomspace(1e-6, 1e-3, 2 * 5 * 3).reshape(2, 5, 3)  # [seeds, records, Hv]
    return figures_drift.one_head(np.array([1, 2, 4, 8, 16]), {"a": errors}, np.array([1, 10, 100]), head)


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda content, **_: seen.append(content))
    return seen


def test_a_picture_of_lines_is_an_svg_without_references(displayed: list[Any]) -> None:
    notebook.picture(figures.step_errors(np.full(3, 1e-8), 5e-7, "steps"), alt="three points and a limit")
    text = displayed[0]["image/svg+xml"]
    assert "<use" not in text and "xlink" not in text and "<metadata" not in text
    assert text.count("translate(") >= 3  # the markers, where they stand
    assert ">decode step</text>" in text


def test_a_picture_that_holds_an_image_is_a_png(displayed: list[Any]) -> None:
    states = [np.random.default_rng(0).standard_normal((2, 32, 32))]
    notebook.picture(figures.state_at_token(states, {0: "head 0", 1: "head 1"}, 1), alt="two heads")
    assert base64.b64decode(displayed[0]["image/png"]).startswith(PNG)


def test_a_picture_that_is_too_large_is_refused(displayed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "LARGEST_PICTURE", 1000)
    with pytest.raises(ValueError, match=r"^figure must take at most 1000"):
        notebook.picture(curve(), alt="a curve")
    assert not displayed


def test_what_is_too_wide_for_a_page_is_shown_smaller(displayed: list[Any]) -> None:
    for width, shown in ((11, notebook.WIDEST), (5, 5 * notebook.SCREEN)):
        figure = figures.step_errors(np.full(3, 1e-8), 5e-7, "steps")
        figure.set_size_inches(width, 2)
        notebook.picture(figure, alt="three points and a limit")
        found = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt" viewBox="0 0 (\d+) (\d+)', displayed[-1][SVG])
        assert found is not None
        page_width, page_height, *inside = map(float, found.groups())
        assert page_width * notebook.SCREEN / 72 == pytest.approx(shown)
        assert inside == [width * 72, 144] and page_width / page_height == pytest.approx(width / 2)


def test_a_drawing_is_what_was_written_to_the_path(displayed: list[Any]) -> None:
    notebook.drawing(curve().savefig, alt="a curve")
    assert base64.b64decode(displayed[0]["image/png"]).startswith(PNG)


def test_without_a_person_a_slider_is_one_line(displayed: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    notebook.slider(curve, range(3), "the heads")
    assert capsys.readouterr().out.count("\n") == 1 and not displayed


def test_a_slider_redraws_when_it_is_moved(displayed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipywidgets")
    monkeypatch.setattr(notebook, "_somebody_is_there", lambda: True)
    notebook.slider(curve, range(3), "the heads")
    choice, shown = displayed[0].children
    before = shown.value
    choice.value = 2
    assert before.startswith("<img") and shown.value != before
    choice.value = 0
    assert shown.value == before


def test_without_ipywidgets_a_slider_says_so(
    displayed: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notebook, "_somebody_is_there", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    notebook.slider(curve, range(3), "the heads")
    assert "pip install ipywidgets" in capsys.readouterr().out and not displayed


def test_saved_rollouts_are_found_by_their_config() -> None:
    found = notebook.rollouts(SAVED / "seeds", policy="exact", stream="repeated")
    assert [result.config["seed"] for result in found] == list(range(8))
    with pytest.raises(ValueError, match=r"^folder must hold"):
        notebook.rollouts(SAVED / "seeds", policy="exact", stream="nothing")


def test_a_launch_keeps_what_went_in_and_came_out() -> None:
    launch = notebook.Launches()
    rows = {name: np.ones((1, 128), np.float32) for name in ("o", "z")}
    weights = {"norm_weight": np.ones(64, np.float32), "norm_eps": 1e-6, "dtype": np.dtype(np.float32)}
    (out,) = launch("gated_norm_stage", {**rows, **weights})
    arguments, results = launch.kept["gated_norm_stage"]
    assert arguments["o"] is rows["o"] and results[0] is out


def test_the_source_of_a_constant_is_its_assignment() -> None:
    assert notebook.source("policy", "BF16_STATE").startswith("BF16_STATE = Roundings(")
