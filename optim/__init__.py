# SPDX-License-Identifier: Apache-2.0
"""How parameters move: outer optimizers, and what the inner loop needs beside them. See README.md."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


if not TYPE_CHECKING:  # else every misspelt name of this package would pass for Any
    # Which outer step comes next is for programs that never touch a tensor; torch is loaded for those that do.
    _LATE = {
        **dict.fromkeys(("DiLoCo", "default_outer_lr"), "isthmus.optim.diloco"),
        **dict.fromkeys(("Fragment", "FragmentKey", "FragmentTable", "ParameterSpec"), "isthmus.optim.fragments"),
        **dict.fromkeys(("build_inner_optimizer", "set_lr"), "isthmus.optim.inner"),
        **dict.fromkeys(
            (
                "ANCHOR",
                "GRAD",
                "PARAM",
                "Contribution",
                "Emitted",
                "Op",
                "Outcome",
                "Outer",
                "Result",
                "Round",
                "Settled",
                "Tensors",
                "Work",
            ),
            "isthmus.optim.outer",
        ),
        **dict.fromkeys(("build_outer", "outer_from_config", "outer_types", "register"), "isthmus.optim.registry"),
        **dict.fromkeys(("RunFacts",), "isthmus.optim.run_facts"),
        **dict.fromkeys(("Schedule", "build_schedule"), "isthmus.optim.schedule"),
    }

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_LATE[name]), name)
