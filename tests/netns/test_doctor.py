# SPDX-License-Identifier: Apache-2.0
"""`isthmus doctor` on machines with addresses of their own: what it says of each way to a run, and how soon."""

import contextlib
import dataclasses
import json
import math
import os
import pty
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from isthmus.collective.core.address import candidates_of, split_address
from isthmus.trainer.contact.ticket import encode_ticket, read_ticket
from scripts.wanlink.wan import Wan
from tests.multiprocess.processes import ISTHMUS, Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, Run, broken_rounds, now_s, running
from tests.netns.machines import MARKS, World, two_behind_nats, why_no_wan
from tests.unit.trainer.test_doctor_report import SCHEMA

pytestmark = [*MARKS, pytest.mark.timeout(600)]

SOON_S = 15.0
BUSY_S = 45.0
"""What a machine that is busy with other tests may add."""
PAYLOAD_SHARE = 1448 / 1514
NUM_TRIES = 4
"""Of an examination: on a busy machine a member is out of the view for a moment, or a transfer is slow."""
ON_ONE_NETWORK = """\
✓ python      #, torch # (#), isthmus #
✓ device      #
✓ memory      #, # of it free
# disk        # free in this folder, writes #
✓ files       # open files, shared memory without a file
# bbr         #
✓ listen      a free port, now PORT, on every interface
✓ addresses   10.9.0.3 (private)
✓ ticket      admits to RUN until DATE UTC
✓ coordinator answers at 10.9.0.1:PORT
✓ version     isthmus 0.1.0 here, 0.1.0 there, protocol #
✓ run         0.0067 M parameters, diloco, 2 members
✓ clock       # s # the coordinator's (give or take # s)
✓ round trip  # ms (the longest # ms)
✓ down        # over #
✓ up          # over #
✓ path mtu    packets of 1500 bytes
# loss        sent again: # down, # up
✓ called      the coordinator reaches this machine at 10.9.0.3:PORT
✓ member      MEMBER and this machine can call each other; it calls 10.9.0.3:PORT
✓ text        text.txt here is the run's text
✓ run memory  takes about #, # free here"""


@dataclasses.dataclass
class Examination:
    """What the doctor said, as programs read it."""

    code: int
    checks: dict[str, dict[str, Any]]
    seconds: float

    @property
    def failed(self) -> list[str]:
        return [name for name, check in self.checks.items() if check["level"] == "fail"]

    def text(self, name: str) -> str:
        return str(self.checks[name]["text"])

    def cure(self, name: str) -> str:
        return str(self.checks[name]["cure"])


def examine(run: Run, inside: Sequence[str], *flags: str, ticket: str | None = None) -> Examination:
    given = f"@{run.ticket}" if ticket is None else ticket
    began_s = time.monotonic()
    done = run.command("doctor", given, "--json", "--device", "cpu", *flags, inside=inside, timeout_s=120.0)
    assert done.err == ""
    document = json.loads(done.out)
    jsonschema.validate(document, SCHEMA)
    checks = {check["name"]: check for check in document["checks"]}
    assert len(checks) == len(document["checks"])
    assert (done.code, document["ok"]) in ((0, True), (3, False))
    return Examination(done.code, checks, time.monotonic() - began_s)


def examine_until(run: Run, inside: Sequence[str], *flags: str, holds: Callable[[Examination], bool]) -> Examination:
    """An examination that holds, if one of a few does; the last one."""
    for _ in range(NUM_TRIES):
        found = examine(run, inside, *flags)
        if holds(found):
            break
    return found


