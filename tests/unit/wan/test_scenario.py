# SPDX-License-Identifier: Apache-2.0
"""Scenarios: what is understood, and what is refused with which words."""

import dataclasses
import json

import pytest

from scripts.wanlink.scenario import (
    LinkSettings,
    PortSettings,
    Scenario,
    ScenarioError,
    Step,
    after,
    paths,
    read,
    step_from,
)


def test_every_part_of_a_scenario_is_read() -> None:
    scenario = read(
        """{"peers": 3, "seed": 5, "sysctls": {"net.ipv4.tcp_no_metrics_save": 1},
            "links": {"*": {"delay_ms": 75}, "0-2": {"loss_percent": 0.1}}, "ports": {"2": {"up_mbit": 30}},
            "timeline": [{"at_s": 1, "cut": ["0>1"]},
                         {"at_s": 2.5, "heal": ["0>1"], "ports": {"0": {"up_mbit": 5}}}]}"""
    )
    assert scenario == Scenario(
        peers=3,
        seed=5,
        sysctls={"net.ipv4.tcp_no_metrics_save": "1"},
        start=Step(links={"*": {"delay_ms": 75}, "0-2": {"loss_percent": 0.1}}, ports={"2": {"up_mbit": 30}}),
        timeline=(Step(at_s=1, cut=("0>1",)), Step(at_s=2.5, heal=("0>1",), ports={"0": {"up_mbit": 5}})),
    )


def test_step_survives_json() -> None:
    step = Step(at_s=2, links={"*": {"delay_ms": 1.5}}, ports={"0": {"up_mbit": 3}}, cut=("0>*",), heal=("0-1",))
    assert step_from(json.loads(json.dumps(dataclasses.asdict(step)))) == step


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("0>1", {(0, 1)}),
        ("0-2", {(0, 2), (2, 0)}),
        ("1>*", {(1, 0), (1, 2)}),
        ("*>1", {(0, 1), (2, 1)}),
        ("*", {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}),
    ],
)
def test_paths_by_their_names(name: str, pairs: set[tuple[int, int]]) -> None:
    assert set(paths(name, 3)) == pairs


@pytest.mark.parametrize("name", ["", "0", "0>3", "0>0", "a>b", "0>1>2", "-1>0", "0>١"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ScenarioError):
        paths(name, 3)


def test_later_entries_go_over_earlier_ones_and_unnamed_keys_stay() -> None:
    links = dict.fromkeys(paths("*", 2), LinkSettings(delay_ms=9, loss_percent=1))
    step = Step(links={"*": {"delay_ms": 5}, "0>1": {"loss_percent": 2}})
    changed, ports = after(step, links, dict.fromkeys(range(2), PortSettings()))
    assert changed == {
        (0, 1): LinkSettings(delay_ms=5, loss_percent=2),
        (1, 0): LinkSettings(delay_ms=5, loss_percent=1),
    }
    assert ports == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "must be a table"),
        ("{}", '"peers" must be there'),
        ('{"peers": true}', "whole numbers"),
        ('{"peers": 1}', "give 2 to 8"),
        ('{"peers": 9}', "give 2 to 8"),
        ('{"peers": 2, "link": {}}', "unknown key 'link'"),
        ('{"peers": 2, "links": {"*": {"delay": 1}}}', "unknown key 'delay'"),
        ('{"peers": 2, "links": {"*": {"delay_ms": "1"}}}', "not a number"),
        ('{"peers": 2, "links": {"*": {"delay_ms": NaN}}}', "out of range"),
        ('{"peers": 2, "links": {"*": {"delay_ms": -1}}}', "out of range"),
        ('{"peers": 2, "links": {"*": {"loss_percent": 101}}}', "out of range"),
        ('{"peers": 2, "links": {"*": {"jitter_ms": 1}}}', "jitter_ms exceeds delay_ms"),
        ('{"peers": 2, "links": {"*": {"burst_enter_percent": 1, "burst_leave_percent": 0}}}', "never ends"),
        ('{"peers": 2, "links": {"0>2": {}}}', "write 0 to 1"),
        ('{"peers": 2, "ports": {"5": {}}}', "write 0 to 1"),
        ('{"peers": 2, "ports": {"0": {"queue_ms": 1e9}}}', "out of range"),
        ('{"peers": 2, "sysctls": {"kernel.panic": 1}}', "only those below net."),
        ('{"peers": 2, "sysctls": {"net../x": 1}}', "only those below net."),
        ('{"peers": 2, "timeline": [{"at_s": 2}, {"at_s": 1}]}', "goes back in time"),
        ('{"peers": 2, "timeline": [{"at": 2}]}', "unknown key 'at'"),
        ('{"peers": 2, "timeline": [{"cut": "0>1"}]}', "must be a list"),
        ('{"peers": 2, "timeline": [{"links": {"*": {"jitter_ms": 1}}}]}', "jitter_ms exceeds delay_ms"),
    ],
)
def test_mistakes_are_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        read(text)
