"""Sandboxes for untrusted programs, independent of rewards and trajectories.

`open_sandbox` opens one. A new back end is a class with the three methods of `Sandbox` and a record, in
`sandbox/backends/` or in an entry point of `creditflow.sandboxes`.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from creditflow.errors import did_you_mean
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
    SandboxOptionError,
    SandboxUnavailable,
    expect_option,
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
    "SandboxOptionError",
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
    test program once per sandbox, 20 ms. Raises SandboxOptionError for an unknown back end, an unknown option or an
    invalid value, and SandboxUnavailable, with installation advice, if the back end does not work here.
    """
    expect_option(isinstance(backend, str), "sandbox back end", "a name", backend)
    name = AUTO if backend == "auto" else backend
    if name not in BACKENDS:
        names = ["auto", *BACKENDS.names()]
        raise SandboxOptionError(
            f"sandbox back end {backend!r}: not one of {', '.join(names)}{did_you_mean(backend, names)}"
        )
    create = BACKENDS[name].create
    parameters = dict(inspect.signature(create).parameters)
    parameters.pop("limits", None)
    limit_names = {field.name for field in fields(Limits)}
    for option in options:
        if option not in limit_names | set(parameters):
            near = did_you_mean(option, sorted(limit_names | set(parameters)))
            raise SandboxOptionError(f"sandbox back end {name}: unknown option {option!r}{near}")
    limits = Limits(**{key: value for key, value in options.items() if key in limit_names})
    missing = sorted(key for key, value in parameters.items() if value.default is value.empty and key not in options)
    if missing:
        raise SandboxOptionError(f"sandbox back end {name}: option {missing[0]!r} is required")
    return create(limits=limits, **{key: value for key, value in options.items() if key in parameters})
