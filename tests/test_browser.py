"""A notebook in a real browser: headless Chromium runs it in JupyterLab as a person would; what it shows is checked.

The browser and its driver are the distribution's; nothing is downloaded. GDN_BROWSER=required makes their absence a
failure, where it would be a reason to skip.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver")
pytest.importorskip("jupyterlab")

PATIENCE = 180  # seconds; on an idle machine everything here takes some twenty
WIDTH = 1366  # of a laptop's screen
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DRIVER = "chromedriver"
INSTALL = "no browser here: apt-get install chromium chromium-driver"

# All cells stand in the page, not only those in view; nothing asks a question or looks for news.
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none", "autoStartDefaultKernel": True},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
}

IDLE = """
const panel = window.jupyterapp && window.jupyterapp.shell.currentWidget;
const kernel = panel && panel.sessionContext && panel.sessionContext.session && panel.sessionContext.session.kernel;
return Boolean(kernel && kernel.status === 'idle' && panel.content.widgets.length);
"""
RUN_ALL = """
const done = arguments[arguments.length - 1], commands = window.jupyterapp.commands;
commands.execute('notebook:clear-all-cell-outputs')
    .then(() => commands.execute('notebook:run-all-cells'))
    .then(() => done('ran'), error => done(String(error)));
"""
SHOWN = """
const panel = window.jupyterapp.shell.currentWidget.node, all = query => [...panel.querySelectorAll(query)];
const size = e => { const box = e.getBoundingClientRect(); return [box.width, box.height]; };
return {
    prompts: all('.jp-CodeCell .jp-InputPrompt').map(e => e.textContent.trim()),
    pictures: all('.jp-OutputArea-output img, .jp-OutputArea-output svg').map(size),
    broken: all('.jp-OutputArea-output img').filter(e => !e.complete || !e.naturalWidth).length,
    cut: all('.jp-OutputArea-output:has(img, svg)').filter(e => e.scrollWidth > e.clientWidth).length,
    errors: all('[data-mime-type$="jupyter.error"], [data-mime-type$="jupyter.stderr"]').map(e => e.textContent),
    height: Math.max(...all('.jp-WindowedPanel-outer').map(e => e.scrollHeight)),
};
"""

TO_THE_TOP = """
const done = arguments[arguments.length - 1], notebook = window.jupyterapp.shell.currentWidget.content;
notebook.activeCellIndex = 0;
requestAnimationFrame(() => {
    notebook.outerNode.scrollTop = 0;
    requestAnimationFrame(() => done(notebook.outerNode.scrollTop));
});
"""


@dataclass(frozen=True)
class Lab:
    """A JupyterLab server: its address, its token, and the folder it shows."""

    url: str
    token: str
    folder: Path


@dataclass(frozen=True)
class Shown:
    """What a notebook shows after all cells have run."""

    prompts: list[str]
    pictures: list[list[float]]  # width and height, in dots of the page
    broken: int
    cut: int
    errors: list[str]
    height: float


def installed() -> tuple[str, str]:
    """The browser and its driver. Where either is missing the test is skipped, or fails if they are required."""
    browser, driver = next(filter(None, map(shutil.which, BROWSERS)), None), shutil.which(DRIVER)
    if browser is None or driver is None:
        (pytest.fail if os.environ.get("GDN_BROWSER") == "required" else pytest.skip)(INSTALL)
    return browser, driver


@pytest.fixture(scope="module")
def binaries() -> tuple[str, str]:
    return installed()


@pytest.fixture(scope="module")
def lab(binaries: tuple[str, str], root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server over a copy of the notebooks, with no settings but the ones here."""
    home, folder, token = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("lab"), secrets.token_hex(16)
    for notebook in (root / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, folder)
    for name, values in SETTINGS.items():
        file = home / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    own = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    environment = {
        **os.environ,
        **{f"JUPYTER_{name}": str(home / name) for name in own},
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    options = ["--no-browser", "--allow-root", "--expose-app-in-browser", "--ServerApp.ip=127.0.0.1"]
    options += ["--ServerApp.port=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}"]
    log = home / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options], env=environment, stdout=file, stderr=file, cwd=folder
        )
    try:
        yield Lab(address(server, home / "RUNTIME_DIR", log), token, folder)
    finally:
        server.terminate()  # it ends its kernels itself
        server.wait(PATIENCE)


