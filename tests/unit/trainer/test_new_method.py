# SPDX-License-Identifier: Apache-2.0
"""A method is one file: the one that optim/README.md teaches is known to the command line as soon as it is there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program with one more file, and another like it, whose setting has no default."""
    folder = tmp_path_factory.mktemp("copy") / "isthmus"
    shutil.copytree(REPOSITORY / "src" / "isthmus", folder, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "optim" / "README.md").read_text(), flags=re.DOTALL)
    (method,) = (block for block in blocks if '@register("average")' in block)
    (folder / "optim" / "average.py").write_text(method)
    needy = method.replace('"average"', '"needy"').replace("inner_steps: int = 100", "inner_steps: int")
    (folder / "optim" / "needy.py").write_text(needy)
    return folder


RUN_ALL = """
import contextlib, io, json, sys
from isthmus.trainer.cli.app import run
outcomes = []
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    outcomes.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(outcomes))
"""
SHOW = ("config", "show", "--outer.type", "average", "--outer.inner-steps", "5", "--origin")
REFERENCE = ("config", "reference")
MISTAKES = {
    ("average", "--outer.inner_steps", "0"): "isthmus: [outer] inner_steps must be at least 1, got 0\n",
    ("average", "--outer.momentum", "0.5"): (
        'isthmus: outer.momentum from --outer.momentum does not belong to outer.type = "average"; remove it or set'
    ),
    ("needy",): "isthmus: outer.inner_steps is not given, and this outer.type has no default for it\n",
    ("avrage",): 'isthmus: outer.type from --outer.type is "avrage", expected .*; did you mean average?\n',
}


Outcomes = dict[tuple[str, ...], tuple[int, str, str]]


@pytest.fixture(scope="module")
def outcomes(package: Path) -> Outcomes:
    """Exit code, stdout and stderr of all command lines, in one process of that copy."""
    lines = [SHOW, REFERENCE, *(("up", "--outer.type", *told) for told in MISTAKES)]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(lines)],
        cwd=package.parent,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return dict(zip(lines, map(tuple, json.loads(done.stdout)), strict=True))


def test_a_run_can_name_it_and_is_shown_its_settings_with_their_meaning(outcomes: Outcomes) -> None:
    code, shown, error = outcomes[SHOW]
    assert code == 0, error
    (section,) = re.findall(r"\[outer\]\n(.*?)\n\n", shown, flags=re.DOTALL)
    assert section.splitlines()[0].startswith('type = "average"  # (--outer.type) One of async, autoloco, average, ')
    assert 'codec = "int8"  # (default) ' in section
    assert section.splitlines()[-1] == "inner_steps = 5  # (--outer.inner_steps) H, inner steps between exchanges, >= 1"
    assert "momentum" not in section


def test_the_page_of_all_keys_has_it(outcomes: Outcomes) -> None:
    _, page, _ = outcomes[REFERENCE]
    heading, _, rest = page.partition('### [outer] with `type = "average"`')
    assert rest.startswith("\n\nLocal SGD: every H inner steps the workers' parameters are replaced by their mean.\n")
    assert "| `inner_steps` | `100` | H, inner steps between exchanges, >= 1. |" in rest.partition("###")[0]
    assert "average" in heading.partition("## [outer]")[2], "among the types"
    assert "| `inner_steps` | must be given |" in rest.partition('"needy"')[2].partition("###")[0]


@pytest.mark.parametrize("told", MISTAKES)
def test_what_is_wrong_with_it_is_told_before_there_is_a_run(
    outcomes: Outcomes, package: Path, told: tuple[str, ...]
) -> None:
    code, out, error = outcomes["up", "--outer.type", *told]
    assert (code, out) == (2, "")
    assert re.match(re.escape(MISTAKES[told]).replace(re.escape(".*"), ".*"), error), error
    assert not (package.parent / "runs").exists()
