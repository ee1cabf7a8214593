# SPDX-License-Identifier: Apache-2.0
"""tests/gpu. On a CUDA device those that need one; their twins on the CPU run with all other tests."""

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest  # noqa: F401 - whether it is here

from scripts.gpubench.task import Figures, Task

_ROOT = Path(__file__).parents[2]
_STORY_CHARS = 2000


def measure(task: Task) -> Figures:
    """How many passed, and the story of each that did not."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # Plugins that are not installed leave settings that nobody knows; pytest is told not to mind.
        command = [
            *(sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"),
            *("-o", "addopts=--import-mode=importlib --strict-markers", "-W", "ignore::pytest.PytestConfigWarning"),
            *(("-m", "gpu") if task.is_cuda else ("-m", "not gpu", "-k", "zeros and int8")),
        ]
        done = subprocess.run(
            command, cwd=_ROOT, env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=False
        )
        if not report.exists():
            return {"ok": False, "stories": {"pytest": (done.stdout + done.stderr)[-_STORY_CHARS:]}}
        return _told(report)


def _told(report: Path) -> Figures:
    # The file is pytest's own, from a folder that is ours alone.
    cases = list(ElementTree.parse(report).iter("testcase"))
    stories, skipped = {}, {}
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        for kind in ("failure", "error"):
            if (story := case.find(kind)) is not None:
                stories[name] = (story.text or "")[-_STORY_CHARS:]
        if (reason := case.find("skipped")) is not None:
            skipped[name] = re.sub(r"\s+", " ", reason.get("message") or "")
    passed = len(cases) - len(stories) - len(skipped)
    return {"ok": not stories and passed > 0, "passed": passed, "skipped": skipped, "stories": stories}
