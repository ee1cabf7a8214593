# SPDX-License-Identifier: Apache-2.0
"""What is installed has one name, and modules of a user's own that are called as ours do not matter."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.multiprocess.run_harness import running

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
FOREIGN = "raise SystemExit('a module of the user was taken for one of isthmus')\n"

pytestmark = pytest.mark.multiprocess


def build_wheel(folder: Path) -> Path:
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT], check=True, timeout=60)
    (wheel,) = folder.glob("*.whl")
    return wheel


def bare_environment(folder: Path, wheel: Path) -> Path:
    """A virtual environment with the wheel; its dependencies are those that are installed here, isthmus is not."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    python = folder / "bin" / "python"
    subprocess.run([*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True, timeout=60)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "isthmus"


def test_a_wheel_has_one_importable_name_and_trains_beside_modules_that_are_called_as_its_packages(
    tmp_path: Path,
) -> None:
    wheel = build_wheel(tmp_path / "wheel")
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"isthmus"}
    isthmus = bare_environment(tmp_path / "venv", wheel)
    with running(tmp_path) as run:
        for name in ("trainer", "optim", "isthmus"):
            (run.folder / f"{name}.py").write_text(FOREIGN)
        for name in ("collective", "elastic"):
            (run.folder / name).mkdir()
            (run.folder / name / "__init__.py").write_text(FOREIGN)
        flags = ("-c", str(run.config), "--data", str(run.text), "--run.outer-steps", "2", "--node.threads", "1")
        peer = run.start("up", *flags, program=(str(isthmus),))
        assert run.until_ended(peer) == [0], run.story()
        assert peer.step == 2
