# SPDX-License-Identifier: Apache-2.0
"""How an order comes from another terminal: one line of JSON each way, over a socket in the lab's folder."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from scripts.runlab.lab import OrderError

NAME = "orders"
ANSWER_S = 20.0
_LINE_NBYTES = 1 << 16


@contextlib.asynccontextmanager
async def served(folder: Path, obey: Callable[[str, int | None, float | None], str]) -> AsyncIterator[None]:
    """Orders are taken within."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            order = json.loads(await asyncio.wait_for(reader.readline(), ANSWER_S))
            said, is_done = obey(order["what"], order["number"], order["seconds"]), True
        except OrderError as error:
            said, is_done = str(error), False
        except (ValueError, KeyError, TimeoutError) as error:
            said, is_done = f"not an order: {error!r}", False
        writer.write(json.dumps({"said": said, "is_done": is_done}).encode() + b"\n")
        writer.close()
        await writer.wait_closed()

    path = folder / NAME
    server = await asyncio.start_unix_server(answer, path=path, limit=_LINE_NBYTES)
    try:
        async with server:
            yield
    finally:
        path.unlink(missing_ok=True)


def is_served(path: Path) -> bool:
    """Whether somebody takes orders at this socket; also if not from us."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(path))
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def send(folder: Path, what: str, number: int | None, seconds: float | None) -> str:
    """Give an order; returns what has been done.

    Raises:
        OrderError: it was not; or nobody takes orders there.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_S)
            connection.connect(str(folder / NAME))
            connection.sendall(json.dumps({"what": what, "number": number, "seconds": seconds}).encode() + b"\n")
            with connection.makefile() as lines:
                answer = json.loads(lines.readline(_LINE_NBYTES))
    except PermissionError as error:
        raise OrderError(f"the lab in {folder} is another user's; sudo gives it orders") from error
    except (OSError, ValueError) as error:
        raise OrderError(f"no lab runs in {folder} ({error}); `scripts/lab up` begins one") from error
    if not answer["is_done"]:
        raise OrderError(answer["said"])
    return str(answer["said"])
