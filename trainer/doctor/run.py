# SPDX-License-Identifier: Apache-2.0
"""What a run wants of a peer, against what is here: version, configuration, text, memory.

Must not know the network.
"""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from isthmus.collective.transport.wire import PROTOCOL_VERSION
from isthmus.trainer.config.memory import least_needs_of, needs_of
from isthmus.trainer.config.outer_method import fragment_table
from isthmus.trainer.config.quantities import rounded_nbytes
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.sources import ResolvedConfig
from isthmus.trainer.data.corpus import DataError
from isthmus.trainer.data.prepared import is_prepared
from isthmus.trainer.data.text import read_text
from isthmus.trainer.doctor.machine import memory_nbytes
from isthmus.trainer.doctor.messages import Facts
from isthmus.trainer.doctor.report import Check, fail, format_path, ok, warn
from isthmus.trainer.errors import Refused

_MOST_COMPARED_NBYTES = 256 << 20


def program(facts: Facts) -> Check:
    """Whether both run the same program. Another protocol does not come this far."""
    here = version("isthmus")
    text = f"isthmus {here} here, {facts.version} there, protocol {PROTOCOL_VERSION}"
    if facts.version != here:
        cure = "run the same version of isthmus on all peers"
        return warn("version", text, cure, here=here, there=facts.version)
    return ok("version", text, here=here, there=facts.version)


def adopted(resolved: ResolvedConfig, facts: Facts) -> tuple[Check, Config | None]:
    """The run's configuration with this peer's own part, if they fit."""
    try:
        config = resolved.adopt(facts.manifest).config
    except Refused as refused:
        return fail("run", refused.problem, refused.cure), None
    numel = fragment_table(config.model).numel
    members = "1 member" if facts.num_members == 1 else f"{facts.num_members} members"
    text = f"{numel / 1e6:.3g} M parameters, {config.outer.type}, {members}"
    return ok("run", text, num_parameters=numel, num_members=facts.num_members), config


def text_of(config: Config, facts: Facts) -> Check:
    """Whether the run's text is here. It is compared where that takes a moment."""
    if config.is_loops:
        return ok("text", "the run's peers train by loops of their own, with data of their own", is_here=None)
    path = config.data_path
    name = config.data_url or ("the standard library of Python" if path is None else format_path(path))
    if (
        path is not None
        and config.data_url is None
        and not is_prepared(path)
        and _nbytes_in(path) > _MOST_COMPARED_NBYTES
    ):
        return ok("text", f"{name} is here, too long to be compared at once", is_here=None)
    is_named = config.node.data is not None  # then it must be the right one; else a joiner gets what it lacks
    cure = "name a copy of it with --data, or leave that out: then it comes from the run's peers"
    from_peers = ok("text", "not on this machine: a joiner gets it from the run's peers", is_here=False)
    try:
        corpus = read_text(config)
    except DataError as error:
        return (
            fail("text", f"the run's text is not here: {error.problem}", cure, is_here=False)
            if is_named
            else from_peers
        )
    if corpus.digest != facts.data_digest:
        told = f"{name} here is not the run's text ({corpus.description})"
        return fail("text", told, cure, is_here=False) if is_named else from_peers
    return ok("text", f"{name} here is the run's text", is_here=True)


def memory(config: Config, *, on_gpu: bool, gpu_free_nbytes: int | None = None) -> Check:
    """What a peer of this run takes, against what is there.

    Args:
        config: the run's, with this peer's own part.
        on_gpu: whether the workers compute on GPUs.
        gpu_free_nbytes: on the fullest of these.
    """
    needs = needs_of(config, on_gpu=on_gpu)
    needed_nbytes, gpu_nbytes = needs.host, needs.device
    least = least_needs_of(config, on_gpu=on_gpu)
    total_nbytes, available_nbytes = memory_nbytes()
    text = f"takes about {rounded_nbytes(needed_nbytes)}, {rounded_nbytes(available_nbytes)} free here"
    facts = {"needed_bytes": needed_nbytes, "available_bytes": available_nbytes, "needed_gpu_bytes": gpu_nbytes}
    if gpu_free_nbytes is not None and least.device > gpu_free_nbytes:
        free = rounded_nbytes(gpu_free_nbytes)
        text = f"takes about {rounded_nbytes(least.device)} of each GPU, {free} free"
        return fail("run_memory", text, "use more GPUs (--local-workers), or a smaller model", **facts)
    if least.host > total_nbytes:
        return fail("run_memory", text, "use a machine with more memory", **facts)
    if needed_nbytes > available_nbytes:
        return warn("run_memory", text, "end what else takes memory here", **facts)
    return ok("run_memory", text, **facts)


def _nbytes_in(path: Path) -> int:
    return sum(nbytes for nbytes in _sizes(path))


def _sizes(path: Path) -> Iterator[int]:
    try:
        if path.is_file():
            yield path.stat().st_size
        else:
            for found in path.rglob("*"):
                if found.is_file():
                    yield found.stat().st_size
    except OSError:
        return  # whoever reads it says why
