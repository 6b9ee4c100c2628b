"""The README's two figures are what the code draws now, and its texts beside them have the numbers of now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from readme_figures import FOLDER, MODEL, POLICIES, Drawn, drift, microseconds, readme_figures, with_alts

from gdn_kernels import MODELS
from gdn_kernels.latency.model import model_block
from gdn_kernels.timeline.costs import TRN2

Image = pytest.importorskip("PIL.Image")
LARGEST = 150_000  # bytes
ALIKE = 40.0  # of 255: letters drawn by another build of matplotlib move by less, a bar or a curve by more
BLOCK = 12  # dots
ANEW = "draw them anew with: python tests/readme_figures.py"


def difference(one: Path, other: Path) -> float:
    """The largest difference of two pictures, in 255ths, between means over small blocks; infinite if their sizes
    differ."""
    pictures = [Image.open(path).convert("RGBA") for path in (one, other)]
    if pictures[0].size != pictures[1].size:
        return float("inf")
    width, height = (-(-side // BLOCK) for side in pictures[0].size)
    small = [np.asarray(picture.resize((width, height), Image.Resampling.BOX), float) for picture in pictures]
    return float(abs(small[0][..., 3:] * small[0] - small[1][..., 3:] * small[1]).max() / 255)


@pytest.fixture(scope="module")
def drawn() -> dict[str, Drawn]:
    return readme_figures()


def test_figures_are_what_the_code_draws(drawn: dict[str, Drawn], root: Path, tmp_path: Path) -> None:
    assert {path.name for path in (root / FOLDER).iterdir()} == set(drawn)
    for name, figure in drawn.items():
        figure.draw(tmp_path / name)
        assert difference(root / FOLDER / name, tmp_path / name) < ALIKE, ANEW
        assert (root / FOLDER / name).stat().st_size < LARGEST


def test_readme_shows_them_with_the_numbers_of_now(drawn: dict[str, Drawn], root: Path) -> None:
    readme = (root / "README.md").read_text()
    assert with_alts(readme, drawn) == readme, ANEW
    assert "modelled" in drawn["microseconds.png"].alt and all(len(figure.alt) > 50 for figure in drawn.values())


def test_they_are_readable_on_light_and_dark(drawn: dict[str, Drawn], root: Path) -> None:
    """Nothing but see-through ground and inks, each at least three times as light or dark as either page."""
    for name in drawn:
        dots = np.asarray(Image.open(root / FOLDER / name).convert("RGBA"))
        assert (dots[..., 3] == 0).mean() > 0.5
        inks = np.unique(dots[dots[..., 3] == 255][:, :3], axis=0) / 255
        assert len(inks) > 1
        for page in (1.0, luminance(np.array([13, 17, 23]) / 255)):
            assert contrasts(luminance(inks), page).min() > 3


def luminance(colours: np.ndarray) -> np.ndarray:
    """Relative luminance of sRGB colours [..., 3] from 0 to 1, as WCAG 2 defines it."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def contrasts(ink: np.ndarray, page: float) -> np.ndarray:
    return (np.maximum(ink, page) + 0.05) / (np.minimum(ink, page) + 0.05)


def slower() -> Drawn:
    return microseconds(model_block(MODELS[MODEL].dims, B=1, costs=replace(TRN2, dma_latency=TRN2.dma_latency + 3000)))


def other_data() -> Drawn:
    """The product in place of the kernel's form of the decay, which is twice as far off."""
    return drift({{"ours": "ours_product"}.get(name, name): label for name, label in POLICIES.items()})


def test_other_numbers_are_noticed(root: Path, tmp_path: Path) -> None:
    readme = (root / "README.md").read_text()
    for name, other in (("microseconds.png", slower()), ("drift.png", other_data())):
        other.draw(tmp_path / name)
        assert difference(root / FOLDER / name, tmp_path / name) > ALIKE
        assert with_alts(readme, {name: other}) != readme


def test_a_figure_that_the_readme_does_not_show_is_noticed(drawn: dict[str, Drawn]) -> None:
    with pytest.raises(AssertionError, match=r"README\.md shows drift\.png 0 times"):
        with_alts("no figure", {"drift.png": drawn["drift.png"]})
