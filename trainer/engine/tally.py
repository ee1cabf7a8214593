# SPDX-License-Identifier: Apache-2.0
"""What this peer has done since it became a member, and how much of it no commit holds yet.

Rules: only a commit of this peer's own step settles anything. Work goes on while a step is out, so that a step names
what was done when it was emitted, and what was done since belongs to the next. Of a step that the others committed
without this peer nothing is settled: its work is named again, with the next payloads of its fragments.

It must not know samples, leases or how long anybody waits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from isthmus.trainer.workers.ipc import StepDone, StepParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Inner steps, and what came of them. `loss` is the sum of the losses that were told, of `num_losses` steps;
    `train_s` are the seconds they took.

    `step_s` is what the workers say of those that were told, `step_tokens` tokens in them, and the rest its parts:
    waiting for text, both passes, clipping, the inner optimizer's update.
    """

    inner_steps: int = 0
    num_tokens: int = 0
    loss: float = 0.0
    num_losses: int = 0
    train_s: float = 0.0
    step_s: float = 0.0
    step_tokens: int = 0
    data_s: float = 0.0
    passes_s: float = 0.0
    clip_s: float = 0.0
    update_s: float = 0.0

    def __sub__(self, other: "Trained") -> "Trained":
        return self._plus(other, -1)

    def __add__(self, other: "Trained") -> "Trained":
        return self._plus(other, 1)

    def _plus(self, other: "Trained", sign: int) -> "Trained":
        names = [field.name for field in fields(self)]
        return Trained(**{name: getattr(self, name) + sign * getattr(other, name) for name in names})

    @property
    def mean_loss(self) -> float | None:
        """Of an inner step; None if none was told."""
        return self.loss / self.num_losses if self.num_losses else None


@dataclass(slots=True, kw_only=True)
class Emission:
    """An outer step that was emitted. `settle` it once it is committed, or tell that it was `missed`."""

    places: tuple[int, ...]
    """Of its fragments, by round."""
    until: Trained
    """All that had been done by then."""
    shares: tuple[Trained, ...]
    """By round: what was done since a payload of the fragment was emitted that counted, or may yet."""
    lacks: Trained = field(default_factory=Trained)
    """What of `until` was in an earlier payload of its fragments that was missed after this one was made."""


class Tally:
    """Counts since this peer became a member."""

    def __init__(self) -> None:
        self._done = Trained()
        self._settled = Trained()
        self._emitted: dict[int, Trained] = {}  # by place: all that had been done at its newest payload
        self._owed: dict[int, Trained] = {}  # by place: of payloads that were missed

    def stepped(self, loss: float | None, num_tokens: int) -> None:
        """An inner step is done."""
        self._done += Trained(inner_steps=1, num_tokens=num_tokens, loss=loss or 0.0, num_losses=int(loss is not None))

    def measured(self, done: StepDone) -> None:
        """So long the workers say that it took."""
        parts = done.parts or StepParts()
        self._done += Trained(
            step_s=done.seconds,
            step_tokens=done.num_tokens,
            data_s=parts.data_s,
            passes_s=parts.passes_s,
            clip_s=parts.clip_s,
            update_s=parts.update_s,
        )

    def took(self, seconds: float) -> None:
        """So long was trained, or got ready for it."""
        self._done += Trained(train_s=seconds)

    @property
    def inner_steps(self) -> int:
        """All that were done."""
        return self._done.inner_steps

    @property
    def unsettled(self) -> Trained:
        """What no commit holds."""
        return self._done - self._settled

    def weighs(self, place: int) -> bool:
        """Whether a payload of this fragment would hold any work."""
        return self._share(place).num_tokens > 0

    def _share(self, place: int) -> Trained:
        return self._done - self._emitted.get(place, Trained()) + self._owed.get(place, Trained())

    def emit(self, places: Sequence[int]) -> Emission:
        """An outer step of these fragments is emitted now."""
        shares = tuple(self._share(at) for at in places)
        for at in places:
            self._owed.pop(at, None)
        self._emitted |= dict.fromkeys(places, self._done)
        return Emission(places=tuple(places), until=self._done, shares=shares)

    def work_in(self, emission: Emission) -> Trained:
        """What no commit held when it was emitted, nor holds now, nor a later payload of its fragments."""
        return emission.until - emission.lacks - self._settled

    def settle(self, emission: Emission) -> None:
        """That step is committed."""
        self._settled = emission.until - emission.lacks

    def missed(self, emission: Emission, out: Iterable[Emission] = ()) -> None:
        """That step was committed without this peer: its work goes with the next payloads of its fragments.

        Found before: a payload that was out already weighed for this work too, which it did not hold.

        Args:
            emission: of the step.
            out: those that were emitted since and have not landed.
        """
        shares = dict(zip(emission.places, emission.shares, strict=True))
        for place, share in shares.items():
            self._owed[place] = self._owed.get(place, Trained()) + share
        for later in out:
            lacking = [share for place, share in shares.items() if place in later.places]
            later.lacks += lacking[0] if lacking else Trained()
