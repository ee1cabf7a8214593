# SPDX-License-Identifier: Apache-2.0
"""Which rules a round simulation runs by: the real ones, or broken variants of them (mutants.py)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from isthmus.collective.core.fence import Fence, Standing
from isthmus.collective.core.progress import ProgressWatch
from isthmus.collective.core.round_machine import RoundMachine
from isthmus.collective.core.types import Epoch, PeerRef, RoundKey
from tests.simulation.rounds.bundle import Bundle
from tests.simulation.rounds.operation import Operation


def judge(fence: Fence, sender: PeerRef, epoch: Epoch) -> Standing:
    """By the real fence."""
    return fence.judge(sender, epoch)


def find_round(rounds: Mapping[RoundKey, Operation], key: RoundKey) -> Operation | None:
    """The round that is named."""
    return rounds.get(key)


def sign(bundle: Bundle) -> None:
    """Say that we are there."""
    bundle.give_sign()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundParts:
    """The machine, the shell around it, and its rules."""

    machine: type[RoundMachine] = RoundMachine
    operation: type[Operation] = Operation
    judge: Callable[[Fence, PeerRef, Epoch], Standing] = judge
    find_round: Callable[[Mapping[RoundKey, Operation], RoundKey], Operation | None] = find_round
    watch: type[ProgressWatch] = ProgressWatch
    sign: Callable[[Bundle], None] = sign
    checks_sums: bool = True
    tells_ended: bool = True
    keeps_spent_credit: bool = True
    drops_older_epochs: bool = True
