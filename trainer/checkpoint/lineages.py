# SPDX-License-Identifier: Apache-2.0
"""What a peer's folder holds of a history that its run does not go on with is put aside, in `lineage-1` and so on."""

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)


def set_aside(folder: Path, entries: Sequence[Path]) -> None:
    """Move entries of a peer's folder into a new `lineage-…` folder in it, to the same places. None: nothing is made.

    Raises:
        OSError: the disk refuses.
    """
    if not entries:
        return
    aside = next(place for number in itertools.count(1) if not (place := folder / f"lineage-{number}").exists())
    for old in entries:
        new = aside / old.relative_to(folder)
        new.parent.mkdir(parents=True, exist_ok=True)
        old.rename(new)
    log.info("put_aside place=%s moved=%d", aside.name, len(entries))
