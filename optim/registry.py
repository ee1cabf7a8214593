# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers by name, as a run's configuration spells them.

A method registers itself: it is one module of this package with `@register("name")` above its frozen dataclass. The
modules are found by looking into the package, so that adding a method changes no other file.

Every error is the operator's: a ValueError whose text says what is known and what was probably meant.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
import types
import typing
from typing import TYPE_CHECKING, TypeVar

from isthmus import optim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from isthmus.optim.outer import Outer

_OuterT = TypeVar("_OuterT", bound="Outer")

_registered: dict[str, type[Outer]] = {}


def register(name: str) -> Callable[[type[_OuterT]], type[_OuterT]]:
    """Class decorator that makes an outer optimizer known under `name`.

    Args:
        name: `type` in a configuration.

    Raises:
        ValueError: if another class has that name already.
    """

    def add(cls: type[_OuterT]) -> type[_OuterT]:
        if _registered.setdefault(name, cls) is not cls:
            raise ValueError(f"outer optimizer {name!r} is registered by {_registered[name].__qualname__} already")
        return cls

    return add


def outer_types() -> tuple[str, ...]:
    """All known names, sorted."""
    _import_methods()
    return tuple(sorted(_registered))


def build_outer(type: str, **settings: object) -> Outer:
    """Build an outer optimizer from its name and settings, as a configuration section gives them.

    Args:
        type: one of `outer_types()`.
        **settings: fields of the method's dataclass; those left out keep its defaults.

    Raises:
        ValueError: on an unknown type or setting, a missing setting, a value of the wrong type or out of its range.
    """
    known = outer_types()
    if type not in known:
        raise ValueError(f"unknown outer optimizer {type!r}{_suggest(type, known)}; known: {', '.join(known)}")
    cls = _registered[type]
    fields = inspect.signature(cls).parameters
    for name in settings:
        if name not in fields:
            raise ValueError(
                f"outer optimizer {type!r} has no setting {name!r}{_suggest(name, fields)}; it has: {', '.join(fields)}"
            )
    missing = [n for n, field in fields.items() if field.default is inspect.Parameter.empty and n not in settings]
    if missing:
        raise ValueError(f"outer optimizer {type!r} needs {', '.join(missing)}")
    hints = typing.get_type_hints(cls.__init__)
    for name, value in settings.items():
        _check_type(type, name, value, hints.get(name))
    return cls(**settings)


def outer_from_config(section: Mapping[str, object]) -> Outer:
    """The outer optimizer that a configuration's `[outer]` names, as `type = "streaming"` does.

    Args:
        section: "type" and the method's settings; None and what is left out mean its defaults.

    Raises:
        ValueError: as build_outer, or there is no "type".
    """
    settings = {name: value for name, value in section.items() if value is not None}
    type_ = settings.pop("type", None)
    if not isinstance(type_, str):
        raise ValueError(f"an outer optimizer needs a type: one of {', '.join(outer_types())}")
    return build_outer(type_, **settings)


@functools.cache
def _import_methods() -> None:
    for module in sorted(pkgutil.iter_modules(optim.__path__), key=lambda module: module.name):
        importlib.import_module(f"{optim.__name__}.{module.name}")


def _check_type(type_: str, name: str, value: object, hint: object) -> None:
    """Check the plain types; a bool is not a number, and a whole number is a float as well."""
    accepted: dict[object, tuple[type, ...]] = {float: (int, float), int: (int,), bool: (bool,), str: (str,)}
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(value) in options:
        return
    plain = [option for option in options if option in accepted]
    if len(plain) != 1:
        return
    if not isinstance(value, accepted[plain[0]]) or (isinstance(value, bool) and plain[0] is not bool):
        wanted = getattr(plain[0], "__name__", str(hint))
        raise ValueError(f"setting {name!r} of outer optimizer {type_!r} must be {wanted}, got {value!r}")


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
