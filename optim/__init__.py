# SPDX-License-Identifier: Apache-2.0
"""How parameters move: outer optimizers, and what the inner loop needs beside them. See README.md."""

from isthmus.optim.diloco import DiLoCo, default_outer_lr
from isthmus.optim.fragments import Fragment, FragmentKey, FragmentTable, ParameterSpec
from isthmus.optim.inner import build_inner_optimizer, set_lr
from isthmus.optim.outer import (
    ANCHOR,
    GRAD,
    PARAM,
    Absorbed,
    Contribution,
    Emitted,
    Op,
    Outer,
    Result,
    Round,
    State,
    Work,
)
from isthmus.optim.registry import build_outer, outer_from_config, outer_types, register
from isthmus.optim.schedule import Schedule, build_schedule

__all__ = [
    "ANCHOR",
    "GRAD",
    "PARAM",
    "Absorbed",
    "Contribution",
    "DiLoCo",
    "Emitted",
    "Fragment",
    "FragmentKey",
    "FragmentTable",
    "Op",
    "Outer",
    "ParameterSpec",
    "Result",
    "Round",
    "Schedule",
    "State",
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
