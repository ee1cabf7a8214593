# SPDX-License-Identifier: Apache-2.0
"""Every file of scenarios/ still tells its story."""

import dataclasses
from pathlib import Path

import pytest

from tests.simulation.cli import main
from tests.simulation.scenario import FOLDER, Expected, Scenario

FILES = sorted(FOLDER.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario_tells_its_story(path: Path) -> None:
    scenario = Scenario.load(path)
    outcome, actual = scenario.run()
    assert actual == scenario.expect, f"{outcome.violation}; {path.name}: {scenario.title}"


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 15
    assert len({Scenario.load(path).title for path in FILES}) == len(FILES)


def test_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    scenario = Scenario(
        title='it says "no"\\',
        why="two\nlines",
        seed=7,
        mutant="no_commit_round",
        options={"num_peers": 2, "train_s": [0.5, 1e-7], "wrong_manifest": True, "plan": "ring"},
        script=["start", "run 1"],
        expect=Expected("I3", "", ["view 1 of 1.1: 1 joined"]),
    )
    scenario.save(tmp_path / "a.toml")
    assert Scenario.load(tmp_path / "a.toml") == scenario


@pytest.mark.parametrize("step", ["jumps 1", "until pigs fly"])
def test_step_that_nobody_knows_is_an_error(step: str) -> None:
    outcome, _ = Scenario(title="", script=[step]).run()
    assert outcome.violation is not None
    assert "no such" in outcome.violation.what


def test_history_that_changed_ends_the_command_with_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "changed.toml"
    original = Scenario.load(FOLDER / "shrink_to_one_and_grow.toml")
    changed = dataclasses.replace(original, expect=Expected(story=[*original.expect.story[:-1], "commits 9 to 11"]))
    changed.save(path)
    assert main(["--scenario", str(path)]) == 1
    assert "-commits 9 to 11" in capsys.readouterr().out
    assert main(["--scenario", str(path), "--rewrite"]) == 0
    assert main(["--scenario", str(path)]) == 0
    assert Scenario.load(path) == original
