# SPDX-License-Identifier: Apache-2.0
"""A method is one file: the one that optim/README.md teaches is known to the command line as soon as it is there."""

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


def isthmus(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from isthmus.trainer.cli.app import main; main()", *arguments],
        cwd=package.parent,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_run_can_name_it_and_is_shown_its_settings_with_their_meaning(package: Path) -> None:
    done = isthmus(package, "config", "show", "--outer.type", "average", "--outer.inner-steps", "5", "--origin")
    assert done.returncode == 0, done.stderr
    (section,) = re.findall(r"\[outer\]\n(.*?)\n\n", done.stdout, flags=re.DOTALL)
    assert section.splitlines()[0].startswith('type = "average"  # (--outer.type) One of async, autoloco, average, ')
    assert 'codec = "int8"  # (default) ' in section
    assert section.splitlines()[-1] == "inner_steps = 5  # (--outer.inner_steps) H, inner steps between exchanges, >= 1"
    assert "momentum" not in section


def test_the_page_of_all_keys_has_it(package: Path) -> None:
    page = isthmus(package, "config", "reference").stdout
    heading, _, rest = page.partition('### [outer] with `type = "average"`')
    assert rest.startswith("\n\nLocal SGD: every H inner steps the workers' parameters are replaced by their mean.\n")
    assert "| `inner_steps` | `100` | H, inner steps between exchanges, >= 1. |" in rest.partition("###")[0]
    assert "average" in heading.partition("## [outer]")[2], "among the types"
    assert "| `inner_steps` | must be given |" in rest.partition('"needy"')[2].partition("###")[0]


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (["average", "--outer.inner_steps", "0"], "isthmus: [outer] inner_steps must be at least 1, got 0\n"),
        (
            ["average", "--outer.momentum", "0.5"],
            'isthmus: outer.momentum from --outer.momentum does not belong to outer.type = "average"; remove it or set',
        ),
        (["needy"], "isthmus: outer.inner_steps is not given, and this outer.type has no default for it\n"),
        (["avrage"], 'isthmus: outer.type from --outer.type is "avrage", expected .*; did you mean average?\n'),
    ],
)
def test_what_is_wrong_with_it_is_told_before_there_is_a_run(package: Path, told: list[str], sentence: str) -> None:
    done = isthmus(package, "up", "--outer.type", *told)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.match(re.escape(sentence).replace(re.escape(".*"), ".*"), done.stderr), done.stderr
    assert not (package.parent / "runs").exists()
