#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`isthmus`, but for one thing: `walled.py join ...` reaches its coordinator and no other peer, as behind a firewall.

With an address that leads nowhere (`--advertise`) the others cannot dial it either.
"""

import sys
from pathlib import Path
from typing import NoReturn


def wall_off() -> None:
    """From now on no exchange of this process gets a connection that it dials."""
    from isthmus.collective.errors import PeerUnreachable
    from isthmus.collective.transport import redial

    async def refused(address: str, *_: object, **__: object) -> NoReturn:
        raise PeerUnreachable(address, "refused", is_refused=True)

    for dial in ("open_connection", "knock"):
        setattr(redial, dial, refused)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from isthmus.trainer.cli.app import main

    wall_off()
    main()
