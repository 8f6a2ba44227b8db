"""Sandboxes for untrusted programs, independent of rewards and trajectories.

`open_sandbox` opens one. A new back end is a class with the two methods of `Sandbox` and a record, in
`sandbox/backends/` or in an entry point of `creditflow.sandboxes`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import create_model

from creditflow._utils.sections import checked, options_model
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
    values = dict(checked(_options_model(create), options, name))
    return create(limits=Limits(**{field.name: values.pop(field.name) for field in fields(Limits)}), **values)


@functools.cache
def _options_model(create: Callable[..., Sandbox]) -> Any:
    """The model of the options of a back end: its parameters, without `*args` and `**kwargs`, and the limits."""
    hints = get_type_hints(create.__init__ if inspect.isclass(create) else create, include_extras=True)
    form: Any = {
        p.name: (hints.get(p.name, Any), ... if p.default is p.empty else p.default)
        for p in inspect.signature(create).parameters.values()
        if p.name != "limits" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    return create_model("Options", __base__=options_model(Limits), **form)
