# SPDX-License-Identifier: Apache-2.0
"""What examples/ says of itself. That the scripts do what they should: tests/multiprocess/test_attach.py."""

import re
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
PAIRS = [("bare_loop.py", "attached_loop.py"), ("bare_trainer.py", "hf_trainer.py")]


@pytest.mark.parametrize(("bare", "member"), PAIRS)
def test_a_loop_needs_few_lines_to_be_a_member_and_the_readme_shows_them(bare: str, member: str) -> None:
    done = subprocess.run(["diff", bare, member], cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    added = [line for line in done.stdout.splitlines() if line.startswith("> ") and line[2:].strip()]
    assert 0 < len(added) <= 15
    assert "isthmus" not in (EXAMPLES / bare).read_text()
    assert f"```\n{done.stdout.rstrip()}\n```" in (EXAMPLES / "README.md").read_text()


def test_the_readme_names_every_script() -> None:
    named = set(re.findall(r"^\| `(\w+\.py)` ", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert named == {path.name for path in EXAMPLES.glob("*.py")}
