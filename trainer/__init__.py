# SPDX-License-Identifier: Apache-2.0
"""The product: peers that train one model together. See trainer/README.md."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.outer_loop import OuterLoop

__all__ = ["OuterLoop"]


if not TYPE_CHECKING:  # the commands that need no torch do not load it
    _LATE = {"OuterLoop": "trainer.outer_loop"}

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(name)
        return getattr(importlib.import_module(_LATE[name]), name)
