"""Check the arguments of reward functions by the annotations of their parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, create_model

from creditflow._utils.sections import OPTIONS, checked, expected
from creditflow.errors import ConfigError

Above0 = Annotated[float, Field(gt=0)]
Limit = Annotated[float, Field(gt=0, le=1000)]
"""The width of a score's range stays finite."""
AtLeast0 = Annotated[float, Field(ge=0)]
WholeAbove0 = Annotated[int, Field(ge=1), expected("a whole number of 1 or more")]
Whole = Annotated[int, Field(ge=0), expected("a whole number of 0 or more")]
OptionalName = Annotated[Annotated[str, Field(min_length=1)] | None, expected("a name")]


def check_arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Check the values of a method's parameters, given by name. Raises ValueError that names the first wrong one."""
    arguments = _arguments(function)
    try:
        checked(arguments, {name: values[name] for name in arguments.model_fields})
    except ConfigError as error:
        raise ValueError(str(error)) from error


@functools.cache
def _arguments(function: Callable[..., Any]) -> type[BaseModel]:
    _, *parameters = inspect.signature(function, eval_str=True).parameters.values()
    fields: dict[str, Any] = {parameter.name: (parameter.annotation, ...) for parameter in parameters}
    return create_model("Arguments", __config__=OPTIONS, **fields)
