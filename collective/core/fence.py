# SPDX-License-Identifier: Apache-2.0
"""One decision for every frame: of the past, of now, or of a view we have not installed yet.

Rules: a frame is current only if exactly this start of its sender is a member of exactly this view. An older
incarnation is past whatever it claims; a newer one that names our epoch is not in our view, so it is past as well
and will be heard in the view that holds it. What happens to each kind is the shell's: past frames are read, dropped
and counted; future frames are held back within a bound.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.collective.core.types import Epoch, Incarnation, PeerId, PeerRef, View


class Standing(enum.Enum):
    """Where a frame stands relative to the installed view."""

    STALE = "stale"
    CURRENT = "current"
    FUTURE = "future"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """What is needed of a view to judge a frame."""

    epoch: Epoch
    incarnations: Mapping[PeerId, Incarnation]

    @classmethod
    def before_any_view(cls) -> "Fence":
        """The fence of somebody without a view: everything is of the future."""
        return cls(epoch=Epoch(-1), incarnations={})

    @classmethod
    def of(cls, view: View) -> "Fence":
        """The fence of an installed view."""
        return cls(epoch=view.epoch, incarnations={m.peer_id: m.incarnation for m in view.members})

    def judge(self, sender: PeerRef, epoch: Epoch) -> Standing:
        """Decide about a frame that `sender` stamped with `epoch`."""
        known = self.incarnations.get(sender.peer_id)
        if epoch < self.epoch or (known is not None and sender.incarnation < known):
            return Standing.STALE
        if epoch > self.epoch:
            return Standing.FUTURE
        return Standing.CURRENT if known == sender.incarnation else Standing.STALE
