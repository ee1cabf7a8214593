# SPDX-License-Identifier: Apache-2.0
"""isthmus trains one model on machines that are far apart, badly connected and unreliable.

The four packages lie at the top of the repository; this folder links to them and gives them their one name.
`isthmus.OuterLoop` puts an outer optimizer around your own training loop.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.trainer.outer_loop import OuterLoop

__all__ = ["OuterLoop"]


if not TYPE_CHECKING:  # the commands that need no torch do not load it

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
        return getattr(importlib.import_module("isthmus.trainer.outer_loop"), name)
