# SPDX-License-Identifier: Apache-2.0
"""A run of real daemons once more, in one process: `optim.simulate` over real inner loops, fed with the same samples.

Not a test. `Account.of` reads what a calm run has written down: its settings, who took which samples for which outer
step, what was committed. `again` trains the same peers by the simulator: one `InnerLoop` a peer, built as a worker
builds it, on the samples that the journal names, in the order in which the peer took them.

That order follows from the ranges: in a run that nobody leaves, each lease lies above all earlier ones, and a peer
hands its leases out from below. So the samples of an outer step, sorted, are those of its inner steps in their order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from isthmus.collective.core.types import OuterStep
from isthmus.elastic.core.messages import Held
from isthmus.elastic.core.records import CommitRecord, Genesis, Record, ReleaseRecord, RollbackRecord, ViewRecord
from isthmus.elastic.state.digest import Hasher, describe_state
from isthmus.optim.fragments import Fragment
from isthmus.optim.outer import GRAD, PARAM, Outer, Tensors
from isthmus.optim.outer_plan import OuterPlan
from isthmus.optim.simulate import Trajectory, by_samples, simulate
from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, CheckpointStore
from isthmus.trainer.checkpoint.private_files import FOLDER_NAME as PRIVATE_NAME
from isthmus.trainer.checkpoint.private_files import PrivateFiles
from isthmus.trainer.config.manifest import config_of
from isthmus.trainer.config.outer_method import fragment_table, method_of
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.wiring import training_job
from isthmus.trainer.data.corpus import Corpus, load_corpus
from isthmus.trainer.engine.progress import Progress
from isthmus.trainer.engine.state_version import byte_view, name_tensors, with_chain
from isthmus.trainer.workers.inner_loop import InnerLoop
from scripts.convergence.codec_wire import CodecWire
from tests.multiprocess.processes import Process
from tests.multiprocess.run_audit import read_journal

# ------------------------------------------------------------------------------------------------ what was written down


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a calm run has written down: all peers were there from its first outer step to its last."""

    run_id: str
    config: Config
    begun: Genesis
    commits: tuple[CommitRecord, ...]
    """The n-th made outer step n + 1."""
    peers: tuple[str, ...]
    """In the order of the view."""
    batches: Mapping[str, tuple[tuple[int, ...], ...]]
    """By peer: the samples of its inner steps, one after the other."""

    @classmethod
    def of(cls, founder: Process) -> "Account":
        """Read it from the founder's folder; fails if the run was not calm."""
        records = read_journal(founder.directory)
        assert not [record for record in records if isinstance(record, ReleaseRecord | RollbackRecord)]
        (begun,) = (record for record in records if isinstance(record, Genesis))
        commits = tuple(record for record in records if isinstance(record, CommitRecord))
        store = CheckpointStore(founder.directory / FOLDER_NAME, keep=1)
        meta = store.load(store.steps()[-1]).meta
        config = config_of(meta.run_manifest)
        assert [record.outer_step for record in commits] == list(range(1, config.run.outer_steps + 1))
        peers = _members_of(records, commits)
        batch_size = config.inner.batch_size
        return cls(
            run_id=meta.run_id,
            config=config,
            begun=begun,
            commits=commits,
            peers=peers,
            batches={peer: tuple(_batches(commits, peer, batch_size)) for peer in peers},
        )

    @property
    def seq_len(self) -> int:
        """Tokens of a sample."""
        return training_job(self.config).seq_len

    def weights(self, outer_step: int) -> dict[str, float]:
        """What each peer's work weighed, by peer."""
        return {item.ref.peer_id: item.weight for item in self.commits[outer_step - 1].contributions}

    def tokens(self, outer_step: int) -> dict[str, int]:
        """What each peer trained on since the outer step before, by peer."""
        return {item.ref.peer_id: item.num_tokens for item in self.commits[outer_step - 1].contributions}

    def inner_steps(self, outer_step: int) -> dict[str, int]:
        """How many each peer made for it, by peer."""
        per_step = self.config.inner.batch_size * self.seq_len
        return {peer: tokens // per_step for peer, tokens in self.tokens(outer_step).items()}

    def samples(self, outer_step: int) -> int:
        """Those that all have trained on for it."""
        return sum(self.tokens(outer_step).values()) // self.seq_len

    def private_of(self, process: Process) -> Mapping[int, Tensors]:
        """What a peer had of its own after the last outer step, by place of the fragment."""
        files = PrivateFiles(process.directory / PRIVATE_NAME, self.run_id, keep=1)
        last = self.commits[-1]
        own = files.recall(Held(last.outer_step, last.digest))
        return {} if own is None else own.private


def _members_of(records: Sequence[Record], commits: Sequence[CommitRecord]) -> tuple[str, ...]:
    """Who contributed to every commit, in the order of the one view in which they did."""
    epochs = {commit.key.epoch for commit in commits}
    views = [record.view for record in records if isinstance(record, ViewRecord) and record.view.epoch in epochs]
    orders = {tuple(str(member.peer_id) for member in view.members) for view in views}
    assert len(orders) == 1, f"the members changed in the middle of the run: {orders}"
    (members,) = orders
    for commit in commits:
        assert {item.ref.peer_id for item in commit.contributions if item.agreed} == set(members), commit
    return members


def _batches(commits: Sequence[CommitRecord], peer: str, batch_size: int) -> Iterator[tuple[int, ...]]:
    newest = -1
    for commit in commits:
        (own,) = (item for item in commit.contributions if item.ref.peer_id == peer)
        taken = [index for piece in own.consumed for index in range(piece.start, piece.stop)]
        assert taken == sorted(taken), f"{peer} names its samples of outer step {commit.outer_step} in no order"
        assert not taken or taken[0] > newest, f"{peer} took up an older sample at outer step {commit.outer_step}"
        newest = max([newest, *taken])
        yield from (tuple(taken[at : at + batch_size]) for at in range(0, len(taken), batch_size))


# ------------------------------------------------------------------------------------------------------- the simulation


class InnerLoops:
    """A `Workload` of real inner loops, one a peer, whose samples are known beforehand.

    After its last sample a peer stands still, as a daemon does while the last outer step is out. The learning rate
    follows what the journal says that all had committed before.

    Args:
        account: of the run.
        plan: of its method.
        corpus: its text.
        mesh: of one worker.
        num_workers: by peer. Where there are several, each share of a batch is computed by itself, as they do it.
    """

    def __init__(
        self, account: Account, plan: OuterPlan, corpus: Corpus, mesh: DeviceMesh, num_workers: Mapping[str, int]
    ) -> None:
        self._account, self._corpus, self._mesh, self._num_workers = account, corpus, mesh, num_workers
        self._positions = {peer: tuple(_positions(account, plan, peer)) for peer in account.peers}
        method = method_of(account.config)
        kinds = dict.fromkeys((PARAM, *(fragment.kind for fragment in method.fragments)))
        numel = fragment_table(account.config.model).numel
        self.tensors = {kind: torch.zeros(len(account.peers), numel) for kind in kinds}
        self.losses: dict[str, list[float]] = {peer: [] for peer in account.peers}
        """By peer, of its inner steps."""
        self._loops: dict[int, InnerLoop] = {}
        self._peers: dict[int, str] = {}

    def begin(self, row: int, worker: str) -> None:
        """See Workload."""
        job = training_job(self._account.config)
        job = msgspec.structs.replace(job, micro_batch=job.micro_batch // self._num_workers.get(worker, 1))
        self._loops[row] = InnerLoop(job, mesh=self._mesh, train=self._corpus.train, validation=self._corpus.validation)
        self._peers[row] = worker

    def backward(self, rows: Sequence[int], inner_steps: Sequence[int]) -> None:
        """See Workload."""
        for row, inner_step, batch in self._with_samples(rows, inner_steps):
            loop = self._loops[row]
            self._load(row, self._kept)
            loss, _ = loop.backward(batch, inner_step)
            self.losses[self._peers[row]].append(loss)
            if GRAD in self.tensors:
                loop.store(self.tensors[GRAD][row], kind=GRAD)

    def update(self, rows: Sequence[int], inner_steps: Sequence[int]) -> None:
        """See Workload."""
        for row, inner_step, _ in self._with_samples(rows, inner_steps):
            loop = self._loops[row]
            self._load(row, list(self.tensors))  # rounds of the gradient's step may have moved the parameters as well
            loop.update(inner_step, self._positions[self._peers[row]][inner_step - 1])
            for kind in self._kept:
                loop.store(self.tensors[kind][row], kind=kind)

    def _load(self, row: int, kinds: Sequence[str]) -> None:
        for kind in kinds:
            self._loops[row].load(self.tensors[kind][row], kind=kind)

    @property
    def _kept(self) -> list[str]:
        return [kind for kind in self.tensors if kind != GRAD]

    def _with_samples(
        self, rows: Sequence[int], inner_steps: Sequence[int]
    ) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        for row, inner_step in zip(rows, inner_steps, strict=True):
            batches = self._account.batches[self._peers[row]]
            if inner_step <= len(batches):
                yield row, inner_step, batches[inner_step - 1]


def _positions(account: Account, plan: OuterPlan, peer: str) -> Iterator[float]:
    """Where the run is at each inner step that this peer has made."""
    progress = Progress(plan, total_steps=plan.inner_step(len(account.commits)))
    num_samples = 0
    for outer_step in range(1, len(account.commits) + 1):
        begun = plan.inner_step(outer_step - 1)
        yield from (progress.position(begun + step) for step in range(account.inner_steps(outer_step)[peer]))
        num_samples += account.samples(outer_step)
        progress.committed(outer_step, num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Again:
    """What the simulation came to."""

    outer: Outer
    plan: OuterPlan
    fragments: tuple[Fragment, ...]
    initial: Tensor
    trajectory: Trajectory
    losses: Mapping[str, Sequence[float | None]]
    """By peer: the mean of its inner steps since the outer step before, of each outer step; None: it did none."""
    states: tuple[tuple[Tensors, ...], ...]
    """By outer step from 0 on, by place of the fragment: the shared state."""

    def tensors(self, outer_step: int) -> dict[str, Tensor]:
        """The shared state as a checkpoint names it. What nothing is shared of has a chain there, and zeros here."""
        return name_tensors(self.fragments, [with_chain(state) for state in self.states[outer_step]])

    def digest(self, outer_step: int, hasher: Hasher) -> bytes:
        """The digest that members would vote for."""
        parts = hasher.describe([(name, byte_view(tensor)) for name, tensor in self.tensors(outer_step).items()])
        return describe_state(OuterStep(outer_step), parts, chunk_nbytes=hasher.chunk_nbytes).digest


def again(account: Account, mesh: DeviceMesh, *, num_workers: Mapping[str, int]) -> Again:
    """Train the same peers by `optim.simulate`. It is told settings and samples, and nothing that was computed."""
    config = account.config
    model, method = config.model.description(), method_of(config)
    corpus = load_corpus(
        config.data.path,
        seq_len=account.seq_len,
        validation_fraction=config.data.validation_fraction,
        limit_nbytes=config.data.limit_nbytes,
    )
    plan = OuterPlan(method.outer)
    loops = InnerLoops(account, plan, corpus, mesh, num_workers)
    initial = model.initial_parameters(config.run.seed)
    trajectory = simulate(
        method.outer,
        table=fragment_table(config.model),
        initial=initial,
        workers=account.peers,
        workload=loops,
        num_inner_steps=plan.due_step(config.run.outer_steps),
        weigh=by_samples,
        batch_size=config.inner.batch_size,
        leaves_out=_left_out(account, plan),
        wire=CodecWire(config.outer.codec),
    )
    return Again(
        outer=method.outer,
        plan=plan,
        fragments=method.fragments,
        initial=initial,
        trajectory=trajectory,
        losses={peer: list(_losses(account, peer, losses)) for peer, losses in loops.losses.items()},
        states=tuple(_states(method.outer, method.fragments, plan, initial, trajectory, config.run.outer_steps)),
    )


def _left_out(account: Account, plan: OuterPlan) -> Callable[[str, int], bool]:
    """Which inner steps before an outer step a peer has left out: the last ones."""
    made = {
        (peer, plan.inner_step(outer_step - 1) + step)
        for outer_step in range(1, len(account.commits) + 1)
        for peer, number in account.inner_steps(outer_step).items()
        for step in range(1, number + 1)
    }
    last = plan.inner_step(len(account.commits))
    return lambda peer, inner_step: inner_step <= last and (peer, inner_step) not in made


def _losses(account: Account, peer: str, losses: Sequence[float]) -> Iterator[float | None]:
    """The mean of the inner steps of each outer step."""
    done = 0
    for outer_step in range(1, len(account.commits) + 1):
        begun, done = done, done + account.inner_steps(outer_step)[peer]
        yield _mean(losses[begun:done])


def _mean(losses: Sequence[float]) -> float | None:
    return sum(losses) / len(losses) if losses else None


def _states(
    outer: Outer,
    fragments: Sequence[Fragment],
    plan: OuterPlan,
    initial: Tensor,
    trajectory: Trajectory,
    outer_steps: int,
) -> Iterator[tuple[Tensors, ...]]:
    """The shared state after every outer step: a round moves its fragment, and no other."""
    held: list[Tensors] = []
    for fragment in fragments:
        is_parameters = fragment.kind == PARAM
        value = torch.empty(fragment.numel)
        held.append(outer.init(fragment, fragment.gather(initial, out=value) if is_parameters else value.zero_()))
    yield tuple(held)
    places = {fragment.key: place for place, fragment in enumerate(fragments)}
    made = {committed.round_: committed.shared for committed in trajectory.committed}
    for outer_step in range(1, outer_steps + 1):
        for round_ in plan.rounds(outer_step):
            place = places[round_.fragment]
            held[place] = made.get(round_, held[place])
        yield tuple(held)
