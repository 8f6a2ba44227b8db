"""Sandboxes for untrusted programs, independent of rewards and trajectories.

`open_sandbox` opens one. A new back end is a class with the three methods of `Sandbox`, added to `BACKENDS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from creditflow.errors import did_you_mean
from creditflow.sandbox.base import (
    Limit,
    Limits,
    Result,
    Sandbox,
    SandboxError,
    SandboxOptionError,
    SandboxUnavailable,
)
from creditflow.sandbox.bubblewrap import Bubblewrap
from creditflow.sandbox.container import Container
from creditflow.sandbox.fusion import SandboxFusion
from creditflow.sandbox.unsafe import UnsafeSandboxWarning, UnsafeSubprocess

__all__ = [
    "BACKENDS",
    "Bubblewrap",
    "Container",
    "Limit",
    "Limits",
    "Result",
    "Sandbox",
    "SandboxError",
    "SandboxFusion",
    "SandboxOptionError",
    "SandboxUnavailable",
    "UnsafeSandboxWarning",
    "UnsafeSubprocess",
    "open_sandbox",
]

BACKENDS: dict[str, Callable[..., Sandbox]] = {
    "bubblewrap": Bubblewrap,
    "sandbox_fusion": SandboxFusion,
    "container": Container,
    "unsafe_subprocess": UnsafeSubprocess,
}
"""Back ends by name. Each takes `limits` and its own options, and raises SandboxUnavailable if it cannot work here."""

AUTO = "bubblewrap"
"""The back end for `auto`: never one that uses the network, requires an image, or does not isolate."""


def open_sandbox(backend: str = "auto", **options: Any) -> Sandbox:
    """Open a sandbox by the name of its back end; `auto` is bubblewrap. Never falls back to an unprotected one.

    `options`: fields of `Limits`, and the back end's own options (arguments of its class). Cost: bubblewrap runs a
    test program once per sandbox, 20 ms. Raises SandboxOptionError for an unknown back end, an unknown option or an
    invalid value, and SandboxUnavailable, with installation advice, if the back end does not work here.
    """
    if not isinstance(backend, str):
        raise SandboxOptionError(f"sandbox back end: a name expected, {backend!r} came")
    name = AUTO if backend == "auto" else backend
    if name not in BACKENDS:
        known = ["auto", *BACKENDS]
        raise SandboxOptionError(
            f"sandbox back end {backend!r}: not one of {', '.join(known)}{did_you_mean(backend, known)}"
        )
    made = BACKENDS[name]
    of_limits = {field.name for field in fields(Limits)}
    own = set(inspect.signature(made).parameters) - {"limits"}
    for option in options:
        if option not in of_limits | own:
            near = did_you_mean(option, sorted(of_limits | own))
            raise SandboxOptionError(f"sandbox back end {name}: unknown option {option!r}{near}")
    limits = Limits(**{key: value for key, value in options.items() if key in of_limits})
    missing = {
        key for key, parameter in inspect.signature(made).parameters.items() if parameter.default is parameter.empty
    }
    if missing - set(options):
        raise SandboxOptionError(f"sandbox back end {name}: option {sorted(missing - set(options))[0]!r} is required")
    return made(limits=limits, **{key: value for key, value in options.items() if key in own})
