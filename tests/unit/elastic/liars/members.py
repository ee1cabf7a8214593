# SPDX-License-Identifier: Apache-2.0
"""Members that say what they saw, for tests of members that lie. Not a test."""

from isthmus.elastic.core.messages import (
    IndexRange,
    LeaseGrant,
    LeaseRequest,
    Vote,
)
from isthmus.elastic.core.records import ViewRecord
from tests.unit.elastic.machines import CoordinatorDriver, held, key, ref

OTHER = b"\xee" * 32


class Members(CoordinatorDriver):
    """A coordinator and members that say what they saw; each weighs as many as its number, if nobody lies."""

    def votes(
        self,
        number: int,
        *,
        weight: float | None = None,
        seen: dict[int, float] | None = None,
        sizes: dict[int, float] | None = None,
        sums: dict[int, float] | None = None,
        digest: bytes | None = None,
        results: dict[int, bytes] | None = None,
        consumed: tuple[IndexRange, ...] = (),
        fragment: int = 0,
    ) -> None:
        current, numbers = self.machine.state.view, self.member_numbers()
        weights = {other: float(other) for other in numbers} | {number: float(weight or number)} | (seen or {})
        known = dict.fromkeys(numbers, 1.0) | (sizes or {})
        vote = Vote(
            key=key(current.epoch, current.outer_step, fragment),
            digest=digest or held(current.outer_step + 1).digest,
            weight=weights[number] if weight is None else weight,
            num_tokens=1,
            consumed=consumed,
            weights=tuple(weights[other] for other in numbers),
            sizes=tuple(known[other] for other in numbers),
            sums=tuple((sums or {}).get(other, 0.0) for other in numbers) if sums is not None else (),
            results=tuple((results or {}).get(other, b"sum") for other in numbers),
        )
        self.says(number, vote)

    def vote(self, number: int, digest: bytes | None = None, *consumed: IndexRange, epoch: int | None = None) -> None:
        """Without a weight, and without a word of the others."""
        current = self.machine.state.view
        round_key = key(current.epoch if epoch is None else epoch, current.outer_step)
        made = digest or held(current.outer_step + 1).digest
        self.says(number, Vote(key=round_key, digest=made, weight=0.0, num_tokens=0, consumed=consumed))

    def all_vote_but(self, *numbers: int) -> None:
        for number in self.member_numbers():
            if number not in numbers:
                self.votes(number)

    def comes_back(self, number: int) -> None:
        """A member that was put out joins again and is a member after the next commit."""
        self.join(number, self.machine.state.committed, epoch=self.machine.state.epoch)
        self.all_vote_but()
        assert number in self.member_numbers()

    @property
    def step(self) -> int:
        return self.machine.state.outer_step

    def is_struck(self, number: int) -> bool:
        return any(ref(number) in record.struck for record in self.records(ViewRecord))


def members(*numbers: int, **config: object) -> Members:
    driver = Members(**config)
    driver.with_members(*numbers)
    return driver


def lease(driver: Members, number: int, num_samples: int, serial: int = 0) -> tuple[IndexRange, ...]:
    epoch = driver.machine.state.epoch
    driver.says(number, LeaseRequest(epoch=epoch, serial=serial, num_samples=num_samples))
    return driver.told(number, LeaseGrant).ranges
