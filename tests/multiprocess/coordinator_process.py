# SPDX-License-Identifier: Apache-2.0
"""A coordinator alone in a process: `python -m tests.multiprocess.coordinator_process JOURNAL ADDRESS`.

Prints its address when it listens, then runs until it is killed.
"""

import asyncio
import sys
from pathlib import Path

from tests.unit.elastic.peers import CoordinatorHost


async def main(path: Path, address: str) -> None:
    # A machine that is busy makes nobody silent, nor late to dial again.
    host = CoordinatorHost(
        path, address, outer_steps=10**9, min_peers=2, heartbeat_timeout_s=10.0, recover_grace_s=20.0
    )
    async with asyncio.TaskGroup() as tasks:
        await host.start(tasks)
        print(host.address, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
