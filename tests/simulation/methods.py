# SPDX-License-Identifier: Apache-2.0
"""The outer optimizer of a simulated run: which rounds make which outer step, and what a peer remembers for itself.

A method is nothing here but its plan and its operations. Of its mathematics it is kept what was put in: a shared state
is the hash of all results before it (symbols.py); what a peer remembers is the hash of the steps that counted its part,
in their order, on top of the state that it began from.
"""

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from isthmus.collective.core.types import RoundKey, View
from isthmus.optim.outer_plan import OuterPlan
from tests.simulation.options import Options
from tests.simulation.symbols import Result

if TYPE_CHECKING:
    from isthmus.optim.outer import Outer

MEAN, GATHER, PAIR = "mean", "gather", "pair"

Met = tuple[tuple[int, str], ...]
"""Fragments that are exchanged in pairs, and the payloads that came of them."""


@dataclass(frozen=True, slots=True)
class SymbolicRound:
    """One exchange of one fragment: as much of `optim.outer.Round` as a course reads."""

    fragment: int
    op: str
    inner_step: int
    delay: int

    @property
    def due_step(self) -> int:
        return self.inner_step + self.delay


@dataclass(frozen=True, slots=True)
class Method:
    """The plan of the options: an outer step every `steps_per_round`, each of the next fragments in turn."""

    options: Options
    steps_may_differ: ClassVar = False
    """Of the engine's own accord none is left out here; a schedule says who hands in early."""

    def plan(self, inner_step: int) -> tuple[SymbolicRound, ...]:
        options = self.options
        since = inner_step - options.first_inner_step
        if since < 0 or since % options.steps_per_round:
            return ()
        first = since // options.steps_per_round * options.rounds_per_step
        fragments = sorted((first + number) % options.num_fragments for number in range(options.rounds_per_step))
        return tuple(
            SymbolicRound(fragment, options.ops[fragment % len(options.ops)], inner_step, options.delay)
            for fragment in fragments
        )


def plan_of(options: Options) -> OuterPlan:
    """The outer steps of a run."""
    return OuterPlan(cast("Outer", Method(options)))


def samples_per_step(options: Options) -> int:
    """How many samples an inner step takes."""
    return max(1, options.samples_per_round // options.steps_per_round)


def samples_per_round(options: Options) -> int:
    """How many samples a peer trains on, at most, until it has to wait for a commit."""
    longest = max(options.steps_per_round, options.first_inner_step) + options.delay
    return max(options.samples_per_round, longest * samples_per_step(options))


def rounds_of(plan: OuterPlan, outer_step: int) -> Sequence[SymbolicRound]:
    """What makes this outer step."""
    return cast("Sequence[SymbolicRound]", plan.rounds(outer_step))


# ------------------------------------------------------------------------ results


def partners(view: View, outer_step: int, fragment: int, givers: Collection[str]) -> dict[str, str]:
    """Who meets whom: the same on all members. With an odd number, or without a link, somebody stays alone."""
    free = [member.peer_id for member in view.members if member.peer_id in givers]
    random.Random(f"pairs of {outer_step}/{fragment}").shuffle(free)
    apart = {frozenset((view.members[a].peer_id, view.members[b].peer_id)) for a, b in view.apart}
    met: dict[str, str] = {}
    for number, one in enumerate(free):
        for other in free[number + 1 :]:
            if one not in met and other not in met and frozenset((one, other)) not in apart:
                met[one], met[other] = other, one
    return met


def givers(result: Result) -> dict[str, str]:
    """The payloads that weigh something, by peer."""
    return {share[0].split(".")[0]: share[0] for share in result[0] if share[1] > 0.0}


def pairs_in(rounds: Sequence[SymbolicRound], view: View, key: RoundKey, result: Result) -> dict[int, dict[str, str]]:
    """By fragment that is exchanged in pairs: who meets whom."""
    fragments = [item.fragment for item in rounds if item.op == PAIR]
    return {fragment: partners(view, key.outer_step, fragment, givers(result)) for fragment in fragments}


def met_by(peer_id: str, pairs: Mapping[int, Mapping[str, str]], result: Result) -> Met:
    """The payloads that this peer has met."""
    names = givers(result) if pairs else {}
    return tuple((fragment, names[met[peer_id]]) for fragment, met in pairs.items() if peer_id in met)


def common(
    rounds: Sequence[SymbolicRound], pairs: Mapping[int, Mapping[str, str]], result: Result
) -> tuple[object, ...]:
    """What of a step is the same for all members: its shared state is made of that."""
    made: list[object] = []
    if any(item.op == MEAN for item in rounds):
        made += result
    if any(item.op == GATHER for item in rounds):
        made.append(tuple(sorted(givers(result).items())))
    return (*made, *(tuple(sorted(met.items())) for met in pairs.values()))


# ------------------------------------------------------------------------ what a peer remembers for itself


def begun_private(digest: bytes) -> bytes:
    """Of who begins from this shared state."""
    return hashlib.sha256(b"begins from" + digest).digest()


def after_private(private: bytes, digest: bytes, met: Met) -> bytes:
    """Once a step has landed that counted this peer's part: the state it made, and the payloads that it met."""
    return hashlib.sha256(private + digest + repr(met).encode()).digest()
