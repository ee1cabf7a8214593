# SPDX-License-Identifier: Apache-2.0
"""A plan for a run: its timeline over given links, the same with other H, what would do better, what it needs here.

Errors: `ConfigError` (2) where there is nothing to plan.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from isthmus.optim.layers import layer_groups
from isthmus.optim.published import Penalty
from isthmus.optim.recommend import Candidate, Links, Model, recommend
from isthmus.trainer.config.base_model import with_base_model
from isthmus.trainer.config.memory import needs_of
from isthmus.trainer.config.outer import OuterSection, outer_section
from isthmus.trainer.config.outer_method import fragment_table, tokens_per_sample
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.wiring import with_vocabulary
from isthmus.trainer.data.text import vocabulary_here
from isthmus.trainer.errors import ConfigError, EnvironmentFault
from isthmus.trainer.forecast.report import Better, Need, OuterStep, Plan, WithInnerSteps
from isthmus.trainer.forecast.timeline import Step, Timeline, timeline
from isthmus.trainer.forecast.trial import timed
from isthmus.trainer.run.room import computes_on_gpu, room_here

_OTHER_H: Final = (30, 100, 300, 1000)
_WORTH: Final = 0.02
"""Goodput by which another method must be better to be named."""


async def plan(config: Config, links: Links, *, step_s: float | None, folder: Path) -> Plan:
    """Make it.

    Args:
        config: as a founder has it.
        links: the line of the slowest peer.
        step_s: seconds of an inner step of the slowest peer; None: it is timed here.
        folder: existing, on the disk that the run would be on.

    Raises:
        ConfigError: a run of one peer, or model, text or method cannot be.
        IsthmusError: workers cannot be started here.
    """
    peers = config.members.start_peers
    if peers < 2:
        raise ConfigError("one peer exchanges nothing", cure="say how many there will be: --peers 4")
    if config.is_loops and step_s is None:
        raise ConfigError("the inner steps of a loop of one's own cannot be timed here", cure="give --step 800ms")
    if not config.is_loops:
        if config.data_path is not None and not config.data_path.exists():
            raise ConfigError(f"there is no text at {config.data_path}", cure="name another one", key="data.path")
        config = with_base_model(config)
        config = with_vocabulary(config, *vocabulary_here(config))
    table = fragment_table(config.model)
    source = "given"
    if step_s is None:
        trial = await timed(config, table.numel)
        step_s, source = trial.step_s, f"timed here on {trial.device}"
    line = timeline(config, links, step_s)
    model = Model(num_parameters=table.numel, inner_step_s=step_s, num_layers=len(layer_groups(table)))
    return Plan(
        method=config.outer.type,
        num_parameters=table.numel,
        num_peers=peers,
        upload_bytes_per_s=links.upload,
        download_bytes_per_s=links.download,
        round_trip_s=links.round_trip_s,
        step_s=step_s,
        step_source=source,
        typical=_told(line.typical),
        largest=_told(line.largest),
        goodput=line.goodput,
        seconds=line.seconds,
        outer_steps=config.run.outer_steps,
        inner_steps=line.inner_steps,
        tokens=line.inner_steps * config.inner.batch_size * tokens_per_sample(config.model) * peers,
        sent_nbytes=round(line.sent_nbytes),
        by_inner_steps=tuple(_with_other_h(config, links, step_s)),
        better=_better(config, links, model, line),
        needs=_needs(config, folder),
    )


def _told(step: Step) -> OuterStep:
    return OuterStep(
        inner_steps=step.inner_steps,
        codec=step.codec,
        sent_nbytes=round(step.sent_nbytes),
        exchange_s=step.exchange_s,
        waiting_s=step.waiting_s,
    )


def _with_other_h(config: Config, links: Links, step_s: float) -> Iterator[WithInnerSteps]:
    """The method with its own H and with others, in about as many inner steps."""
    own = config.outer.settings().get("inner_steps")
    if not isinstance(own, int):
        return
    for inner_steps in sorted({own, *_OTHER_H}):
        outer = config.outer.model_copy(update={"inner_steps": inner_steps})
        other = _of_length(config, outer, max(1, config.run.outer_steps * own // inner_steps))
        try:
            yield WithInnerSteps(inner_steps=inner_steps, goodput=timeline(other, links, step_s).goodput)
        except ConfigError:  # the method does not fit this H
            continue


def _better(config: Config, links: Links, model: Model, line: Timeline) -> Better | None:
    """What `optim.recommend` chooses for these links, if it waits less by the same timeline."""
    pick = recommend(links, model, config.members.start_peers).pick
    settings = _settings_of(pick)
    outer_steps = max(1, line.inner_steps * pick.num_fragments // pick.inner_steps)
    kept = {"guard": config.outer.guard, "error_feedback": config.outer.error_feedback}
    outer = outer_section(pick.method).model_validate(kept | settings)
    try:
        other = _of_length(config, outer, outer_steps)
        goodput = timeline(other, links, model.inner_step_s).goodput
    except ConfigError:
        return None
    if goodput < line.goodput + _WORTH:
        return None
    flags = " ".join(
        f"--outer.{key.replace('_', '-')} {value}" for key, value in {"type": pick.method, **settings}.items()
    )
    return Better(flags=flags, goodput=goodput, loss=_published(pick.penalty))


def _published(penalty: Penalty) -> str:
    peers = "" if penalty.peers is None else f"{penalty.peers} peers"
    source = f"arXiv:{penalty.source}" if penalty.source[:4].isdigit() else penalty.source
    found = ", ".join(filter(None, (penalty.setting, peers, source)))
    if penalty.loss is None:
        return found
    side = "above" if penalty.loss >= 0.0 else "below"
    return f"{abs(penalty.loss):.3f} {side} data parallel's ({found})"


def _settings_of(pick: Candidate) -> dict[str, object]:
    settings: dict[str, object] = {"inner_steps": pick.inner_steps}
    if pick.method == "streaming":
        settings |= {"codec": pick.codec, "delay": pick.delay, "num_fragments": pick.num_fragments}
    return settings


def _of_length(config: Config, outer: OuterSection, outer_steps: int) -> Config:
    run = config.run.model_copy(update={"outer_steps": outer_steps})
    return config.model_copy(update={"outer": outer, "run": run})


def _needs(config: Config, folder: Path) -> tuple[Need, ...]:
    """Of this machine; of a GPU that is asked for and not there, what another machine would need."""
    try:
        on_gpu = is_here = not config.is_loops and computes_on_gpu(config)
    except EnvironmentFault:
        on_gpu, is_here = True, False
    needs, room = needs_of(config, on_gpu=on_gpu), room_here(config, folder, on_gpu=is_here)
    told = [Need(name="memory", nbytes=needs.host, free_nbytes=room.host)]
    if on_gpu:
        told.append(Need(name="each GPU", nbytes=needs.device, free_nbytes=room.device))
    return (*told, Need(name="disk", nbytes=needs.disk, free_nbytes=room.disk))
