#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`isthmus`, but for one thing: `mute.py join ... --dir DIR` keeps its votes to itself while there is a file DIR/mute.

It trains, exchanges, stages the result and sends signs of life like any other member. The coordinator waits for its
vote in vain.
"""

import sys
from pathlib import Path

MUTE = "mute"
"""The file's name."""


def keep_votes_while(file: Path) -> None:
    """From now on no peer of this process votes while the file is there."""
    from isthmus.elastic.core.local_round import LocalRound
    from isthmus.elastic.core.messages import RoundFailed, Vote

    report = LocalRound.report

    def of_failures_only(self: LocalRound) -> Vote | RoundFailed | None:
        said = report(self)
        return None if isinstance(said, Vote) and file.exists() else said

    LocalRound.report = of_failures_only  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from isthmus.trainer.cli.app import main

    keep_votes_while(Path(sys.argv[sys.argv.index("--dir") + 1]) / MUTE)
    main()
