# SPDX-License-Identifier: Apache-2.0
"""How a member asks for data: one request at a time, recognisable by its serial, valid for one membership."""

from isthmus.collective.core.types import Epoch
from isthmus.elastic.core.messages import IndexRange, LeaseGrant, LeaseRequest


class LeaseDesk:
    """The request that waits for its grant, and what is wanted beyond it."""

    def __init__(self) -> None:
        self.request: LeaseRequest | None = None
        self._serial = 0
        self._num_wanted = 0

    def want(self, num_samples: int, epoch: Epoch) -> LeaseRequest | None:
        """More is wanted. The request to send now, or None if one is under way already."""
        self._num_wanted += num_samples
        if self.request is not None or self._num_wanted == 0:
            return None
        self._serial += 1
        self.request = LeaseRequest(epoch=epoch, serial=self._serial, num_samples=self._num_wanted)
        self._num_wanted = 0
        return self.request

    def take(self, grant: LeaseGrant) -> tuple[IndexRange, ...] | None:
        """The granted ranges, or None if nobody waits for this grant (any more)."""
        if self.request is None or grant.serial != self.request.serial:
            return None
        self.request = None
        return grant.ranges

    def forget(self) -> None:
        """The membership ended, and with it every lease."""
        self.request = None
        self._num_wanted = 0
