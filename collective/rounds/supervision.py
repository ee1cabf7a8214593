# SPDX-License-Identifier: Apache-2.0
"""Deadlines of one running round: who is gone, who stands still, when it is over anyway.

Rules: every round ends. A member is a suspect when its connection broke and cannot be made anew within a short grace
(longer before we have met; at once if it was connected and all its addresses refuse), when its host does not answer,
when it has opened the round and then stands still (core/progress.py), or moves so slowly that the round takes far
longer than such rounds do (slowness.py), or when the round's own deadline passes and it has not come, or owes what
depends on nobody else. A member that has not opened the round counts as still computing: until the deadline it is a
suspect only if its host does not answer, or its broken connection cannot be made anew. After three quarters of such a
time a member is doubted: if another one gives up because of it, that is our own finding too, and not hearsay. Whoever
needs a broken connection repairs it from here, so every dial has an owner.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus.collective.core.progress import ProgressWatch, StallLimits
from isthmus.collective.core.round_times import RoundTimes, SlowLimits
from isthmus.collective.links.measurements import LinkMeter
from isthmus.collective.rounds.running_round import RunningRound
from isthmus.collective.rounds.slowness import Slowness
from isthmus.collective.transport.bundle import Bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a round waits for what. Local to a peer."""

    stall: StallLimits = field(default_factory=StallLimits)
    """For a member that stands still in the round."""
    slow: SlowLimits = field(default_factory=SlowLimits)
    """For one that moves, and comes to no end."""
    redial_s: float = 0.3
    """For a connection that broke. Eight round trips are added, so that far peers get their chance."""
    first_contact_s: float = 5.0
    """For one to a peer that we have not met (Bundle.is_met), as in the first moments of a run."""
    round_s: float = 1800.0
    """For the whole round, members that are still computing included."""

    def __post_init__(self) -> None:
        if min(self.redial_s, self.first_contact_s, self.round_s) <= 0:
            raise ValueError(f"patience must be positive: {self}")


_CALM_TICK_S = 0.25
_SIGN_EVERY_S = 0.5
_BROKEN_TICK_S = 0.02
_DOUBTFUL = 0.75
"""Share of the time after which a member is a suspect."""


async def supervise(
    round_: RunningRound, patience: Patience, deadline_s: float, meter: LinkMeter, times: RoundTimes
) -> None:
    """Return when the round is done, one way or the other. Cancelling ends the watch, not the round."""
    loop = asyncio.get_running_loop()
    started = signed_at = loop.time()
    deadline = started + deadline_s
    sign_every_s = min(_SIGN_EVERY_S, patience.stall.floor_s / 4)
    bundles = {rank: bundle for rank, bundle in enumerate(round_.bundles) if bundle is not None}
    if all(bundle.is_whole for bundle in bundles.values()):
        # Most rounds are over before there is anything to see: they need no more than this.
        await _next_look(round_, min(_CALM_TICK_S, sign_every_s, deadline_s))
        if round_.is_done:
            return
    watches = {rank: (bundle, ProgressWatch(patience.stall, started)) for rank, bundle in bundles.items()}
    limit = times.limit([member.ref for member in round_.members], round_.nbytes)
    slowness = Slowness(round_, bundles, patience.slow, limit=limit, deadline_s=deadline_s)
    slow: Sequence[int] = ()
    repairs: dict[int, asyncio.Task[None]] = {}
    broken_since: dict[int, tuple[Bundle, float]] = {}
    async with asyncio.TaskGroup() as tasks:
        while not round_.is_done:
            broken_since = {
                rank: broken_since.get(rank, (bundle, loop.time()))
                for rank, (bundle, _) in watches.items()
                if not bundle.is_whole and round_.concerns(rank)
            }
            for rank, (bundle, _) in broken_since.items():
                if rank not in repairs or repairs[rank].done():
                    repairs[rank] = tasks.create_task(bundle.repair())
            asked_at, tick_s = loop.time(), _BROKEN_TICK_S if broken_since else min(_CALM_TICK_S, sign_every_s)
            await _next_look(round_, min(tick_s, deadline - asked_at))
            if round_.is_done:
                break
            now = loop.time()
            # Time in which this process did not run is not held against others: their answers may lie in the kernel.
            late_s = max(0.0, now - asked_at - tick_s)
            broken_since = {rank: (bundle, since + late_s) for rank, (bundle, since) in broken_since.items()}
            meter.sample(now)
            for bundle, _ in watches.values():
                bundle.wake()  # a stream that was not needed may be by now
            if now - signed_at >= sign_every_s:
                signed_at = now
                for bundle, _ in watches.values():
                    bundle.give_sign()
            if now >= deadline:
                cause = f"not finished in {deadline_s:g} s"
                if owing := round_.owing():
                    round_.suspect(owing, cause)
                else:
                    round_.hold_up(cause)
                break
            # Signs of life come meanwhile all the same: a pause that is shorter than between two of them hides none.
            _observe(round_, watches, now, late_s if late_s > sign_every_s else 0.0)
            slowness.observe(now, late_s if late_s > sign_every_s else 0.0)
            for cause, ranks in _found(round_, broken_since, watches, patience, now, share=1.0).items():
                round_.suspect(ranks, cause)
            found = _found(round_, broken_since, watches, patience, now, share=_DOUBTFUL)
            found["too slow"] = slowness.culprits(share=_DOUBTFUL)
            round_.findings.doubted = frozenset(rank for ranks in found.values() for rank in ranks)
            round_.findings.is_overdue_soon = slowness.is_overdue(share=_DOUBTFUL)
            slow = found["too slow"] or (round_.machine.waiting_for() if round_.findings.is_overdue_soon else ())
            _end_if_slow(round_, slowness)
        for task in repairs.values():
            task.cancel()
    if round_.error is not None:
        times.too_slow([round_.members[rank].ref for rank in slow], round_.nbytes)


