# SPDX-License-Identifier: Apache-2.0
"""What this peer has done since it became a member, and how much of it no commit holds yet.

Rules: only a commit of this peer's own round settles anything. Work goes on while a round is out, so that a round names
what was done when it was emitted, and what was done since belongs to the next. A round that the others committed
without this peer settles nothing: its work is named again.

It must not know samples, leases or how long anybody waits.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Inner steps, and what came of them. `loss` is the sum over the steps, `train_s` the seconds they took."""

    inner_steps: int = 0
    num_tokens: int = 0
    loss: float = 0.0
    train_s: float = 0.0

    def __sub__(self, other: "Done") -> "Done":
        return Done(
            inner_steps=self.inner_steps - other.inner_steps,
            num_tokens=self.num_tokens - other.num_tokens,
            loss=self.loss - other.loss,
            train_s=self.train_s - other.train_s,
        )

    @property
    def mean_loss(self) -> float | None:
        """Of an inner step; None if there was none."""
        return self.loss / self.inner_steps if self.inner_steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedIn:
    """A round that was emitted. `settle` it once it is committed."""

    fragment: int
    until: Done
    """All that had been done by then."""
    work: Done
    """What no commit held by then: its samples go with this round."""
    share: Done
    """What was done since this fragment was last in a commit of ours: the weight of the payload."""


class Tally:
    """Counts since this peer became a member."""

    def __init__(self) -> None:
        self._done = Done()
        self._settled = Done()
        self._by_fragment: dict[int, Done] = {}

    def stepped(self, loss: float, num_tokens: int) -> None:
        """An inner step is done."""
        done = self._done
        self._done = Done(
            inner_steps=done.inner_steps + 1,
            num_tokens=done.num_tokens + num_tokens,
            loss=done.loss + loss,
            train_s=done.train_s,
        )

    def took(self, seconds: float) -> None:
        """So long was trained, or got ready for it."""
        done = self._done
        self._done = Done(
            inner_steps=done.inner_steps,
            num_tokens=done.num_tokens,
            loss=done.loss,
            train_s=done.train_s + seconds,
        )

    @property
    def unsettled(self) -> Done:
        """What no commit holds."""
        return self._done - self._settled

    def hand_in(self, fragment: int) -> HandedIn:
        """A round of this fragment is emitted now."""
        share = self._done - self._by_fragment.get(fragment, Done())
        return HandedIn(fragment=fragment, until=self._done, work=self.unsettled, share=share)

    def settle(self, handed_in: HandedIn) -> None:
        """That round is committed."""
        self._settled = self._by_fragment[handed_in.fragment] = handed_in.until
