"""What plug-ins add to a recipe: sections of options, and workflows by address.

An entry point of group `creditflow.config` names a subclass of `creditflow.plugins.PluginSection`. Its name is the
section's key: `NAME`, or `policies.NAME` for a key of every policy, which names a subclass of `PolicySource`. These are
loaded with `creditflow.config`, so their modules must not import it. An entry point of group `creditflow.workflows`
names a `WorkflowSource`; its name is the scheme of addresses.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field, create_model

from creditflow._utils.sections import PluginSection, PolicySource, Section
from creditflow.registry import Registry

if TYPE_CHECKING:
    from creditflow.rollout import Workflow

SECTIONS: Registry[type] = Registry("configuration section", group="creditflow.config", kind=type)
_KINDS: dict[str, type[Section]] = {"": PluginSection, "policies": PolicySource}
"""The class of sections under each key that may have some."""
S = TypeVar("S", bound=Section)


def extensible(parent: str) -> Callable[[type[S]], type[S]]:
    """Add the sections of plug-ins under `parent` to a section's class; empty for the recipe itself.

    An entry point is left out, with a warning, if it cannot be loaded, names another class, stands under another key,
    or takes the name of a key.
    """

    def extend(section: type[S]) -> type[S]:
        fields: dict[str, Any] = {}
        for name, kind in SECTIONS.items():
            above, _, key = name.rpartition(".")
            fault = ""
            if above not in _KINDS:
                fault = "expected a name of the form KEY or policies.KEY"
            elif not issubclass(kind, _KINDS[above]):
                fault = f"expected a {_KINDS[above].__name__}, got {kind.__name__}"
            elif above == parent and key in section.model_fields:
                fault = f"expected a new key, got {key!r}"
            if fault:
                warnings.warn(f"entry point {name!r} of creditflow.config: {fault}; it is left out", stacklevel=1)
            elif above == parent:
                summary = (inspect.getdoc(kind) or "").partition("\n")[0]
                fields[key] = (kind | None, Field(default=None, description=summary))
        return create_model(
            section.__name__, __base__=section, __module__=section.__module__, __doc__=section.__doc__, **fields
        )

    return extend


@dataclass(frozen=True, slots=True)
class WorkflowSource:
    """One scheme of `team.workflow: scheme://name?option=value`."""

    load: Callable[[str, str], Workflow]
    """The workflow of an address and the key that holds it."""
    fill: Callable[[Any], None]
    """Fills the parts of a `Config` that the recipe leaves open, such as the agents."""


WORKFLOWS: Registry[WorkflowSource] = Registry("team.workflow", group="creditflow.workflows", record=WorkflowSource)


def workflow_source(reference: str) -> WorkflowSource | None:
    """The source of a workflow's address; None for a reference to a function. Raises ConfigError."""
    scheme, separator, _ = reference.partition("://")
    return WORKFLOWS[scheme] if separator else None
