"""Settings that every test shares. They must take effect before NumPy, torch or transformers are imported."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# A shell's background job ignores Ctrl-C and hands that on to what it starts; some tests are about Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Nothing is downloaded in a test.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shared machine makes single examples slow now and then, which says nothing about the code. Derandomised, so that a
# change can't fail on an example that has nothing to do with it; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def tracked(root: Path) -> list[Path]:
    """The files of the source tree that belong to it: those git tracks, and new ones that it doesn't ignore."""
    if shutil.which("git") is None:
        pytest.skip("no git here")
    # A build machine may run as another user than the owner of the checkout, which git refuses unless told.
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(git, cwd=root, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [root / name for name in listing.stdout.decode().split("\0") if name and (root / name).is_file()]
