# SPDX-License-Identifier: Apache-2.0
"""The committed states that the run can go back to.

These are the newest 256. Of commits that were made by a single member, one after the other, half as many count: after
a power cut somebody may go on alone, and lie, while the others wait without its state. It must not take away what they
can go back to.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from isthmus.elastic.core.certificate import Certificate
from isthmus.elastic.core.values import DataPosition, Digest, Held

_MOST = 256
_MOST_ALONE = _MOST // 2


class Past(msgspec.Struct, frozen=True):
    """A committed state that the run can go back to. Without a certificate it is the one that the run began with."""

    held: Held
    position: DataPosition
    link: Digest
    certificate: Certificate | None = None


def is_of(past: Past, certificate: Certificate | None) -> bool:
    """Whether this certificate, under whatever seal, is of that state."""
    if certificate is None or past.certificate is None:
        return certificate is past.certificate
    return certificate.link == past.link


@dataclass(slots=True)
class Pasts:
    """A bounded history of committed states, oldest first. The last one is the run's."""

    _items: list[Past] = field(default_factory=list)

    def __iter__(self) -> Iterator[Past]:
        return iter(self._items)

    @property
    def newest(self) -> Past | None:
        """Where the run is; None before it began."""
        return self._items[-1] if self._items else None

    def append(self, past: Past) -> None:
        """The run is there now."""
        self._items.append(past)
        if len(self._items) > _MOST:
            num_alone = self._num_alone()
            del self._items[-num_alone if num_alone > _MOST_ALONE else 0]

    def find(self, held: Held) -> Past | None:
        """What is known of this state."""
        return next((item for item in reversed(self._items) if item.held == held), None)

    def go_back(self, certificate: Certificate | None) -> Past:
        """Forget all that came after this certificate's state, and return what is known of it."""
        at = next((number for number, item in enumerate(self._items) if is_of(item, certificate)), None)
        assert at is not None, "the run goes back to a commit that counts"
        del self._items[at + 1 :]
        return self._items[at]

    def _num_alone(self) -> int:
        """How many of the newest were made by one member alone."""
        for count, item in enumerate(reversed(self._items)):
            if item.certificate is None or len(item.certificate.contributors) > 1:
                return count
        return len(self._items)