def on_a_terminal(run: Run, inside: Sequence[str], *flags: str) -> str:
    """The same as people see it, at 80 columns."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [*inside, ISTHMUS, "doctor", f"@{run.ticket}", "--device", "cpu", *flags],
            cwd=run.folder,
            env=_environment(run) | {"COLUMNS": "80"},
            stdin=subprocess.DEVNULL,
            stdout=theirs,
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal is gone with the process
            while piece := screen.read(4096):
                shown += piece
    assert process.wait(60) in (0, 3)
    return shown.decode().replace("\r\n", "\n").rstrip()


def _environment(run: Run) -> Mapping[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("ISTHMUS__")}
    return own | {"TMPDIR": str(run.temporary), "OMP_NUM_THREADS": "1"}


def _pattern(expected: str, **known: str) -> str:
    """`#` stands for what differs from machine to machine."""
    pattern = re.escape(expected).replace(r"\#", r"\S.*?")
    for name, value in known.items():
        pattern = pattern.replace(name, value)
    return pattern


@dataclasses.dataclass
class Place:
    """Two members that train, on a machine each, and a third machine."""

    world: World
    run: Run
    founder: Process
    member: Process


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with World() as world, running(tmp_path) as run:
        machines = [world.machine(lan=f"10.9.0.{number}/24") for number in (1, 2)]
        founder = run.found("--outer-steps", str(OPEN_END), "--members.grace", "2s", inside=machines[0].inside)
        run.wait_for_ticket()
        member = run.join(inside=machines[1].inside)
        run.until_step(3, founder, member)
        yield Place(world, run, founder, member)
        run.leave_all()
        assert not broken_rounds(founder)
        assert_same_commits(founder, member)


def test_on_one_network_every_check_passes_and_the_others_train_on(place: Place) -> None:
    inside = place.world.machine(lan="10.9.0.3/24").inside
    before, step = sorted(place.run.folder.iterdir()), place.founder.step
    expected = _pattern(
        ON_ONE_NETWORK,
        PORT=r"\d+",
        RUN=read_ticket(f"@{place.run.ticket}").run_id,
        DATE=r"\d{4}-\d\d-\d\d \d\d:\d\d",
        MEMBER=place.member.peer_id,
    )
    for _ in range(NUM_TRIES):
        shown = on_a_terminal(place.run, inside)
        assert max(map(len, shown.splitlines())) <= 80
        lines = re.sub(r"\n {14}", " ", shown)  # long ones go on below
        if re.fullmatch(expected, lines):
            break
    assert re.fullmatch(expected, lines), shown
    assert sorted(place.run.folder.iterdir()) == before
    place.run.until_step(step + 3, place.founder, place.member)


def test_a_peer_that_can_only_call_is_told_so_and_what_to_do(place: Place) -> None:
    machine = place.world.machine(lan="10.9.0.3/24", nowhere="172.31.5.7/24")
    member = f"{place.member.peer_id} can be called from here, and cannot call this machine"
    found = examine_until(
        place.run, machine.inside, "--listen", "127.0.0.1:0", holds=lambda one: one.text("member") == member
    )
    assert (found.code, found.failed) == (0, [])
    assert found.text("called") == "--listen keeps this peer on its machine: no other one can call it"
    assert found.text("member") == member

    found = examine_until(
        place.run, machine.inside, "--listen", "172.31.5.7:0", holds=lambda one: one.checks["member"]["level"] == "ok"
    )
    assert (found.code, found.checks["called"]["level"]) == (0, "warn")
    assert re.fullmatch(
        r"the coordinator cannot call this machine: 172\.31\.5\.7:\d+ \(no answer\)", found.text("called")
    )
    assert "--advertise HOST:PORT" in found.cure("called")
    assert found.checks["member"]["level"] == "ok"


@pytest.mark.skipif(shutil.which("iptables") is None, reason="a firewall needs iptables")
def test_a_firewall_that_lets_nobody_in_shows_where_it_stands(place: Place) -> None:
    machine = place.world.machine(lan="10.9.0.3/24")
    machine.run("iptables -A INPUT -m state --state ESTABLISHED,RELATED -j ACCEPT")
    machine.run("iptables -A INPUT -i lan -p tcp -j DROP")
    found = examine(place.run, machine.inside)
    assert (found.code, found.failed) == (0, [])
    assert re.fullmatch(
        r"the coordinator cannot call this machine: 10\.9\.0\.3:\d+ \(no answer in 3 s\)", found.text("called")
    )
    assert found.checks["down"]["facts"]["bytes_per_s"] > 0


@pytest.mark.skipif(shutil.which("iptables") is None, reason="a NAT needs iptables")
def test_behind_a_nat_the_doctor_says_that_calling_is_enough_and_that_no_member_can_be_asked(tmp_path: Path) -> None:
    with two_behind_nats() as (outside, one, other), running(tmp_path) as run:
        founder = run.found("--outer-steps", str(OPEN_END), "--outer.inner-steps", "40", inside=outside.inside)
        run.wait_for_ticket()
        member = run.join(inside=one.inside)
        run.until_step(2, founder, member)
        found = examine_until(run, other.inside, holds=lambda one: one.checks["member"]["level"] == "warn")
        assert (found.code, found.failed) == (0, [])
        assert found.text("called").startswith("the coordinator cannot call this machine: ")
        assert found.cure("called").startswith("it is enough that this peer calls")
        assert found.checks["member"]["level"] == "warn"
        assert found.text("member").startswith("the coordinator cannot call the other member,")
        run.leave_all()


def test_who_reaches_the_coordinator_and_not_the_member_behind_it_is_told_so(tmp_path: Path) -> None:
    with World() as world, running(tmp_path) as run:
        near, far = world.machine(lan="10.9.0.1/24", home="10.1.0.1/24"), world.machine(home="10.1.0.2/24")
        founder = run.found("--outer-steps", str(OPEN_END), inside=near.inside)
        run.wait_for_ticket()
        member = run.join(inside=far.inside)
        run.until_step(2, founder, member)
        inside = world.machine(lan="10.9.0.7/24").inside
        found = examine_until(run, inside, holds=lambda one: one.checks["member"]["level"] == "warn")
        assert (found.code, found.failed) == (0, [])
        assert found.checks["member"]["level"] == "warn"
        assert found.text("member").startswith(f"{member.peer_id} and this machine cannot call each other: ")
        assert "10.1.0.2" in found.text("member")
        run.leave_all()


def test_each_way_to_reach_nobody_is_one_failure_with_its_cure_soon(place: Place, tmp_path: Path) -> None:
    good = read_ticket(f"@{place.run.ticket}")
    port = split_address(candidates_of(good.addresses[0])[0])[1]
    here = place.world.machine(lan="10.9.0.3/24").inside
    elsewhere = place.world.machine(nowhere="172.31.5.7/24").inside

    def failure(inside: Sequence[str], name: str, *addresses: str) -> Examination:
        ticket = good if not addresses else dataclasses.replace(good, addresses=addresses)
        found = examine(place.run, inside, ticket=encode_ticket(ticket))
        assert (found.code, found.failed) == (3, [name])
        assert found.seconds < SOON_S + BUSY_S
        return found

    found = failure(here, "coordinator", "10.9.0.1:9")
    assert found.text("coordinator") == "nobody answers at 10.9.0.1:9 (refused)"
    assert found.cure("coordinator").startswith("check that the founder runs")

    found = failure(here, "coordinator", f"10.9.0.77:{port}")
    assert found.text("coordinator").startswith(f"nobody answers at 10.9.0.77:{port} (")

    found = failure(elsewhere, "coordinator")
    assert "Network is unreachable" in found.text("coordinator")
    assert found.cure("coordinator").startswith("no network of this machine leads there")

    with running(_made(tmp_path / "other")) as other:
        machine = place.world.machine(lan="10.9.0.8/24")
        other.found("--outer-steps", str(OPEN_END), inside=machine.inside)
        other.wait_for_ticket()
        port = split_address(candidates_of(read_ticket(f"@{other.ticket}").addresses[0])[0])[1]
        found = failure(here, "coordinator", f"10.9.0.8:{port}")
        assert found.text("coordinator") == (f"another run answers at 10.9.0.8:{port} (certificate of another run)")
        assert found.cure("coordinator").startswith("ask for a new ticket")
        other.leave_all()

    short = place.run.told("ticket", "--lifetime", "1s", "--dir", str(place.founder.directory))
    expires_at_s = read_ticket(short).expires_at_s
    place.run.until("expiry", lambda: now_s() >= expires_at_s)
    found = examine(place.run, here, ticket=short.strip())
    assert (found.code, found.failed) == (3, ["ticket"])
    assert found.text("ticket").startswith("the ticket expired ")
    assert found.cure("ticket").startswith("ask for a new ticket")


def test_a_founder_that_stays_at_home_is_found_out_from_its_ticket(tmp_path: Path) -> None:
    with World() as world, running(tmp_path) as run:
        home, away = world.machine(lan="10.9.0.1/24"), world.machine(lan="10.9.0.2/24")
        run.found("--outer-steps", str(OPEN_END), "--listen", "127.0.0.1:0", inside=home.inside)
        run.wait_for_ticket()
        found = examine(run, away.inside)
        assert (found.code, found.failed) == (3, ["coordinator"])
        assert "let it start without --listen 127.0.0.1" in found.cure("coordinator")
        found = examine(run, home.inside)
        assert (found.code, found.failed) == (0, [])
        assert found.text("member") == "there is no other one yet"
        run.leave_all()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# --------------------------------------------------------------------------------------------------- emulated lines


NO_WAN = why_no_wan()


@pytest.mark.skipif(NO_WAN is not None, reason=str(NO_WAN))
def test_rates_round_trip_and_loss_are_those_of_the_line(tmp_path: Path) -> None:
    with Wan(peers=2) as wan, running(tmp_path) as run:
        wan.set_link("*", "*", delay_ms=20)
        wan.set_port(1, up_mbit=12, down_mbit=30)
        founder = run.found("--outer-steps", str(OPEN_END), inside=wan.command(0, []))
        run.wait_for_ticket()
        clean = examine_until(run, wan.command(1, []), holds=_has_the_lines_rates)
        assert clean.code == 0
        assert _has_the_lines_rates(clean), clean
        wan.set_link(1, 0, loss_percent=5)
        lossy = examine_until(run, wan.command(1, []), holds=_has_the_lines_loss)
        assert _has_the_lines_loss(lossy), lossy
        assert founder.is_running
        run.leave_all()


def _has_the_lines_rates(found: Examination) -> bool:
    """A second is what counts, and on a busy machine what waited for a fifth of one is read in it too."""
    rates = [
        (_fact(found, name, "bytes_per_s") * 8e-6, mbit * PAYLOAD_SHARE) for name, mbit in (("up", 12), ("down", 30))
    ]
    trip_s = _fact(found, "round_trip", "shortest_s")
    return all(measured == pytest.approx(right, rel=0.25) for measured, right in rates) and 0.039 <= trip_s < 0.070


def _has_the_lines_loss(found: Examination) -> bool:
    up, down = (_fact(found, "loss", name) for name in ("up", "down"))
    return 0.02 < up < 0.12 and down < 0.02 and found.checks["loss"]["level"] == "warn"


def _fact(found: Examination, check: str, name: str) -> float:
    """NaN where it could not be measured."""
    return float(found.checks.get(check, {}).get("facts", {}).get(name, math.nan))
