# SPDX-License-Identifier: Apache-2.0
"""The method that a configuration names, fitted to its model and its run, and the pace that its plan gives to the run.

An *outer step* is an inner step with a plan that is not empty. Nothing is assumed of when these come: what is said of a
run's length is counted in the plan.

Errors: `ConfigError` (2) where the method cannot be built, or does not fit the model, the run or its schedule.
"""

import functools
import re
from array import array
from dataclasses import dataclass
from typing import Final

from isthmus.optim.error_feedback import ErrorFeedback
from isthmus.optim.fragments import Fragment, FragmentTable
from isthmus.optim.outer import Outer
from isthmus.optim.registry import outer_from_config
from isthmus.optim.robust import Robust
from isthmus.optim.run_facts import RunFacts
from isthmus.trainer.config.outer import OuterSection
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.training import (
    ConstantSchedule,
    CosineSchedule,
    LoopInner,
    LoopModelSection,
    ModelSection,
    Schedule,
    WsdSchedule,
)
from isthmus.trainer.errors import ConfigError

_MOST_COUNTED: Final = 1 << 22
"""Inner steps of a plan that are counted, which takes a second; a longer run is taken to go on as it began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedMethod:
    """A method with all settings known.

    Attributes:
        facts: what it was told of the run.
        fragments: what it exchanges, of all kinds.
    """

    outer: Outer
    facts: RunFacts
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How a run goes, in inner steps of a peer that takes part from the start to the end.

    Attributes:
        total_inner_steps: when the last outer step is made.
        longest_stretch: from one outer step to the next, or to the first.
        longest_delay: from an outer step to where its outcome reaches the workers.
        warmup_steps: of the learning rate.
        decay_steps: likewise, at the end; 0 where the schedule has none.
    """

    total_inner_steps: int
    longest_stretch: int
    longest_delay: int
    warmup_steps: int
    decay_steps: int


def method_of(config: Config) -> FittedMethod:
    """The method of `[outer]`, fitted.

    Raises:
        ConfigError: the model cannot be built, a setting is out of its range, or the method does not fit model or run.
    """
    schedule = config.inner.schedule
    facts = RunFacts(
        num_peers=config.members.start_peers,
        outer_steps=config.run.outer_steps,
        peak_lr=config.inner.lr,
        inner_type=None if isinstance(config.inner, LoopInner) else config.inner.type,
        schedule=schedule.type,
        warmup_steps=schedule.warmup_steps,
        min_ratio=1.0 if isinstance(schedule, ConstantSchedule) else schedule.min_ratio,
        decay_steps=schedule.decay_steps if isinstance(schedule, WsdSchedule) else None,
    )
    return _fitted(config.outer.model_copy(update={"codec": "raw"}), config.model, facts)


def pace_of(config: Config) -> Pace:
    """The pace of the run.

    Raises:
        ConfigError: as `method_of`, or the schedule of the learning rate does not fit the length of the run.
    """
    method = method_of(config)
    pace = _counted(method.outer, method.facts)
    _require_room(config.inner.schedule, pace, config)
    return pace


def fragment_table(model: ModelSection) -> FragmentTable:
    """Where each parameter lies in the flat vector.

    Raises:
        ConfigError: the model cannot be built.
    """
    try:
        shapes = model if isinstance(model, LoopModelSection) else model.description()
        return FragmentTable.from_named_shapes(shapes.named_shapes())
    except ValueError as error:
        raise ConfigError(f"[model] {error}", key="model") from error


def tokens_per_sample(model: ModelSection) -> int:
    """How many tokens a sample counts for, in weights and figures; of a model of ours, how long it is.

    Raises:
        ConfigError: the model cannot be built.
    """
    return model.seq_len if isinstance(model, LoopModelSection) else model.description().max_seq_len


@functools.lru_cache(maxsize=8)
def _fitted(section: OuterSection, model: ModelSection, facts: RunFacts) -> FittedMethod:
    try:
        method = outer_from_config({"type": section.type} | section.settings())
    except ValueError as error:
        raise _fault(section, str(error)) from error
    table = fragment_table(model)
    try:
        outer = method.fitted(table, facts)
        fragments = outer.fragments(table)
        table.check_partition(fragments)
    except ValueError as error:
        raise _fault(section, f"{section.type} does not fit the model or the run: {error}") from error
    try:
        outer = _wrapped(outer, section).fitted(table, facts)
    except ValueError as error:
        raise _fault(section, f'type = "{section.type}": {error}') from error
    return FittedMethod(outer=outer, facts=facts, fragments=fragments)


def _wrapped(outer: Outer, section: OuterSection) -> Outer:
    """The method with what `[outer]` puts around it. The guard is outside: it judges what was sent."""
    if section.error_feedback:
        outer = ErrorFeedback(outer=outer)
    return outer if section.guard == "none" else Robust(outer=outer, guard=section.guard)


@functools.lru_cache(maxsize=8)
def _counted(outer: Outer, facts: RunFacts) -> Pace:
    made = array("q")
    longest_stretch = longest_delay = 0
    for inner_step in range(_MOST_COUNTED):
        if rounds := outer.plan(inner_step):
            longest_stretch = max(longest_stretch, inner_step - (made[-1] if made else 0))
            longest_delay = max(longest_delay, *(round_.delay for round_ in rounds))
            made.append(inner_step)
            if len(made) == facts.outer_steps:
                break
    if not made:
        raise ConfigError(f"[outer] nothing is exchanged in the first {_MOST_COUNTED} inner steps", key="outer")
    repeated, rest = divmod(facts.outer_steps, len(made))
    total = max(1, repeated * made[-1] + (made[rest - 1] if rest else 0))
    return Pace(
        total_inner_steps=total,
        longest_stretch=max(1, longest_stretch),
        longest_delay=longest_delay,
        warmup_steps=facts.warmup(total),
        decay_steps=facts.decay(total) or 0,
    )


def _require_room(schedule: Schedule, pace: Pace, config: Config) -> None:
    least_rest = 1 if isinstance(schedule, CosineSchedule) else 0
    needed = pace.warmup_steps + pace.decay_steps + least_rest
    if not isinstance(schedule, ConstantSchedule) and needed > pace.total_inner_steps:
        raise ConfigError(
            f"inner.schedule needs at least {needed} inner steps for its warm-up and decay, but the run has "
            f"{pace.total_inner_steps} until outer step {config.run.outer_steps}, its last",
            key="inner.schedule",
        )


def _fault(section: OuterSection, problem: str) -> ConfigError:
    """As an operator's error, with the first setting that the method's sentence names."""
    settings = {*section.settings(), "guard", "error_feedback"}
    named = [word for word in re.findall(r"\w+", problem) if word in settings]
    return ConfigError(f"[outer] {problem}", key=f"outer.{named[0]}" if named else "outer")
