# SPDX-License-Identifier: Apache-2.0
"""Everything a run and a peer can be told: all sections, what follows from several of them, and what must fit.

Rules: a key stands in one section with one meaning; what a key means, its default and its range stand in
`trainer.config_training` and `trainer.config_peers`. Must not know where values come from (`trainer.config_sources`),
nor torch: the command line starts quickly.

Errors: `ConfigError` (2) for a value that cannot be.
"""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from isthmus.trainer.config_peers import (
    CheckpointSection,
    CoordinatorSection,
    EvalSection,
    MembersSection,
    MetricsSection,
    NetSection,
    NodeSection,
)
from isthmus.trainer.config_training import (
    AdamW,
    CosineSchedule,
    DataSection,
    Diloco,
    InnerSection,
    ModelSection,
    OuterSection,
    RunSection,
    Streaming,
    WsdSchedule,
)
from isthmus.trainer.config_values import Json, Section


class Config(Section):
    """Everything. Frozen: `trainer.config_sources.load_config` makes it."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataSection = Field(default_factory=DataSection)
    inner: InnerSection = Field(default_factory=AdamW)
    outer: OuterSection = Field(default_factory=Diloco)
    members: MembersSection = Field(default_factory=MembersSection)
    net: NetSection = Field(default_factory=NetSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    metrics: MetricsSection = Field(default_factory=MetricsSection)
    coordinator: CoordinatorSection = Field(default_factory=CoordinatorSection)
    node: NodeSection = Field(default_factory=NodeSection)

    @property
    def data_path(self) -> Path | None:
        """Where this peer reads its text; None is the standard library."""
        return self.node.data if self.node.data is not None else self.data.path

    @property
    def metrics_port(self) -> int | None:
        """Where this peer tells its metrics; 0 is any free port, None is nowhere."""
        return self.node.metrics_port if self.node.metrics_port is not None else self.metrics.port

    @property
    def num_fragments(self) -> int:
        """Parts of the model that are exchanged in turn, with the default worked out.

        Raises:
            ConfigError: the default is asked for, and the model cannot be built.
        """
        if not isinstance(self.outer, Streaming):
            return 1
        if self.outer.num_fragments is not None:
            return self.outer.num_fragments
        from isthmus.optim.fragments import FragmentTable
        from isthmus.optim.streaming import default_num_fragments
        from isthmus.trainer.model import named_shapes

        return default_num_fragments(FragmentTable.from_named_shapes(named_shapes(self.model.decoder_config())))

    @property
    def inner_steps_per_round(self) -> int:
        """Inner steps between two exchanges; one less between some, if fragments do not divide `outer.inner_steps`."""
        return -(-self.outer.inner_steps // self.num_fragments)

    @property
    def total_inner_steps(self) -> int:
        """Inner steps of a peer that takes part from the start to the end; the length of the schedule."""
        return self.run.outer_steps * self.outer.inner_steps // self.num_fragments

    @property
    def warmup_steps(self) -> int:
        """Inner steps of the warm-up, with the default worked out."""
        given = self.inner.schedule.warmup_steps
        return given if given is not None else min(100, self.total_inner_steps // 20)

    @property
    def decay_steps(self) -> int:
        """Inner steps of the last decay, with the default worked out; 0 where the schedule has none."""
        if not isinstance(self.inner.schedule, WsdSchedule):
            return 0
        given = self.inner.schedule.decay_steps
        return given if given is not None else self.total_inner_steps // 5

    @model_validator(mode="after")
    def _fragments_take_turns(self) -> Self:
        if not isinstance(self.outer, Streaming):
            return self
        inner_steps, count = self.outer.inner_steps, self.num_fragments
        if count > inner_steps:
            raise ValueError(
                f"outer.num_fragments is {count}, but only {inner_steps} fragments can have their turn in "
                f"outer.inner_steps = {inner_steps}; take fewer fragments or more inner steps"
            )
        apart = inner_steps // count
        longest = min(apart, inner_steps - 1)
        if self.outer.delay > longest:
            raise ValueError(
                f"outer.delay is {self.outer.delay}, but rounds come one at a time, and two fragments' turns are as "
                f"close as {apart} inner steps (outer.inner_steps by outer.num_fragments = {count}); give a delay of "
                f"at most {longest}"
            )
        return self

    @model_validator(mode="after")
    def _results_have_a_checkpoint_to_follow(self) -> Self:
        if self.members.durable and not self.checkpoint.every:
            raise ValueError(
                "members.durable keeps results behind a checkpoint, and checkpoint.every = 0 writes none before the "
                "end; give a checkpoint.every of at least 1"
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits_the_run(self) -> Self:
        least_rest = 1 if isinstance(self.inner.schedule, CosineSchedule) else 0
        needed = self.warmup_steps + self.decay_steps + least_rest
        if self.inner.schedule.type != "constant" and needed > self.total_inner_steps:
            raise ValueError(
                f"inner.schedule needs at least {needed} inner steps for its warm-up and decay, but the run has "
                f"{self.total_inner_steps} (run.outer_steps times outer.inner_steps{_by_fragments(self.num_fragments)})"
            )
        return self

    def tree(self) -> dict[str, Json]:
        """All values by TOML key, as JSON knows them."""
        values: dict[str, Json] = self.model_dump(mode="json", by_alias=True)
        return values


def _by_fragments(count: int) -> str:
    return "" if count == 1 else f", by {count} fragments"
