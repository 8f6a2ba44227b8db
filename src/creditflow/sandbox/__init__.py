"""Sandboxes for untrusted programs, independent of rewards and trajectories.

`open_sandbox` opens one. A new back end is a class with the two methods of `Sandbox` and a record, in
`sandbox/backends/` or in an entry point of `creditflow.sandboxes`.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import create_model

from creditflow._utils.sections import Section, checked
from creditflow.registry import Registry
from creditflow.sandbox.backends.bubblewrap import Bubblewrap
from creditflow.sandbox.backends.container import Container
from creditflow.sandbox.backends.fusion import SandboxFusion
from creditflow.sandbox.backends.unsafe import UnsafeSandboxWarning, UnsafeSubprocess
from creditflow.sandbox.base import (
    Limit,
    Limits,
    Result,
    Sandbox,
    SandboxBackend,
    SandboxError,
    SandboxUnavailable,
)

__all__ = [
    "BACKENDS",
    "Bubblewrap",
    "Container",
    "Limit",
    "Limits",
    "Result",
    "Sandbox",
    "SandboxBackend",
    "SandboxError",
    "SandboxFusion",
    "SandboxUnavailable",
    "UnsafeSandboxWarning",
    "UnsafeSubprocess",
    "open_sandbox",
]

AUTO = "bubblewrap"
"""The back end for `auto`: never one that uses the network, requires an image, or does not isolate."""


BACKENDS: Registry[SandboxBackend] = Registry(
    "sandbox back end", "creditflow.sandbox.backends", "creditflow.sandboxes", constant="BACKEND", record=SandboxBackend
)


def open_sandbox(backend: str = "auto", **options: Any) -> Sandbox:
    """Open a sandbox by the name of its back end; `auto` is bubblewrap. Never falls back to an unprotected one.

    `options`: fields of `Limits`, and the back end's own options (arguments of its class). Cost: bubblewrap runs a
    test program once per sandbox, 20 ms. Raises ConfigError for an unknown back end, an unknown option or an invalid
    value, and SandboxUnavailable, with installation advice, if the back end does not work here.
    """
    name = AUTO if backend == "auto" else backend
    create = BACKENDS[name].create
    limits = {field.name: field.default for field in fields(Limits)}
    parameters = inspect.signature(create).parameters.values()
    required = {parameter.name: parameter.default for parameter in parameters if parameter.name != "limits"}
    own = {option: ... if default is inspect.Parameter.empty else default for option, default in required.items()}
    hints = {**get_type_hints(create.__init__ if inspect.isclass(create) else create, include_extras=True)}
    hints |= get_type_hints(Limits, include_extras=True)
    form: Any = {option: (hints.get(option, Any), default) for option, default in (limits | own).items()}
    values = dict(checked(create_model("Options", __base__=Section, **form), options, name))
    return create(limits=Limits(**{option: values.pop(option) for option in limits}), **values)
