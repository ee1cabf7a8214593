# SPDX-License-Identifier: Apache-2.0
"""The outer optimizers that a run can name, and what each can be told, read from their source.

A method is one file of `isthmus.optim`: a frozen dataclass under `@register("name")`. Its fields are its keys in
`[outer]`, with their types, their defaults and the text under them. The files are parsed and not imported, for they
need torch, and the command line starts quickly.

Rules:
    * Fields of base classes count, as they do in a dataclass.
    * No keys are fields with `init=False`, and those with `metadata={"fitted": True}`, which `Outer.fitted` works out.
    * A type is made of int, float, bool, str, None, `Literal` and `tuple`; a default is a literal. Both may be names
      that a file of the package defines.
    * Ranges are not seen here: a method checks its settings itself when it is built (`trainer.config.outer_method`).

Errors: `ConfigError` (2) for a file that does not keep to this.
"""

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType, MappingProxyType
from typing import Annotated, Final, Literal

from pydantic import Field

from isthmus.trainer.config.quantities import Count
from isthmus.trainer.config.values import Maybe
from isthmus.trainer.errors import ConfigError

_PACKAGE: Final = "isthmus.optim"
_REGISTER: Final = "register"
_OWN_KEYS: Final = frozenset({"type", "codec", "guard", "error_feedback"})
"""Keys that `[outer]` has with every method."""
_LARGEST: Final = 2**53
"""Magnitude of a whole number."""
_TYPES: Final[Mapping[str, object]] = {
    "int": Annotated[Count, Field(ge=-_LARGEST, le=_LARGEST)],
    "float": float,
    "bool": bool,
    "str": str,
}

_FUNCTION: Final = re.compile(r"^( {4}|)(?:@.*\n\1)*(?:async )?def .*\n(?:\1(?: +|\)).*\n| *\n)*", re.MULTILINE)
"""A function or method with its decorators. To parse them all would take five times as long, and they hold no field."""

_Definition = ast.ClassDef | ast.expr


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a method's dataclass.

    Attributes:
        type: what pydantic makes of a value.
        default: an Ellipsis where it must be given.
        meaning: the text under it.
    """

    name: str
    type: object
    default: object
    meaning: str


@dataclass(frozen=True, slots=True)
class Method:
    """An outer optimizer.

    Attributes:
        meaning: the first line of its file.
        settings: in the order of the dataclass.
    """

    meaning: str
    settings: tuple[Setting, ...]


@functools.cache
def methods() -> Mapping[str, Method]:
    """All outer optimizers by the name they are registered under, sorted.

    Raises:
        ConfigError: a file of the package cannot be read so.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return methods_in(Path(spec.submodule_search_locations[0]))


def methods_in(folder: Path) -> Mapping[str, Method]:
    """The same of a folder that holds the files of `isthmus.optim`."""
    package = _Package(folder)
    found = {name: package.method(source, cls) for source, cls, name in package.registered()}
    return MappingProxyType(dict(sorted(found.items())))


# ---------------------------------------------------------------------------------------------------------- sources


@dataclass(frozen=True, slots=True)
class _Source:
    """One file: what it defines at its top, and which of its names are other files' of the package."""

    path: Path
    meaning: str
    defined: Mapping[str, _Definition]
    imported: Mapping[str, tuple[str, str]]
    """Its name here → (module, its name there)."""

    def fault(self, node: ast.AST, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}, line {getattr(node, 'lineno', 1)}: {problem}")


