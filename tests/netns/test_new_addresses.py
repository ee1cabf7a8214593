# SPDX-License-Identifier: Apache-2.0
"""Machines whose addresses change while the run goes on, as those of a provider or of DHCP do."""

import json
import shutil
import signal
from pathlib import Path

import pytest

from isthmus.collective.core.address import candidates_of, split_address
from isthmus.trainer.contact.ticket import read_ticket
from tests.multiprocess.processes import LEFT, Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, running
from tests.netns.machines import MARKS, Machine, World

pytestmark = [*MARKS, pytest.mark.timeout(600)]
FLAGS = ("--outer-steps", str(OPEN_END), "--members.grace", "2s", "--outer.inner-steps", "40")
BACK_S = 120.0
"""Two peers are members together again within this time after the address of one has changed."""


def move(machine: Machine, old: str, new: str) -> None:
    """Give a machine another address in the network `lan`."""
    machine.run(f"ip address del {old}/24 dev lan")
    machine.run(f"ip address add {new}/24 dev lan")


def newest_view(peer: Process) -> dict[str, str]:
    """Where the members of its newest view say that they are, by peer."""
    views = peer.events("view")
    return dict(zip(views[-1]["members"], views[-1]["addresses"], strict=True)) if views else {}


def hosts(address: str) -> set[str]:
    return {split_address(item)[0] for item in candidates_of(address)}


def test_two_peers_whose_addresses_change_one_after_the_other_find_each_other_again(tmp_path: Path) -> None:
    """After the first change the link heals from one side; after the second it would from none."""
    with World() as world, running(tmp_path) as run:
        here, *machines = (world.machine(lan=f"10.9.0.{number}/24") for number in (1, 2, 3))
        run.coordinator(*FLAGS, inside=here.inside)
        run.wait_for_ticket()
        peers = [run.join(inside=machine.inside) for machine in machines]
        run.until("view of two", lambda: all(len(newest_view(peer)) == 2 for peer in peers))
        run.until_step(3, *peers)
        for number, machine in zip((2, 3), machines, strict=True):
            num_views = [len(one.events("view")) for one in peers]
            move(machine, f"10.9.0.{number}", f"10.9.0.{number + 10}")
            run.until(
                "view of two",
                lambda num_views=num_views: all(
                    len(one.events("view")) > num and len(newest_view(one)) == 2
                    for one, num in zip(peers, num_views, strict=True)
                ),
                timeout_s=BACK_S,
            )
            run.until_step(max(one.step for one in peers) + 3, *peers)
        wanted = [{"10.9.0.12", "127.0.0.1"}, {"10.9.0.13", "127.0.0.1"}]

        def told() -> list[set[str]]:
            view = newest_view(peers[0])
            return [hosts(view[peer.peer_id]) for peer in peers if peer.peer_id in view]

        run.until("new addresses", lambda: told() == wanted)
        for peer in peers:  # the coordinator must be there to see them off
            peer.signal(signal.SIGINT)
        assert run.until_ended(*peers) == [LEFT, LEFT]
    assert_same_commits(*peers)


def test_a_founder_whose_address_has_changed_tells_it_to_newcomers(tmp_path: Path) -> None:
    """This newcomer cannot be called: it comes in only if the ticket and the founder say where the founder is now."""
    with World() as world, running(tmp_path) as run:
        here, there = world.machine(lan="10.9.0.1/24"), world.machine(lan="10.9.0.2/24")
        founder = run.found(*FLAGS, inside=here.inside)
        run.wait_for_ticket()
        run.until_step(2, founder)
        move(here, "10.9.0.1", "10.9.0.11")
        for words in (["ticket"], ["ticket", "--renew"]):
            run.ticket.write_text(run.told(*words, "--dir", str(founder.directory)))
            (address,) = read_ticket(f"@{run.ticket}").addresses
            assert hosts(address) == {"10.9.0.11", "127.0.0.1"}
        newcomer = run.join("--listen", "127.0.0.1:0", inside=there.inside)
        run.until("view of two", lambda: len(newest_view(founder)) == 2, timeout_s=BACK_S)
        assert hosts(newest_view(founder)[founder.peer_id]) == {"10.9.0.11", "127.0.0.1"}
        run.until_step(founder.step + 3, founder, newcomer)
        run.leave_all()
    assert_same_commits(founder, newcomer)


@pytest.mark.skipif(shutil.which("iptables") is None, reason="a NAT needs iptables")
def test_a_nat_whose_address_changes_is_told_as_the_coordinator_sees_it_now(tmp_path: Path) -> None:
    """The peer's own address stays; its connections break, and it comes back before anybody misses it."""
    with World() as world, running(tmp_path) as run:
        here = world.machine(lan="203.0.113.1/24")
        router = world.machine(inner="192.168.1.1/24", lan="203.0.113.11/24")
        router.run("sysctl -qw net.ipv4.ip_forward=1")
        router.run("iptables -t nat -A POSTROUTING -o lan -j MASQUERADE")
        hidden = world.machine(inner="192.168.1.2/24")
        hidden.run("ip route add default via 192.168.1.1")
        founder = run.found(*FLAGS, inside=here.inside)
        run.wait_for_ticket()
        peer = run.join(inside=hidden.inside)

        def seen() -> set[str]:
            answer = json.loads(run.told("peers", "--json", "--dir", str(founder.directory)))
            return next((hosts(one["address"]) for one in answer if one["peer_id"] == peer.peer_id), set())

        run.until_step(2, founder, peer)
        assert seen() == {"192.168.1.2", "203.0.113.11", "127.0.0.1"}
        move(router, "203.0.113.11", "203.0.113.21")
        run.until("new address", lambda: seen() == {"192.168.1.2", "203.0.113.21", "127.0.0.1"}, timeout_s=BACK_S)
        run.until_step(max(founder.step, peer.step) + 3, founder, peer)
        run.leave_all()
    assert_same_commits(founder, peer)
