# SPDX-License-Identifier: Apache-2.0
"""What members say about a round when its payload operation has ended, and what follows from it. Values only.

Whoever has everybody's vote comes to the same conclusions: whether the round counts, whether members hold different
shared states, and whose state is to be taken.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from isthmus.collective.errors import CollectiveError
from isthmus.optim.outer import Round

_TORN: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Which rounds were absorbed, and in which order. Where it is the same, shared state is."""

    num_rounds: int = 0
    digest: int = 0
    """48 bits, which fp64 holds exactly. Negative: since then values went apart that should be equal."""

    def after(self, round_: Round, place: int, votes: "tuple[Vote, ...]") -> "History":
        """With one more round, at this place in the plan of its inner step."""
        text = repr((self.digest, round_.inner_step, place, [vote.weight for vote in votes]))
        digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
        return History(num_rounds=self.num_rounds + 1, digest=int.from_bytes(digest, "little"))

    def torn(self) -> "History":
        """Ask for a repair."""
        return replace(self, digest=_TORN)

    def mended(self) -> "History":
        """After a repair."""
        return replace(self, digest=max(self.digest, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What one member says when its payload operation has ended."""

    has_result: bool
    history: History
    """When it emitted."""
    weight: float
    notes: tuple[float, ...] = ()

    def to_row(self) -> Tensor:
        """[4 + notes] fp64."""
        head = (float(self.has_result), self.history.num_rounds, self.history.digest, self.weight)
        return torch.tensor((*head, *self.notes), dtype=torch.float64)

    @classmethod
    def from_row(cls, row: Tensor) -> "Vote":
        """Invert `to_row`."""
        has_result, num_rounds, digest, weight, *notes = row.tolist()
        history = History(num_rounds=int(num_rounds), digest=int(digest))
        return cls(has_result=bool(has_result), history=history, weight=weight, notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """How a round ended."""

    votes: tuple[Vote, ...] = ()
    """By rank; empty if they are not known."""
    error: CollectiveError | None = None
    """What broke here, if something did."""

    @property
    def counts(self) -> bool:
        """Whether it becomes history; the same for all who have the votes."""
        return bool(self.votes) and all(v.has_result for v in self.votes) and any(v.weight > 0.0 for v in self.votes)

    @property
    def needs_repair(self) -> bool:
        """Whether members hold different states; the same for all who have the votes."""
        histories = {vote.history for vote in self.votes}
        return len(histories) > 1 or any(history.digest == _TORN for history in histories)

    @property
    def leader(self) -> int:
        """Rank of the one that has absorbed most; of several the first."""
        return max(range(len(self.votes)), key=lambda rank: self.votes[rank].history.num_rounds)