@dataclass(slots=True)
class _Package:
    folder: Path
    _sources: dict[str, _Source] = field(default_factory=dict)

    def registered(self) -> Iterator[tuple[_Source, ast.ClassDef, str]]:
        """Every class under `@register("name")`, with that name."""
        for path in sorted(self.folder.glob("*.py")):
            if f"\n@{_REGISTER}(" not in path.read_text(encoding="utf-8"):
                continue  # most of the package: parsing takes time
            source = self.source(path.stem)
            for node in source.defined.values():
                if isinstance(node, ast.ClassDef) and (name := _registered_name(node)) is not None:
                    yield source, node, name

    def method(self, source: _Source, cls: ast.ClassDef) -> Method:
        settings = (self._setting(origin, node, text) for origin, node, text in self._fields(source, cls).values())
        return Method(source.meaning, tuple(one for one in settings if one is not None))

    def source(self, module: str) -> _Source:
        if module not in self._sources:
            self._sources[module] = _parse(self.folder / f"{module}.py")
        return self._sources[module]

    def _fields(self, source: _Source, cls: ast.ClassDef) -> dict[str, tuple[_Source, ast.AnnAssign, str]]:
        """Name → (where it stands, field, text under it): a field keeps the place where it is named first."""
        fields: dict[str, tuple[_Source, ast.AnnAssign, str]] = {}
        for base in reversed(cls.bases):
            found = self._find(source, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                fields |= self._fields(found[0], found[1])
        if any(_name_of(one) == "dataclass" for one in cls.decorator_list):
            for node, following in zip(cls.body, [*cls.body[1:], None], strict=True):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    fields[node.target.id] = (source, node, _text(following))
        return fields

    def _find(self, source: _Source, name: str) -> tuple[_Source, _Definition] | None:
        """Where a name of the package is defined; None if it is none of its names."""
        if name in source.defined:
            return source, source.defined[name]
        if name in source.imported:
            module, original = source.imported[name]
            return self._find(self.source(module), original)
        return None

    # ------------------------------------------------------------------------------------------------------ fields

    def _setting(self, source: _Source, node: ast.AnnAssign, meaning: str) -> Setting | None:
        """None if it is no key."""
        assert isinstance(node.target, ast.Name)
        name, default = node.target.id, node.value
        if _name_of(node.annotation) in ("ClassVar", "KW_ONLY"):
            return None
        if isinstance(default, ast.Call) and _name_of(default) == "field":
            told = {keyword.arg: keyword.value for keyword in default.keywords}
            metadata = self._literal(source, told["metadata"]) if "metadata" in told else {}
            if "init" in told and self._literal(source, told["init"]) is False:
                return None
            if isinstance(metadata, dict) and metadata.get("fitted"):
                return None
            default = told.get("default", told.get("default_factory"))
        if name in _OWN_KEYS:
            raise source.fault(node, f"a setting cannot be called {name}: [outer] has that key with every method")
        if not meaning:
            raise source.fault(node, f"nothing says what the setting {name} means; write a text under it")
        value = ... if default is None else self._literal(source, default)
        return Setting(name, self._type(source, node.annotation), value, meaning)

    def _literal(self, source: _Source, node: ast.expr) -> object:
        found = self._find(source, node.id) if isinstance(node, ast.Name) else None
        if found is not None and isinstance(found[1], ast.expr):
            return self._literal(found[0], found[1])
        try:
            return ast.literal_eval(node)
        except ValueError as error:
            raise source.fault(
                node, f"{ast.unparse(node)} is not a literal, which a setting's default must be"
            ) from error

    def _type(self, source: _Source, node: ast.expr) -> object:
        """What pydantic makes of a value that is annotated so."""
        match node:
            case ast.Name(id=name) if name in _TYPES:
                return _TYPES[name]
            case ast.Name(id=name):
                found = self._find(source, name)
                if found is not None and isinstance(found[1], ast.expr):
                    return self._type(found[0], found[1])
            case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
                return Maybe[self._type(source, left)]  # type: ignore[misc]
            case ast.Subscript(slice=choices) if _name_of(node) == "Literal":
                return Literal[self._literal(source, choices)]
            case ast.Subscript(slice=ast.Tuple(elts=[one, ast.Constant(value=EllipsisType())])):
                if _name_of(node) == "tuple":
                    return tuple[self._type(source, one), ...]  # type: ignore[misc]
            case _:
                pass
        raise source.fault(node, f"a setting cannot be of type {ast.unparse(node)}")


def _parse(path: Path) -> _Source:
    text = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(_FUNCTION.sub(lambda found: "\n" * found[0].count("\n"), text))
    except SyntaxError:
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise ConfigError(f"{path}, line {error.lineno}: {error.msg}") from error
    defined: dict[str, _Definition] = {}
    imported: dict[str, tuple[str, str]] = {}
    for node in _statements(tree):
        match node:
            case ast.ClassDef(name=name):
                defined[name] = node
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                defined[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                defined[name] = value
            case ast.ImportFrom(module=str(module), names=names) if module.startswith(f"{_PACKAGE}."):
                file = module.removeprefix(f"{_PACKAGE}.")
                imported |= {one.asname or one.name: (file, one.name) for one in names}
            case _:
                pass
    return _Source(path, (ast.get_docstring(tree) or "").partition("\n")[0], defined, imported)


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """At the top of a file, and under its `if TYPE_CHECKING:`."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.If) else (node,)


def _registered_name(cls: ast.ClassDef) -> str | None:
    for one in cls.decorator_list:
        if isinstance(one, ast.Call) and _name_of(one) == _REGISTER and isinstance(one.args[0], ast.Constant):
            return str(one.args[0].value)
    return None


def _name_of(node: ast.expr) -> str:
    """`x` of `x`, `a.x`, `x(…)` and `x[…]`; empty if it is something else."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner) | ast.Subscript(value=inner):
            return _name_of(inner)
        case _:
            return ""


def _text(node: ast.stmt | None) -> str:
    """A string that stands as a statement, on one line, with TOML's words for Python's values."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return re.sub(r"\b(None|True|False)\b", lambda word: word[0].lower(), " ".join(node.value.value.split()))
    return ""
