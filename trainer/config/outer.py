# SPDX-License-Identifier: Apache-2.0
"""How the peers' work becomes one model: `[outer]`, whose keys are those of the method that its `type` names.

Rules: a section is made of what `trainer.config.methods` reads of a method, when it is first asked for; nothing of a
method is said here. All of it is part of the run manifest. Must not know torch.
"""

import functools
import json
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator, create_model
from pydantic_core import PydanticKnownError

from isthmus.trainer.config.methods import methods
from isthmus.trainer.config.values import Section

OUTER: Final = "outer"
"""Name of the section."""
DEFAULT_METHOD: Final = "diloco"


class OuterSection(Section):
    """What `[outer]` has with every method; the section of one is `outer_section` of its name."""

    type: str
    """The method, one of `methods`."""
    codec: Literal["raw", "bf16", "int8", "e3m0", "twobit"] = "int8"
    """What crosses the network, where the method does not say it: fp32, or 16, 8, 4 or 2 bits a value."""
    guard: Literal["none", "norm", "trimmed", "centred"] = "none"
    """How members' payloads are judged by all who receive them, so that one that lies moves the model no further than
    the others do: scaled to the median length, trimmed element by element, or clipped around the last mean. Wants three
    members or more. Every payload goes to everybody then, which is more bytes from four members on."""
    error_feedback: bool = False
    """Whether what the codec loses of a payload is added to the next one. Not for methods that have such a memory."""

    def settings(self) -> dict[str, object]:
        """What the method itself is told, as `optim.registry.build_outer` takes it."""
        return self.model_dump(exclude=set(OuterSection.model_fields))


class _MethodSection(OuterSection):
    model_config = ConfigDict(use_attribute_docstrings=False)  # there is no source to look into


@functools.cache
def outer_section(method: str) -> type[OuterSection]:
    """The section of a method.

    Raises:
        KeyError: there is no such method.
    """
    told = methods()[method]
    fields: dict[str, Any] = {"type": (Literal[method], Field(method))}
    for setting in told.settings:
        fields[setting.name] = (setting.type, Field(setting.default, description=setting.meaning))
    return create_model(f"Outer_{method}", __base__=_MethodSection, __doc__=told.meaning, **fields)


def _of_its_method(value: object, otherwise: ValidatorFunctionWrapHandler) -> OuterSection:
    if isinstance(value, OuterSection):
        return value
    if not isinstance(value, dict):
        section: OuterSection = otherwise(value)  # which says what is wrong
        return section
    method = value.get("type", DEFAULT_METHOD)
    if not isinstance(method, str) or method not in methods():
        expected = ", ".join(f"'{name}'" for name in methods())
        told = {"discriminator": "'type'", "tag": str(method), "expected_tags": expected}
        raise PydanticKnownError("union_tag_invalid", told)
    return outer_section(method).model_validate_json(json.dumps(value))


Outer = SerializeAsAny[Annotated[OuterSection, WrapValidator(_of_its_method)]]
"""The section of whatever method `type` names."""
