# SPDX-License-Identifier: Apache-2.0
"""How parameters move: outer optimizers, and what the inner loop needs beside them. See README.md."""

from isthmus.optim.diloco import DiLoCo, default_outer_lr
from isthmus.optim.fragments import Fragment, FragmentKey, FragmentTable, ParameterSpec
from isthmus.optim.inner import build_inner_optimizer, set_lr
from isthmus.optim.outer import (
    ANCHOR,
    GRAD,
    PARAM,
    Contribution,
    Emitted,
    Op,
    Outcome,
    Outer,
    Result,
    Round,
    Settled,
    Tensors,
    Work,
)
from isthmus.optim.registry import build_outer, outer_from_config, outer_types, register
from isthmus.optim.run_facts import RunFacts
from isthmus.optim.schedule import Schedule, build_schedule

__all__ = [
    "ANCHOR",
    "GRAD",
    "PARAM",
    "Contribution",
    "DiLoCo",
    "Emitted",
    "Fragment",
    "FragmentKey",
    "FragmentTable",
    "Op",
    "Outcome",
    "Outer",
    "ParameterSpec",
    "Result",
    "Round",
    "RunFacts",
    "Schedule",
    "Settled",
    "Tensors",
    "Work",
    "build_inner_optimizer",
    "build_outer",
    "build_schedule",
    "default_outer_lr",
    "outer_from_config",
    "outer_types",
    "register",
    "set_lr",
]
