# SPDX-License-Identifier: Apache-2.0
"""isthmus trains one model on machines that are far apart, badly connected and unreliable.

The four packages lie at the top of the repository; this folder links to them and gives them their one name.
`isthmus.attach` makes your own training loop a member of a run.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.trainer.attach.daemon import RunEnded
    from isthmus.trainer.attach.session import Session, attach

__all__ = ["RunEnded", "Session", "attach"]

_MODULES = {"RunEnded": "isthmus.trainer.attach.daemon"}


if not TYPE_CHECKING:  # the commands that need no torch do not load it

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES.get(name, "isthmus.trainer.attach.session")), name)
