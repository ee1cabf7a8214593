# SPDX-License-Identifier: Apache-2.0
"""`isthmus ckpt`: the checkpoints of a peer's folder."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.trainer.cli.config import AsJson, Dir
from isthmus.trainer.cli.support import choose_folder
from isthmus.trainer.errors import ConfigError, EnvironmentFault, ExitCode, IntegrityError

if TYPE_CHECKING:
    from isthmus.trainer.checkpoint.inventory import Saved

SCHEMA = "isthmus.checkpoints/1"


def list_(directory: Dir = None, as_json: AsJson = False) -> int:
    """List the checkpoints in a peer's folder, by their manifests."""
    _tell(_look(_folder(directory), prove=False), as_json=as_json)
    return int(ExitCode.DONE)


def verify(directory: Dir = None, as_json: AsJson = False) -> int:
    """Read every byte of the checkpoints in a peer's folder. Exit code 9 if one is not what was committed."""
    found = _look(_folder(directory), prove=True)
    _tell(found, as_json=as_json)
    faults = [saved.fault for saved in found if saved.fault is not None]
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        raise IntegrityError(f"{faults[0]}{more}", cure="delete it, or resume from another checkpoint")
    return int(ExitCode.DONE)


def prune(
    keep: Annotated[int, typer.Option("--keep", help="How many stay, the newest ones.", min=1)],
    directory: Dir = None,
    yes: Annotated[bool, typer.Option("--yes", help="Really remove them; without it they are only named.")] = False,
    as_json: AsJson = False,
) -> int:
    """Remove older checkpoints from a peer's folder, and its own state beside them. No peer may run there."""
    import msgspec

    from isthmus.trainer.checkpoint import inventory
    from isthmus.trainer.contact.identity import PeerFolder

    folder = _folder(directory)
    with PeerFolder(folder):
        steps = inventory.surplus(folder, keep=keep)
        if yes:
            try:
                inventory.prune(folder, steps)
            except OSError as error:
                raise EnvironmentFault(
                    f"a checkpoint in {folder} cannot be removed: {error.strerror}", cure="check its permissions"
                ) from error
    if as_json:
        print(msgspec.json.encode({"schema": SCHEMA, "outer_steps": steps, "removed": yes}).decode())
        return int(ExitCode.DONE)
    names = ", ".join(map(str, steps))
    if not steps:
        print("nothing to remove")
    elif yes:
        print(f"removed the checkpoints of outer steps {names}")
    else:
        print(f"would remove the checkpoints of outer steps {names}; add --yes")
    return int(ExitCode.DONE)


def _folder(given: Path | None) -> Path:
    from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME

    folder = choose_folder(given, holding=FOLDER_NAME, or_else=ConfigError)
    if not (folder / FOLDER_NAME).is_dir():
        raise ConfigError(f"{folder} holds no checkpoints", cure="name the folder of a peer with --dir")
    return folder


def _look(folder: Path, *, prove: bool) -> "list[Saved]":
    from isthmus.trainer.audit.audit import find_verifier
    from isthmus.trainer.checkpoint.inventory import list_saved

    return list_saved(folder, functools.cache(lambda run_id: find_verifier([folder], run_id)), prove=prove)


def _tell(found: "list[Saved]", *, as_json: bool) -> None:
    import msgspec

    from isthmus.trainer.config.quantities import rounded_nbytes

    if as_json:
        print(msgspec.json.encode({"schema": SCHEMA, "checkpoints": found}).decode())
        return
    print(f"{'outer step':>10}  {'written (UTC)':<19}  {'size':>8}  {'digest':<12}  {'certified':<9}  own state")
    for saved in found:
        certified = {True: "yes", False: "no", None: "unknown"}[saved.certified]
        size, when = rounded_nbytes(saved.size_bytes), saved.saved_at[:19].replace("T", " ")
        own = "yes" if saved.has_own_state else "no"
        ending = own if saved.fault is None else f"{own}  damaged"
        print(f"{saved.outer_step:>10}  {when}  {size:>8}  {saved.digest[:12]:<12}  {certified:<9}  {ending}")