async def _next_look(round_: RunningRound, timeout_s: float) -> None:
    """When something has changed, or in so long anyway."""
    timer = asyncio.get_running_loop().call_later(timeout_s, round_.changed.set)
    try:
        await round_.changed.wait()
    finally:
        timer.cancel()
    round_.changed.clear()


def _end_if_slow(round_: RunningRound, slowness: Slowness) -> None:
    culprits = slowness.culprits()
    if culprits:
        round_.suspect(culprits, f"too slow: not done {slowness.open_s:.0f} s after all had come")
    elif slowness.is_overdue():
        round_.hold_up(f"not done {slowness.open_s:.0f} s after all had come")


def _observe(
    round_: RunningRound, watches: dict[int, tuple[Bundle, ProgressWatch]], now: float, paused_s: float
) -> None:
    for rank, (bundle, watch) in watches.items():
        watch.forgive(paused_s)
        watch.observe(
            heard=bundle.heard(),
            moved=bundle.moved(),
            host_silent_s=bundle.host_silent_s(),
            chunk_s=bundle.chunk_s,
            owes_now=round_.owes_now(rank),
            now=now,
        )


def _found(
    round_: RunningRound,
    broken_since: dict[int, tuple[Bundle, float]],
    watches: dict[int, tuple[Bundle, ProgressWatch]],
    patience: Patience,
    now: float,
    *,
    share: float,
) -> dict[str, list[int]]:
    """Members that were waited for in vain for this share of what they may take, by what is wrong with them."""
    found: dict[str, list[int]] = {}
    for rank, (bundle, since) in broken_since.items():
        if bundle.is_whole or not round_.concerns(rank):
            continue
        grace_s = patience.redial_s + 8 * bundle.round_trip_s if bundle.is_met else patience.first_contact_s
        if (bundle.is_refused and bundle.was_connected) or now - since > share * grace_s:
            found.setdefault("connection lost", []).append(rank)
    for rank, (_, watch) in watches.items():
        is_concerned = round_.concerns(rank)
        if is_concerned and watch.is_cut_off(now, share=share):
            found.setdefault("its host does not answer", []).append(rank)
        elif watch.is_stalled(now, owes=is_concerned and round_.machine.has_opened(rank), share=share):
            found.setdefault("no byte moved for too long", []).append(rank)
    return found
