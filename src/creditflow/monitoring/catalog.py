"""Catalog of the engines' metrics, with unit and meaning: `catalog.csv` documents them, this module checks their names.

A name in angle brackets is a placeholder for a name of the run: `<agent>`, `<function>`, `<policy>`, `<name>`. If
several policies are trained, the metrics of an update are prefixed with the policy's name: `<policy>/actor/entropy`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from creditflow.errors import ConfigError, did_you_mean
from creditflow.registry import Registry

PER_UPDATE = ("actor/", "critic/", "training/", "rollout_corr/")
"""Prefixes of the metrics that carry a policy's name if several are trained."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table in docs/reference/metrics.md."""

    name: str
    unit: str
    engine: str
    """The only engine with this metric, `local` or `verl`; empty for both."""
    meaning: str
    title: str = ""
    """Its name on a page; empty for `name`."""

    def title_of(self, name: str) -> str:
        """The title of a full metric name: placeholders filled in, the policy of an update in brackets."""
        pattern = re.sub(r"<(\w+)>", r"(?P<\1>.+)", re.escape(self.name))
        if not self.title or (match := re.fullmatch(f"(?:(?P<policy_>.+)/)?{pattern}", name)) is None:
            return name
        title = re.sub(r"<(\w+)>", lambda placeholder: match[placeholder[1]], self.title)
        return title if match["policy_"] is None else f"{title} ({match['policy_']})"


_LISTS: Registry[list[Metric]] = Registry("metrics", group="creditflow.metrics", kind=list)


@cache
def all_metrics() -> list[Metric]:
    """The metrics of the engines, then those of plug-ins: entry points of group `creditflow.metrics`, lists of them."""
    table = resources.files("creditflow.monitoring") / "catalog.csv"
    own = [Metric(*row) for row in csv.reader(table.read_text(encoding="utf-8").splitlines()[1:])]
    return own + [metric for _, metrics in _LISTS.items() for metric in metrics]


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a recipe defines: the possible values of the placeholders."""

    agents: Sequence[str] = ()
    functions: Sequence[str] | None = None
    """None if not known yet."""
    policies: Sequence[str] = ()
    rules: Sequence[str] = ()
    engine: str = ""
    """`local` or `verl`; empty for the metrics of both."""

    def expand(self, placeholder: str) -> Sequence[str] | None:
        """The possible values of a placeholder; None if any value fits."""
        names = {"agent": self.agents, "function": self.functions, "policy": self.policies, "rule": self.rules}
        return names.get(placeholder)


def described(name: str, names: Names) -> Metric | None:
    """The catalog entry of a full metric name, or None. `*` fits any name in its position."""
    policy, _, rest = name.partition("/")
    if (policy == "*" or policy in names.policies) and rest.startswith(PER_UPDATE):
        name = rest
    # Without an engine, entries of both engines are candidates.
    here = [entry for entry in all_metrics() if not names.engine or entry.engine in ("", names.engine)]
    return next((entry for entry in here if re.fullmatch(_pattern(entry.name, names), name)), None)


def expect_known(metric: str, names: Names, key: str) -> Metric:
    """The catalog entry of `metric`. Raises ConfigError with the nearest known name for an unknown metric."""
    entry = described(metric, names)
    if entry is None:
        raise ConfigError(f"{key}: unknown metric {metric!r}{did_you_mean(metric, _spelled_out(names))}")
    return entry


def _pattern(name: str, names: Names) -> str:
    """The regular expression of a name in the catalog; `<k>` matches a number."""

    def values_of(placeholder: re.Match[str]) -> str:
        if (values := names.expand(placeholder[1])) is None:
            return r"\d+" if placeholder[1] == "k" else "[^/]+"
        return f"(?:{'|'.join(map(re.escape, ('*', *values)))})"

    return re.sub(r"<(\w+)>", values_of, re.escape(name))


def _spelled_out(names: Names) -> list[str]:
    """Every metric name of the catalog, and the same with the recipe's names filled in."""
    spelled = [entry.name for entry in all_metrics()]
    for name in list(spelled):
        if (placeholder := re.search(r"<(\w+)>", name)) is not None:
            spelled += [name.replace(placeholder[0], word, 1) for word in names.expand(placeholder[1]) or ()]
    if len(names.policies) > 1:
        spelled += [f"{policy}/{name}" for policy in names.policies for name in spelled if name.startswith(PER_UPDATE)]
    return spelled


def matching(metric: str, names_in_metrics: Iterable[str]) -> list[str]:
    """The names that match `metric`, which may contain `*`, with or without a policy's prefix."""
    pattern = re.escape(metric).replace(r"\*", "[^/]+")
    if metric.startswith(PER_UPDATE):
        pattern = f"(?:[^/]+/)?{pattern}"
    return [name for name in names_in_metrics if re.fullmatch(pattern, name)]
