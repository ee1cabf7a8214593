# SPDX-License-Identifier: Apache-2.0
"""Peers whose machines change under them: the way to the other one refuses, or no file can be opened any more."""

import contextlib
import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, Run, running
from tests.netns.machines import MARKS, Machine, World, two_machines

pytestmark = [*MARKS, pytest.mark.timeout(600)]

FLAGS = ("--outer-steps", str(OPEN_END), "--members.grace", "2s", "--outer.inner-steps", "40")
SOON_S = 120.0
"""Ten when nothing else runs."""


def _network_to(run: Run, peer: Process, other: Process) -> str:
    """The network that its link leads through, by the other end's address there; empty while there is none."""
    told = json.loads(run.told("status", "--json", "--dir", str(peer.directory)))
    hosts = [member["host"] for member in told["members"] if member["peer_id"] == other.peer_id]
    return {"10.9.0.1": "lan", "10.8.0.1": "vpn"}[hosts[0]] if hosts and hosts[0] else ""


def _refuse_all(machine: Machine, network: str) -> None:
    """Nothing leaves by that network any more, and who tries is told so at once; so is who has a connection."""
    machine.run(f"iptables -A OUTPUT -o {network} -p tcp -j REJECT --reject-with tcp-reset")


@pytest.mark.skipif(shutil.which("iptables") is None, reason="to refuse needs iptables")
def test_a_peer_goes_on_over_another_network_when_the_one_in_use_refuses(tmp_path: Path) -> None:
    with World() as world, running(tmp_path) as run:
        here = world.machine(lan="10.9.0.1/24", vpn="10.8.0.1/24")
        there = world.machine(lan="10.9.0.2/24", vpn="10.8.0.2/24")
        founder = run.found(*FLAGS, inside=here.inside)
        run.wait_for_ticket()
        caller = run.join("--listen", "127.0.0.1:0", inside=there.inside)  # which cannot be called
        run.until_step(3, founder, caller)

        seen: list[str] = []

        def has_a_link() -> bool:
            seen.append(_network_to(run, caller, founder))
            return bool(seen[-1])

        run.until("a link", has_a_link)
        used = seen[-1]
        for machine in (there, here):
            _refuse_all(machine, used)
        since = max(founder.step, caller.step)
        run.until(
            "commits of both over the other network",
            lambda: len({step for step in founder.commits().keys() & caller.commits().keys() if step > since}) > 5,
            timeout_s=SOON_S,
        )
        run.until("a link over another network", lambda: _network_to(run, caller, founder) not in ("", used))
        run.leave_all()
    assert_same_commits(founder, caller)


@contextlib.contextmanager
def _no_more_files(peer: Process) -> Iterator[None]:
    """It can open none, and so make no connection."""
    soft, hard = resource.prlimit(peer.popen.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(peer.popen.pid, resource.RLIMIT_NOFILE, (3, hard))
    yield
    resource.prlimit(peer.popen.pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_a_peer_that_runs_out_of_descriptors_goes_on_when_it_has_some_again(tmp_path: Path) -> None:
    with two_machines() as (here, there), running(tmp_path) as run:
        founder = run.found(*FLAGS, inside=here.inside)
        run.wait_for_ticket()
        joiner = run.join(inside=there.inside)
        run.until_step(3, founder, joiner)
        with _no_more_files(joiner):
            founder.kill()
            log = joiner.console.with_suffix(".err")
            run.until("news of the shortage", lambda: "own_addresses_unknown" in log.read_text())
            back = run.found(*FLAGS, folder=founder.directory, inside=here.inside)
            run.wait_for_ticket()
        since = joiner.step
        run.until_step(since + 3, back, joiner)
        run.leave_all()
    assert_same_commits(founder, joiner)
