# SPDX-License-Identifier: Apache-2.0
"""What can go wrong on the way to a run: one sentence with the cure, the right exit code, soon; the others train on."""

import dataclasses
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.collective.core.address import candidates_of, split_address
from isthmus.trainer.contact.ticket import encode_ticket, read_ticket
from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import assert_same_commits
from tests.multiprocess.run_harness import OPEN_END, Run, broken_rounds, make_folder, now_s, running, wall_s
from tests.netns.machines import MARKS, Machine, World

pytestmark = [*MARKS, pytest.mark.timeout(600)]

NOBODY_REACHABLE, REFUSED = 4, 5
SOON_S = 15.0
START_S = 30.0
"""For the program's own start, on a machine that is busy with other tests."""
_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long off(void) { return atol(getenv("CLOCK_OFF_S")); }
int clock_gettime(clockid_t id, struct timespec *at) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, at);
  if (id == CLOCK_REALTIME) at->tv_sec += off();
  return code;
}
int gettimeofday(struct timeval *at, void *zone) {
  int (*real)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
  int code = real(at, zone);
  at->tv_sec += off();
  return code;
}
time_t time(time_t *out) {
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  if (out) *out = at.tv_sec;
  return at.tv_sec;
}
"""


@dataclasses.dataclass
class Place:
    """Two members that train, on a machine each: `near` can be reached from other machines of its network."""

    world: World
    run: Run
    founder: Process
    near: Machine
    member: Process

    def join(self, machine: Machine, *, ticket: str | None = None, folder: Path | None = None) -> tuple[int, str]:
        """Exit code and sentence of a joiner that fails; the others have trained on meanwhile."""
        if ticket is not None:
            self.run.ticket.write_text(ticket)
        began_s, step = time.monotonic(), self.founder.step
        outcome = self.run.join(inside=machine.inside, folder=folder).outcome()
        assert time.monotonic() - began_s < SOON_S + START_S
        self.run.until_step(step + 2, self.founder, self.member)
        assert not broken_rounds(self.founder)
        (sentence,) = outcome.sentences
        return outcome.code, sentence


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with World() as world, running(tmp_path) as run:
        near, far = world.machine(lan="10.9.0.1/24", home="10.1.0.1/24"), world.machine(home="10.1.0.2/24")
        flags = ("--outer-steps", str(OPEN_END), "--members.grace", "2s", "--outer.inner-steps", "40")
        founder = run.found(*flags, inside=near.inside)
        run.wait_for_ticket()
        member = run.join(inside=far.inside, folder=make_folder(tmp_path / "member", id_begins="0"))
        run.until_step(3, founder, member)
        yield Place(world, run, founder, near, member)
        run.leave_all()
        assert_same_commits(founder, member)


def test_a_port_where_nobody_listens_and_a_network_that_leads_nowhere_are_told_apart(place: Place) -> None:
    good = read_ticket(f"@{place.run.ticket}")
    closed = dataclasses.replace(good, addresses=("10.9.0.1:9",))
    code, sentence = place.join(place.world.machine(lan="10.9.0.7/24"), ticket=encode_ticket(closed))
    assert code == NOBODY_REACHABLE
    assert sentence.startswith("isthmus: nobody answers at 10.9.0.1:9 (refused); check that the founder runs")

    code, sentence = place.join(place.world.machine(nowhere="172.31.5.7/24"), ticket=encode_ticket(good))
    assert code == NOBODY_REACHABLE
    assert all(f"{item} (" in sentence for item in candidates_of(good.addresses[0]) if not item.startswith("127."))
    assert "Network is unreachable" in sentence


def test_a_joiner_that_reaches_only_some_members_trains_through_one_that_reaches_all(place: Place) -> None:
    """It has a way to the founder, and none to the member behind it."""
    machine = place.world.machine(lan="10.9.0.7/24")
    joiner = place.run.join(inside=machine.inside)
    place.run.until("joiner in the run", lambda: joiner.step > 0)
    place.run.until_step(joiner.step + 5, place.founder, place.member, joiner)
    pair = {place.member.peer_id, joiner.peer_id}

    def apart() -> list[set[str]]:
        return [set(words.split()) for event in joiner.events("view") for words in event["apart"]]

    place.run.until("view of three", lambda: pair in apart())
    assert all(each == pair for each in apart())
    assert not broken_rounds(place.founder)


def test_another_runs_port_and_an_old_ticket_are_refused(place: Place, tmp_path: Path) -> None:
    good = read_ticket(f"@{place.run.ticket}")
    (tmp_path / "other").mkdir()
    with running(tmp_path / "other") as other:
        machine = place.world.machine(lan="10.9.0.8/24")
        stranger = other.found("--outer-steps", str(OPEN_END), inside=machine.inside)
        other.wait_for_ticket()
        port = split_address(candidates_of(read_ticket(f"@{other.ticket}").addresses[0])[0])[1]
        misled = dataclasses.replace(good, addresses=(f"10.9.0.8:{port}",))
        code, sentence = place.join(place.world.machine(lan="10.9.0.9/24"), ticket=encode_ticket(misled))
        assert code == REFUSED
        assert sentence.startswith(f"isthmus: who answers is not the run of this ticket: 10.9.0.8:{port} (")
        assert not stranger.events("join", peer=place.member.peer_id)
        other.leave_all()

    folder = ("--dir", str(place.founder.directory))
    short = place.run.told("ticket", "--lifetime", "1s", *folder)
    expires_at_s = read_ticket(short).expires_at_s
    place.run.until("expiry", lambda: now_s() >= expires_at_s)
    code, sentence = place.join(place.world.machine(lan="10.9.0.10/24"), ticket=short)
    assert code == REFUSED
    assert sentence.startswith("isthmus: the ticket expired ")


@pytest.mark.skipif(shutil.which("cc") is None, reason="a wrong clock needs a C compiler")
@pytest.mark.parametrize("off_s", [86_400, -86_400], ids=["a day ahead", "a day behind"])
def test_a_clock_that_is_off_by_a_day_keeps_nobody_out(place: Place, tmp_path: Path, off_s: int) -> None:
    """Tickets are judged by the coordinator's clock, and certificates have no beginning and no end."""
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    machine = place.world.machine(lan="10.9.0.7/24", home="10.1.0.7/24")
    wrong = ("env", f"LD_PRELOAD={library}", f"CLOCK_OFF_S={off_s}")
    joiner = place.run.join(inside=(*machine.inside, *wrong))
    place.run.until("membership", lambda: len(joiner.commits()) > 2)
    (theirs, ours) = (wall_s(each.events("started")[0]) for each in (joiner, place.founder))
    assert abs(theirs - ours) > 80_000, "its clock is off"
