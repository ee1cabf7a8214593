# SPDX-License-Identifier: Apache-2.0
"""Everything a run and a peer can be told: all sections, what follows from several of them, and what must fit.

Rules: a key stands in one section with one meaning; what a key means, its default and its range stand in
`trainer.config.training`, `trainer.config.peers` and, for `[outer]`, with the method itself (`trainer.config.outer`).
Whether the method fits model and run is looked at elsewhere (`outer_method.py`). Must not know where values come from
(`sources.py`), nor torch: the command line starts quickly.

Errors: `ConfigError` (2) for a value that cannot be.
"""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from isthmus.trainer.config.outer import DEFAULT_METHOD, Outer, outer_section
from isthmus.trainer.config.peers import (
    CheckpointSection,
    CoordinatorSection,
    EvalSection,
    MembersSection,
    MetricsSection,
    NetSection,
    NodeSection,
)
from isthmus.trainer.config.training import (
    AdamW,
    DataSection,
    DecoderSection,
    HuggingFaceSection,
    InnerSection,
    LoopModelSection,
    ModelSection,
    RunSection,
)
from isthmus.trainer.config.values import Json, Section, is_url


class Config(Section):
    """Everything. Frozen: `load_config` of sources.py makes it."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection = Field(default_factory=DecoderSection)
    data: DataSection = Field(default_factory=DataSection)
    inner: InnerSection = Field(default_factory=AdamW)
    outer: Outer = Field(default_factory=lambda: outer_section(DEFAULT_METHOD)(type=DEFAULT_METHOD))
    members: MembersSection = Field(default_factory=MembersSection)
    net: NetSection = Field(default_factory=NetSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    eval: EvalSection = Field(default_factory=EvalSection)
    metrics: MetricsSection = Field(default_factory=MetricsSection)
    coordinator: CoordinatorSection = Field(default_factory=CoordinatorSection)
    node: NodeSection = Field(default_factory=NodeSection)

    @property
    def is_loops(self) -> bool:
        """Whether the run's peers train by loops of their own: model, data and inner optimizer are theirs."""
        return isinstance(self.model, LoopModelSection)

    @property
    def data_path(self) -> Path | None:
        """Where this peer reads its text; None is the standard library. Not where `data_url` is set."""
        return Path(self.node.data) if self.node.data is not None else self.data.path

    @property
    def data_url(self) -> str | None:
        """Where it reads it through the fsspec library instead."""
        return self.node.data if self.node.data is not None and is_url(self.node.data) else None

    @property
    def model_path(self) -> Path | None:
        """Where this peer has the folder of a Hugging Face model; None where none is trained."""
        if not isinstance(self.model, HuggingFaceSection):
            return None
        return self.node.model if self.node.model is not None else self.model.path

    @property
    def metrics_port(self) -> int | None:
        """Where this peer tells its metrics; 0 is any free port, None is nowhere."""
        return self.node.metrics_port if self.node.metrics_port is not None else self.metrics.port

    @model_validator(mode="after")
    def _results_have_a_checkpoint_to_follow(self) -> Self:
        if self.members.durable and not self.checkpoint.every:
            raise ValueError(
                "members.durable keeps results behind a checkpoint, and checkpoint.every = 0 writes none before the "
                "end; give a checkpoint.every of at least 1"
            )
        return self

    @model_validator(mode="after")
    def _loops_have_their_own_inner_steps(self) -> Self:
        if self.is_loops != (self.inner.type == "loop"):
            raise ValueError(
                f'model.type = "{self.model.type}" and inner.type = "{self.inner.type}" do not go together; a loop of '
                "one's own says both itself: begin it with isthmus.attach"
            )
        if self.is_loops and self.data_path is not None:
            raise ValueError("a loop of one's own has its own data; leave out data.path and --data")
        return self

    def tree(self) -> dict[str, Json]:
        """All values by TOML key, as JSON knows them."""
        values: dict[str, Json] = self.model_dump(mode="json", by_alias=True)
        return values