def address(server: subprocess.Popen[bytes], runtime: Path, log: Path) -> str:
    """Where the server listens, from the file that it leaves when it does."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and server.poll() is None:
        for file in runtime.glob("jpserver-*.json"):
            return str(json.loads(file.read_text())["url"])
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start:\n{log.read_text()}")


@pytest.fixture
def browser(binaries: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Headless Chromium through its own driver."""
    binary, driver = binaries
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for option in ("headless=new", "disable-gpu", "disable-dev-shm-usage", "no-first-run", f"window-size={WIDTH},1000"):
        options.add_argument(f"--{option}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # which Chromium refuses to have as root
    chromium = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        chromium.set_page_load_timeout(PATIENCE)
        chromium.set_script_timeout(PATIENCE)
        yield chromium
    finally:
        chromium.quit()


def run_all(browser: Any, lab: Lab, name: str, screenshot: Path) -> Shown:
    """Open a notebook, clear its outputs, run all of its cells, and keep a picture of the whole page."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(f"{lab.url}lab/tree/{name}?token={lab.token}&reset")
    WebDriverWait(browser, PATIENCE).until(lambda _: browser.execute_script(IDLE))
    assert browser.execute_async_script(RUN_ALL) == "ran"
    shown = Shown(**browser.execute_script(SHOWN))
    browser.set_window_size(WIDTH, min(int(shown.height) + 200, 16000))
    screenshot.parent.mkdir(parents=True, exist_ok=True)
    WebDriverWait(browser, PATIENCE).until(lambda _: browser.execute_async_script(TO_THE_TOP) == 0)
    assert browser.save_screenshot(str(screenshot))
    return shown


def stored_pictures(path: Path) -> int:
    cells = json.loads(path.read_text())["cells"]
    kinds = [kind for cell in cells for output in cell.get("outputs", []) for kind in output.get("data", {})]
    return sum(kind.startswith("image/") for kind in kinds)


def test_first_notebook_runs_and_shows_its_figures(browser: Any, lab: Lab, root: Path) -> None:
    name = "00_start_here.ipynb"
    shown = run_all(browser, lab, name, root / "build/00_start_here.png")
    assert shown.errors == []
    assert shown.prompts == [f"[{number}]:" for number in range(1, len(shown.prompts) + 1)] and shown.prompts
    assert len(shown.pictures) == stored_pictures(root / "notebooks" / name) > 0
    assert shown.broken == shown.cut == 0 and all(min(size) > 100 for size in shown.pictures)


def test_a_cell_that_fails_and_a_picture_that_does_not_fit_are_noticed(browser: Any, lab: Lab, tmp_path: Path) -> None:
    wide = '<svg xmlns="http://www.w3.org/2000/svg" width="3000" height="200"/>'
    shows = f"from IPython.display import SVG, display\ndisplay(SVG({wide!r}))"
    sources = [shows, "1 / 0", "print(2)"]
    cells = [
        {"cell_type": "code", "id": f"c{i}", "source": source, "metadata": {}, "outputs": [], "execution_count": None}
        for i, source in enumerate(sources)
    ]
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    content = {"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": cells}
    (lab.folder / "broken.ipynb").write_text(json.dumps(content))
    shown = run_all(browser, lab, "broken.ipynb", tmp_path / "broken.png")
    assert len(shown.errors) == 1 and "ZeroDivisionError" in shown.errors[0]
    assert shown.prompts[-1] == "[ ]:"
    assert shown.cut == 1 and len(shown.pictures) == 1


def test_a_missing_browser_is_a_failure_where_it_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for value, outcome in (("required", pytest.fail.Exception), ("", pytest.skip.Exception)):
        monkeypatch.setenv("GDN_BROWSER", value)
        with pytest.raises(outcome, match="apt-get install chromium chromium-driver"):
            installed()
