# SPDX-License-Identifier: Apache-2.0
"""When things will happen in a run: its outer steps on a line of time, from the method's own plan of rounds.

    inner step    `step_s` seconds of the slowest peer
    exchange      begins when its payload is there and the outer step before is committed; takes what
                  `optim.recommend.exchange_s` says
    commit        a round trip for the vote, one more where members tell each other their weights first, and
                  `HOST_S_A_VALUE` for every value (absorbing, hashing)
    landing       after the round's delay, or when it is committed; until then the workers wait

Not in it: processors that are slow at codecs, lost packets, other traffic, late peers. In single runs on emulated lines
most exchanges took 0.9 to 1.15 times what is said here, with 1 % loss 1.24 times. Small payloads on long lines, for
which TCP has not found its speed, took twice as long.

Rules: pure. Must not know how seconds and links were found out.
"""

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from isthmus.collective.codec import codec_named
from isthmus.optim.outer_plan import OuterPlan
from isthmus.optim.recommend import Links, exchange_s, sent_nbytes
from isthmus.trainer.config.outer_method import method_of
from isthmus.trainer.config.settings import Config

HOST_S_A_VALUE: Final = 6.4e-9
"""Beyond the exchange, seconds a value of an outer step: `scripts/bench outer`, two EPYC cores, 50 M and 150 M."""
_WALKED: Final = 2000
"""Outer steps that are looked at; a longer run is taken to go on as the second half of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Of an outer step, all its rounds together.

    Attributes:
        codec: of the payloads; several with a comma.
        sent_nbytes: by one peer; it receives as many.
        exchange_s: until the payloads are exchanged.
        commit_s: from then on until the workers can have the outcome.
    """

    codec: str
    sent_nbytes: float
    exchange_s: float
    commit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An outer step on the line of time, or the mean of several.

    Attributes:
        inner_steps: since the one before.
        waiting_s: how long the workers stand still since then, for its own outcome too if they wait for that.
    """

    codec: str
    inner_steps: float
    sent_nbytes: float
    exchange_s: float
    waiting_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A whole run of a peer that takes part from the start to the end.

    Attributes:
        seconds: until the last outcome has landed.
        computing_s: of these in inner steps.
        inner_steps: in all.
        sent_nbytes: by one peer.
        typical: the mean of the second half of the outer steps. Methods may exchange more in the first rounds.
        largest: the one that sends most.
    """

    seconds: float
    computing_s: float
    inner_steps: int
    sent_nbytes: float
    typical: Step
    largest: Step

    @property
    def goodput(self) -> float:
        """Share of the time that goes into inner steps."""
        return self.computing_s / self.seconds


def timeline(config: Config, links: Links, step_s: float) -> Timeline:
    """Of the run that a configuration founds, of `members.start_peers` peers.

    Args:
        config: with a vocabulary.
        links: the slowest peer's.
        step_s: seconds of an inner step of the slowest peer, > 0.

    Raises:
        ConfigError: model or method cannot be built.
    """
    walk = _Walk(config, links, step_s)
    total = config.run.outer_steps
    walked = min(total, _WALKED)
    steps = [walk.go(number) for number in range(1, walked + 1)]
    typical, rest = _mean(steps[walked // 2 :]), total - walked
    inner_steps = walk.inner_step + round(rest * typical.inner_steps)
    return Timeline(
        seconds=walk.landed_s() + rest * (typical.inner_steps * step_s + typical.waiting_s),
        computing_s=inner_steps * step_s,
        inner_steps=inner_steps,
        sent_nbytes=walk.sent_nbytes + rest * typical.sent_nbytes,
        typical=typical,
        largest=max(steps, key=lambda step: step.sent_nbytes),
    )


class _Walk:
    """From one outer step to the next: the time, when the newest step is committed, what has yet to land."""

    def __init__(self, config: Config, links: Links, step_s: float) -> None:
        self.now_s = 0.0
        self.inner_step = 0
        self.sent_nbytes = 0.0
        self._step_s = step_s
        self._links = links
        self._peers = config.members.start_peers
        self._codec = config.outer.codec
        method = method_of(config)
        self._plan = OuterPlan(method.outer)
        self._numels = {fragment.key: fragment.numel for fragment in method.fragments}
        self._committed_s = 0.0
        self._pending: deque[tuple[int, float]] = deque()  # due inner step, when it can be had

    def go(self, number: int) -> Step:
        """Train until this outer step is emitted, and wait for its outcome if the workers do."""
        rounds = self._plan.rounds(number)
        began, (due,) = self.inner_step, {round_.due_step for round_ in rounds}
        waited = self._train_until(rounds[0].inner_step)
        exchange = self._exchange(number)
        # Steps are handed in one at a time, each when the one before is committed.
        self._committed_s = max(self.now_s, self._committed_s) + exchange.exchange_s + exchange.commit_s
        self._pending.append((due, self._committed_s))
        self.sent_nbytes += exchange.sent_nbytes
        waited += self._train_until(self.inner_step)
        return Step(
            codec=exchange.codec,
            inner_steps=self.inner_step - began,
            sent_nbytes=exchange.sent_nbytes,
            exchange_s=exchange.exchange_s,
            waiting_s=waited,
        )

    def landed_s(self) -> float:
        """When all that is pending has landed; the last outer steps have nothing to hide behind."""
        return max([self.now_s, *(there_s for _, there_s in self._pending)])

    def _train_until(self, inner_step: int) -> float:
        """Seconds that the workers stand still on the way, and there."""
        waited = 0.0
        while self._pending and self._pending[0][0] <= inner_step:
            due, there_s = self._pending.popleft()
            self._compute(max(due, self.inner_step))
            late_s = max(0.0, there_s - self.now_s)
            waited += late_s
            self.now_s += late_s
        self._compute(inner_step)
        return waited

    def _compute(self, inner_step: int) -> None:
        self.now_s += (inner_step - self.inner_step) * self._step_s
        self.inner_step = inner_step

    def _exchange(self, number: int) -> Exchange:
        rounds = self._plan.rounds(number)
        codecs = [round_.codec or self._codec for round_ in rounds]
        values = 0
        sent = exchange = 0.0
        for round_, codec in zip(rounds, codecs, strict=True):
            nbytes = _wire_nbytes(codec, round_.numel or self._numels[round_.fragment])
            values += self._numels[round_.fragment]
            sent += sent_nbytes(round_.op, nbytes, self._peers)
            exchange += exchange_s(round_.op, nbytes, self._links, self._peers)
        trips = 1 + any(round_.is_told for round_ in rounds)
        commit_s = trips * self._links.round_trip_s + HOST_S_A_VALUE * values
        told = ", ".join(dict.fromkeys(codecs))
        return Exchange(codec=told, sent_nbytes=sent, exchange_s=exchange, commit_s=commit_s)


@functools.cache
def _wire_nbytes(codec: str, numel: int) -> int:
    return codec_named(codec).wire_nbytes(numel)


def _mean(steps: Sequence[Step]) -> Step:
    return Step(
        codec=", ".join(dict.fromkeys(codec for step in steps for codec in step.codec.split(", "))),
        inner_steps=fmean(step.inner_steps for step in steps),
        sent_nbytes=fmean(step.sent_nbytes for step in steps),
        exchange_s=fmean(step.exchange_s for step in steps),
        waiting_s=fmean(step.waiting_s for step in steps),
    )
