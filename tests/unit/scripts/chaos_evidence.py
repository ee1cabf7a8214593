# SPDX-License-Identifier: Apache-2.0
"""A run of three peers without a flaw, as scripts/chaos would find it, for tests that doctor it. Not a test.

The coordinator decides an outer step every second; every peer votes half a second before and has the commit a tenth
after. The times of the run begin at BEGAN_S.
"""

from datetime import UTC, datetime

from isthmus.collective.core.types import Epoch, Incarnation, Member, OuterStep, PeerId, PeerRef, RoundKey, View
from isthmus.elastic.core.messages import IndexRange
from isthmus.elastic.core.records import (
    CommitRecord,
    CommittedPart,
    Genesis,
    LeaseRecord,
    Record,
    ReleaseRecord,
    ViewRecord,
)
from scripts.chaoslab.evidence import Event, Evidence, Glimpse, Log

BEGAN_S = 1_000_000.0
NUM_STEPS = 60
SITES = (1, 2, 3)
BATCH = 4


def digest(outer_step: int) -> bytes:
    return bytes([outer_step]) * 32


def ref(site: int) -> PeerRef:
    return PeerRef(PeerId(f"{site:016x}"), Incarnation(1))


def view(epoch: int, outer_step: int, *sites: int) -> View:
    members = tuple(Member(ref(site).peer_id, ref(site).incarnation, f"10.0.0.{site}:1") for site in sites)
    return View(Epoch(epoch), OuterStep(outer_step), digest(outer_step), members)


def event(name: str, at_s: float, **fields: object) -> Event:
    wall = datetime.fromtimestamp(BEGAN_S + at_s, UTC).isoformat(timespec="milliseconds")
    return {"event": name, "wall": wall} | fields


def sound() -> Evidence:
    """Everything holds, but that no fault was done."""
    records = _records()
    return Evidence(
        began_s=BEGAN_S,
        calm_until_s=BEGAN_S + 10.0,
        ended_s=BEGAN_S + NUM_STEPS + 0.5,
        records=records,
        checksums=[bytes([slot % 256, slot // 256]) for slot in range(len(records))],
        glimpses=[Glimpse(3, bytes([2, 0]))],
        logs=[_coordinator_log(), *(_peer_log(site) for site in SITES)],
        able=[(BEGAN_S - 20.0, False), (BEGAN_S - 1.0, True)],
        num_starts=4,
    )


def log_of(evidence: Evidence, site: int) -> Log:
    (log,) = (log for log in evidence.logs if log.site == site)
    return log


def _records() -> list[Record]:
    records: list[Record] = [Genesis(outer_step=OuterStep(0), digest=digest(0), next_index=0)]
    records.append(ViewRecord(view=view(1, 0, *SITES), cause="all joined"))
    index = 0
    for step in range(1, NUM_STEPS + 1):
        contributions = []
        for site in SITES:
            ranges = (IndexRange(index, index + BATCH),)
            index += BATCH
            records.append(LeaseRecord(ref=ref(site), serial=step, ranges=ranges))
            contributions.append(CommittedPart(ref(site), 1.0, BATCH, ranges))
        records.append(
            CommitRecord(
                key=RoundKey(Epoch(1), OuterStep(step - 1), 0),
                outer_step=OuterStep(step),
                previous=digest(step - 1),
                digest=digest(step),
                contributions=tuple(contributions),
                final=False,
            )
        )
    # One leaves with samples that nobody has trained on.
    records.append(LeaseRecord(ref=ref(1), serial=NUM_STEPS + 1, ranges=(IndexRange(index, index + BATCH),)))
    records.append(ViewRecord(view=view(2, NUM_STEPS, 2, 3), cause="1 left"))
    records.append(ReleaseRecord(ref=ref(1), epoch=Epoch(2), ranges=(IndexRange(index, index + BATCH),)))
    return records


def _coordinator_log() -> Log:
    events = [event("log_opened", -20.0), event("started", -19.0)]
    events += [
        event("commit_decided", float(step), epoch=1, outer_step=step, digest=digest(step).hex())
        for step in range(1, NUM_STEPS + 1)
    ]
    return Log(0, "site-0/1", events)


def _peer_log(site: int) -> Log:
    events = [event("log_opened", -15.0), event("join", -1.0, epoch=1, outer_step=0)]
    for step in range(1, NUM_STEPS + 1):
        key = {"epoch": 1, "fragment": 0, "digest": digest(step).hex()}
        events.append(event("round_started", step - 0.6, epoch=1, outer_step=step - 1))
        events.append(event("vote", step - 0.5, outer_step=step - 1, **key))
        events.append(event("commit", step + 0.1, outer_step=step, **key))
    return Log(site, f"site-{site}/1", events)
