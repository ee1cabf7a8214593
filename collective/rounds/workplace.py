# SPDX-License-Identifier: Apache-2.0
"""What the operations of one communicator share: memory, codecs, and what is known of the links.

Rules: the same view, table and tensor lead to the same plan on every member. Nothing here moves a byte.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.collective.codec import Codec, codec_named
from isthmus.collective.core.apart import NO_PAIR, Apart
from isthmus.collective.core.cost import Volume, paces, predict
from isthmus.collective.core.link_table import LinkTable
from isthmus.collective.core.planner import PLANS, Choice, choose
from isthmus.collective.core.slices import Route, gather
from isthmus.collective.rounds.buffers import HALF
from isthmus.collective.rounds.plan import FAR_CHUNK_NBYTES, RoundPlan, cut, share_out
from isthmus.collective.transport.memory import BufferPool

_SWAP_NBYTES = 4 << 20
"""Above that the second pass over the tensor costs more than the second trip."""
_FAR_ONE_WAY_S = 0.001
_PLANS_KEPT = 64
_FP32_NBYTES = 4
_MOST_IN_MEMORY = 4
"""How many times longer than on the wire a chunk may be: much longer ones leave nothing to overlap."""


class Workplace:
    """What the operations of one communicator share: memory, codecs, what is known of the links.

    Args:
        chunk_nbytes: longest chunk on the wire.
        pool: of large buffers.
    """

    def __init__(self, *, chunk_nbytes: int, pool: BufferPool) -> None:
        self.chunk_nbytes = chunk_nbytes
        self.pool = pool
        self.apart = NO_PAIR
        self._max_chunk_nbytes = chunk_nbytes
        self._codecs: dict[str, Codec] = {}
        self._table: LinkTable | None = None
        self._plans: dict[tuple[str, int, int, torch.dtype, str], tuple[Choice, RoundPlan]] = {}

    def install(self, apart: Apart) -> None:
        """Plan for a view of which nothing is known but the pairs without a link."""
        self.apart = apart
        self.learn(None)  # who survives an abort cannot know which of the others finished a survey

    def learn(self, table: LinkTable | None) -> None:
        """Plan by this table of the view's members from now on; None: by nothing."""
        self._table = table
        self._plans.clear()
        is_far = table is not None and max(max(row) for row in table.latency_s) > _FAR_ONE_WAY_S
        self.chunk_nbytes = min(self._max_chunk_nbytes, FAR_CHUNK_NBYTES) if is_far else self._max_chunk_nbytes

    def cut(self, numels: Sequence[int], routes: tuple[Route, ...], item_nbytes: int, codec: str = "raw") -> RoundPlan:
        """See plan.cut."""
        return cut(numels, routes, item_nbytes=item_nbytes, chunk_nbytes=self._longest_chunk_nbytes(routes, codec))

    def _longest_chunk_nbytes(self, routes: tuple[Route, ...], codec: str) -> int:
        """In memory; on the wire no chunk is longer than `chunk_nbytes`, and what a codec makes short may be more."""
        is_far = self.chunk_nbytes < self._max_chunk_nbytes
        if codec == "raw" or is_far or not all(route.is_star for route in routes):  # sums travel as they are
            return self.chunk_nbytes
        wire_nbytes = self.codec(codec).wire_nbytes(self.chunk_nbytes // _FP32_NBYTES)
        return min(_MOST_IN_MEMORY * self.chunk_nbytes, self.chunk_nbytes**2 // wire_nbytes)

    def codec(self, name: str) -> Codec:
        """The codec of this name, with its scratch."""
        if name not in self._codecs:
            self._codecs[name] = codec_named(name)
        return self._codecs[name]

    def choose(self, plan: str, world_size: int, source: Tensor, codec: str) -> tuple[Choice, RoundPlan]:
        """The plan of an all-reduce among the members of the view, and its cut of the tensor.

        Raises:
            ValueError: no plan of that name, or one that needs a link which is not there.
        """
        asked = (plan, world_size, source.numel(), source.dtype, codec)
        known = self._plans.get(asked)  # training posts the same operations again and again
        if known is not None:
            return known
        if plan != "auto" and plan not in PLANS:
            raise ValueError(f"no plan {plan!r}; there are auto, {', '.join(PLANS)}")
        choice = self._choose(plan, world_size, source, codec)
        numel = source.numel()
        numels = [numel] * 2 if choice.name == "swap" else share_out(numel, choice.shares)
        if len(self._plans) >= _PLANS_KEPT:
            self._plans.clear()
        self._plans[asked] = found = choice, self.cut(numels, choice.routes, source.element_size(), codec)
        return found

    def _choose(self, plan: str, world_size: int, source: Tensor, codec: str) -> Choice:
        table = LinkTable.unknown(world_size) if self._table is None else self._table
        table = table.without(self.apart)
        is_far = self.chunk_nbytes < self._max_chunk_nbytes
        if plan == "auto" and world_size == 2 and codec == "raw" and (is_far or source.nbytes <= _SWAP_NBYTES):
            return self._swap(source.nbytes, table)
        encoded = source.nbytes if codec == "raw" else self.codec(codec).wire_nbytes(source.numel())
        volume = Volume(
            nbytes_up_raw=source.nbytes, nbytes_up=encoded, nbytes_down=encoded, chunk_nbytes=self.chunk_nbytes
        )
        # Sums of half-precision numbers are kept in fp32, which only a root does: nobody may add up on the way.
        only = "butterfly" if source.dtype in HALF else None if plan == "auto" else plan
        choice = choose(table, volume, only=only)
        if not choice.is_possible(self.apart):
            raise ValueError(f'plan {choice.name!r} needs a link between two members that have none; use "auto"')
        return choice

    def _swap(self, nbytes: int, table: LinkTable) -> Choice:
        """Each of two sends the other its whole part."""
        routes, shares, both = gather(2), (0.5, 0.5), 2.0 * nbytes
        if table.says_nothing:
            return Choice(name="swap", routes=routes, shares=shares, predicted_s=None)
        volume = Volume(nbytes_up_raw=both, nbytes_up=both, nbytes_down=both, chunk_nbytes=self.chunk_nbytes)
        return Choice(
            name="swap",
            routes=routes,
            shares=shares,
            predicted_s=predict(routes, shares, volume, table),
            paces=paces(routes, shares, volume, table),
        )
