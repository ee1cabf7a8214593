# SPDX-License-Identifier: Apache-2.0
"""`scripts/lab` over an emulated network."""

from pathlib import Path

import pytest

from tests.multiprocess.lab_harness import TIMEOUT_S, running
from tests.netns.machines import why_no_wan

_IMPOSSIBLE = why_no_wan()
pytestmark = [
    pytest.mark.netns,
    pytest.mark.multiprocess,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_IMPOSSIBLE is not None, reason=str(_IMPOSSIBLE)),
]


def test_a_peer_on_another_continent_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    with running(tmp_path, "--peers", "3", "--wan", "us-eu-asia") as lab:
        assert "us and eu 90 ms" in lab.told()
        lab.until("three members", lambda: "peer 2 (asia) is a member" in lab.told() and lab.step() > 0)
        lab.order("cut", "2")
        assert lab.standing(2) == "cut off"
        lab.until("the others go on without it", lambda: "members 2" in lab.order("status"))
        step = lab.step()
        lab.until("commits of the others", lambda: lab.step() > step)
        num_before = lab.told().count("peer 2 (asia) is a member")
        lab.order("heal", "2")
        lab.until("it is a member again", lambda: lab.told().count("peer 2 (asia) is a member") > num_before)
        lab.order("down")
        assert lab.popen.wait(TIMEOUT_S) == 0, lab.told()
