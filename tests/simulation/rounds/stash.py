# SPDX-License-Identifier: Apache-2.0
"""What came before its round was posted, or before its view. Stands in for the stashes of rounds/engine.py."""

from isthmus.collective.core.types import PeerRef, RoundKey
from tests.simulation.rounds.values import Frame

Stash = dict[tuple[RoundKey, str, int], Frame]


class Stashes:
    """Frames by sender; repeats replace. The checker watches their bounds.

    Args:
        drops_older_epochs: what a sender said of older views than the newest it speaks of is forgotten: it has left
            them for good, and what it sends in several views together would exceed the bound of one.
    """

    def __init__(self, *, drops_older_epochs: bool) -> None:
        self._drops_older_epochs = drops_older_epochs
        self._stashes: dict[PeerRef, Stash] = {}
        self._newest_epochs: dict[PeerRef, int] = {}

    def of(self, sender: PeerRef) -> Stash:
        """All that is held back of this sender."""
        return self._stashes.setdefault(sender, {})

    def put(self, frame: Frame) -> None:
        """Hold it back."""
        assert frame.key is not None
        stash = self.of(frame.sender)
        if self._drops_older_epochs:
            newest = max(frame.key.epoch, self._newest_epochs.get(frame.sender, -1))
            self._newest_epochs[frame.sender] = newest
            for name in [name for name in stash if name[0].epoch < newest]:
                del stash[name]
            if frame.key.epoch < newest:
                return
        name = (frame.key, frame.kind, frame.chunk)
        stash.pop(name, None)
        stash[name] = frame

    def take(self, sender: PeerRef, key: RoundKey) -> list[Frame]:
        """What is held back of this sender for this round, in the order of its arrival."""
        stash = self._stashes.get(sender, {})
        return [stash.pop(name) for name in [name for name in stash if name[0] == key]]

    def drop_before(self, epoch: int) -> None:
        """Forget frames of older views."""
        for ref, stash in self._stashes.items():
            self._stashes[ref] = {name: frame for name, frame in stash.items() if name[0].epoch >= epoch}
