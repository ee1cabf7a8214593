"""This peer's copy of the shared state: live, staged for a commit, pinned for learners.

A version of the state is never changed once it is live. An outer step writes the next version into spare buffers
(`stage`); a commit swaps the two (`install_staged`), an abort forgets it (`discard_staged`). A donor pins the version
it serves: a pinned version is not recycled, and only then does the next stage allocate.

Memory, in copies of the parameters for DiLoCo: live 2, spare 2 (the mean is received straight into one of them, and a
state that is being fetched into both), 2 more for every older version that is still pinned. Spare memory that was
staged in vain keeps its digests: what is right in it need not be fetched.

It must not know the network, views or workers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collective import decode_result
from collective.core.types import OuterStep
from collective.errors import RemoteProtocolError
from elastic.core.messages import Held
from elastic.digest import Hasher, StateManifest, chunk_of, describe_state
from elastic.errors import StateDiverged, StateMismatch
from elastic.parity import Difference
from elastic.replica import CommitEntry
from optim.fragments import Fragment
from optim.outer import ANCHOR, Absorbed, Outer, Result, Round, State
from trainer.round_schedule import RoundSchedule
from trainer.threads import in_thread

_NUMEL_NBYTES = 4
"""Of an fp32 element."""


@dataclass(slots=True, kw_only=True, eq=False)
class Version:
    """One shared state, whole and hashed. `pins` counts who needs it: learners, and work that began from it."""

    state: State
    manifest: StateManifest
    when_idle: Callable[["Version"], None]
    pins: int = 0

    @property
    def held(self) -> Held:
        """Its outer step and digest."""
        return Held(self.manifest.outer_step, self.manifest.digest)

    def chunk(self, tensor: int, chunk: int) -> memoryview:
        """The bytes of one chunk of one tensor, in manifest order."""
        whole = byte_view(self.state.shared[self.manifest.tensors[tensor].name])
        return chunk_of(whole, chunk, self.manifest.chunk_nbytes)

    def release(self) -> None:
        """Give up one pin. The last one gives the buffers back."""
        self.pins -= 1
        if self.pins == 0:
            self.when_idle(self)


@dataclass(slots=True, kw_only=True, eq=False)
class _Staged:
    version: Version
    absorbed: Absorbed = field(repr=False)


@dataclass(slots=True, kw_only=True, eq=False)
class _Restoring:
    """Spare memory that is being filled, and how it was handed out."""

    state: State
    names: tuple[str, ...]
    destinations: tuple[memoryview, ...]


class OuterState:
    """The shared state of one fragment, and the replica that elastic sees.

    Args:
        outer: the method.
        fragment: what is exchanged; here always the whole vector, [fragment.numel] fp32.
        schedule: which round makes which outer step.
        hasher: makes the manifests; its threads are the caller's to close.
    """

    def __init__(self, outer: Outer, fragment: Fragment, schedule: RoundSchedule, hasher: Hasher) -> None:
        self._outer = outer
        self._fragment = fragment
        self._schedule = schedule
        self._hasher = hasher
        self._live: Version | None = None
        self._staged: _Staged | None = None
        self._spare: State | None = None
        self._leftover: StateManifest | None = None  # of what is in the spare memory
        self._restoring: _Restoring | None = None

    # -------------------------------------------------------------------------------- reading

    @property
    def live(self) -> Version:
        """The committed state.

        Raises:
            AssertionError: if nothing is held yet (our bug: the member machine knows).
        """
        assert self._live is not None, "no shared state is held yet"
        return self._live

    @property
    def anchor(self) -> Tensor:
        """[numel], the committed parameters. Read-only."""
        return self.live.state.shared[ANCHOR]

    def held(self) -> Held | None:
        """What is held, or None before the first state."""
        return None if self._live is None else self._live.held

    def parameters_in(self, where: Difference) -> tuple[str, ...]:
        """The model's parameters that a range of a shared tensor belongs to; none if it is not laid out as they are."""
        if self.live.state.shared[where.tensor].numel() != self._fragment.numel:
            return ()
        return self._fragment.names_in(where.start_nbytes // _NUMEL_NBYTES, -(-where.stop_nbytes // _NUMEL_NBYTES))

    # -------------------------------------------------------------------------------- making states

    async def adopt(self, outer_step: int, tensors: Mapping[str, Tensor], *, digest: bytes | None = None) -> Held:
        """Make these tensors the live state: a checkpoint's.

        Args:
            outer_step: of the state.
            tensors: copied, fp32.
            digest: what the members voted for, if known.

        Raises:
            StateMismatch: if names or sizes are not those of this method and model, or the digest is another.
        """
        state = self._outer.init(self._fragment, torch.zeros(self._fragment.numel))
        given = {name: tensor.numel() for name, tensor in tensors.items()}
        ours = {name: tensor.numel() for name, tensor in state.shared.items()}
        if given != ours:
            raise StateMismatch(f"the state holds {given}, this model and method need {ours}")
        for name, tensor in state.shared.items():
            tensor.copy_(tensors[name].view(-1))
        manifest = await self._describe(outer_step, state)
        if digest is not None and manifest.digest != digest:
            raise StateMismatch(f"the state of outer step {outer_step} is not the one that was committed")
        return self._make_live(state, manifest)

    async def found(self, parameters: Tensor) -> Held:
        """Make the run's first state from initial parameters, [numel]."""
        state = self._outer.init(self._fragment, parameters)
        return self._make_live(state, await self._describe(0, state))

    def _make_live(self, state: State, manifest: StateManifest) -> Held:
        self._retire()
        self._live = self._version(state, manifest)
        return self._live.held

    def _version(self, state: State, manifest: StateManifest) -> Version:
        return Version(state=state, manifest=manifest, when_idle=self._recycle)

    # -------------------------------------------------------------------------------- one outer step

    def result_buffer(self) -> Tensor:
        """[numel], where the mean of the next round goes. It is one of the spare buffers: see `stage`."""
        self._leftover = None
        if self._spare is None:
            # What a broken transfer has brought is worth less than a third copy of the state costs.
            begun, self._restoring = self._restoring, None
            self._spare = self.live.state.empty_like() if begun is None else begun.state
        return self._spare.shared[ANCHOR]

    async def stage(self, round_: Round, members: Sequence[str], weight_sum: float) -> bytes:
        """Absorb the mean in `result_buffer` into staging. The live state is untouched.

        Returns:
            The digest that the shared state would have.
        """
        mean = self.result_buffer()
        spare = self._spare
        assert spare is not None
        if weight_sum > 0.0:
            result = Result(value=mean, members=tuple(members), weight_sum=weight_sum)
            absorbed = await in_thread(self._outer.absorb, round_, result, self.live.state, out=spare)
        else:
            # A round of learners that have not trained yet: nothing moves, the step counts.
            absorbed = await in_thread(self._copy_live, spare)
        manifest = await self._describe(self.live.manifest.outer_step + 1, absorbed.state)
        self._staged = _Staged(version=self._version(absorbed.state, manifest), absorbed=absorbed)
        return manifest.digest

    def install_staged(self, held: Held) -> Absorbed:
        """The staged state is committed as `held`: make it the live one, recycle the old one unless it is pinned.

        Returns:
            What the workers do with their local values.
        """
        staged = self._staged
        assert staged is not None, f"nothing is staged for {held}"
        assert staged.version.held == held, f"{staged.version.held} is staged, committed was {held}"
        self._staged = None
        self._spare = self._leftover = None
        self._retire()
        self._live = staged.version
        return staged.absorbed

    def discard_staged(self) -> None:
        """The round was aborted: its buffers are free for the next attempt, or for what the others agreed on."""
        if self._staged is not None:
            self._leftover = self._staged.version.manifest
        self._staged = None

    async def _describe(self, outer_step: int, state: State) -> StateManifest:
        named = [(name, byte_view(tensor)) for name, tensor in sorted(state.shared.items())]
        parts = await self._hasher.describe_async(named)
        return describe_state(OuterStep(outer_step), parts, chunk_nbytes=self._hasher.chunk_nbytes)

    def _retire(self) -> None:
        old, self._live = self._live, None
        if old is not None and not old.pins:
            self._recycle(old)

    def _recycle(self, version: Version) -> None:
        """Nobody needs this version any more; the next outer step is written over it."""
        if version is not self._live and self._spare is None:
            self._spare, self._leftover = version.state, None

    def _copy_live(self, out: State) -> Absorbed:
        for name, tensor in self.live.state.shared.items():
            out.shared[name].copy_(tensor)
        return Absorbed(state=out, target=out.shared[ANCHOR], keep=0.0)

    # -------------------------------------------------------------------------------- elastic.Replica

    def pin(self) -> Version:
        """The live version, kept as it is until `release`. Costs nothing by itself."""
        self.live.pins += 1
        return self.live

    def leftover(self) -> StateManifest | None:
        """What the spare memory contains, if it was staged or replayed in vain."""
        return self._leftover

    def begin_restore(self, manifest: StateManifest) -> tuple[memoryview, ...]:
        """Writable buffers for a state that is being fetched, in manifest order.

        The same ones again after a broken transfer: what has arrived is not fetched twice.

        Raises:
            StateMismatch: if the donor's tensors are not those of this method and model.
        """
        begun, names = self._restoring, tuple(tensor.name for tensor in manifest.tensors)
        if begun is not None and self._spare is None:
            state = begun.state
        else:
            state = self._spare or self._outer.init(self._fragment, torch.zeros(self._fragment.numel))
            begun = None
        ours = {name: tensor.nbytes for name, tensor in state.shared.items()}
        theirs = {tensor.name: tensor.nbytes for tensor in manifest.tensors}
        if ours != theirs or len(names) != len(theirs):
            raise StateMismatch(f"the donor's state holds {theirs} bytes, this model and method need {ours}")
        self._spare = self._staged = self._leftover = None
        if begun is None or begun.names != names:
            destinations = tuple(byte_view(state.shared[name]) for name in names)
            begun = self._restoring = _Restoring(state=state, names=names, destinations=destinations)
        return begun.destinations

    async def finish_restore(self, manifest: StateManifest) -> Held:
        """The buffers are filled and verified: make them the live state."""
        assert self._restoring is not None, "no restore is under way"
        restored, self._restoring = self._restoring, None
        self._staged = None
        self._retire()
        self._live = self._version(restored.state, manifest)
        return self._live.held

    async def replay(self, entry: CommitEntry) -> Held:
        """Apply one committed result to what is held: the learner's own outer step.

        Raises:
            StateDiverged: if the outcome has not the committed digest; what was held is kept.
            RemoteProtocolError: if its chunks do not fit this model; what was held is kept.
        """
        await in_thread(_decode_all, entry, self.result_buffer())
        round_ = self._schedule.round_after(self.live.manifest.outer_step)
        weights = dict(entry.weights)
        digest = await self.stage(round_, tuple(weights), math.fsum(weights.values()))
        if digest != entry.digest:
            self.discard_staged()
            raise StateDiverged(entry.outer_step, expected=entry.digest, actual=digest)
        self.install_staged(Held(entry.outer_step, entry.digest))
        return self.live.held


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable, sharing memory."""
    view: memoryview = tensor.view(torch.uint8).numpy().data
    return view


def _decode_all(entry: CommitEntry, out: Tensor) -> None:
    try:
        ends = [chunk.start_numel for chunk in entry.chunks[1:]] + [out.numel()]
        for chunk, end in zip(entry.chunks, ends, strict=False):
            decode_result(entry.codec, chunk.start_numel, end - chunk.start_numel, chunk.data, out)
    except ValueError as error:  # the donor's fault, not ours
        raise RemoteProtocolError("a recorded result does not fit") from error
