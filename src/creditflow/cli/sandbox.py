"""`creditflow sandbox check`: run the attack suite against a back end, one line per attack."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from creditflow._utils.progress import Reporter
from creditflow.errors import InputError
from creditflow.reports.tables import results_console
from creditflow.sandbox import Sandbox, UnsafeSandboxWarning, open_sandbox
from creditflow.sandbox.conformance import ATTACKS, CHECK_LIMITS, AttackVerdict, check_sandbox, memory_bound


def check(
    backend: str, options: Sequence[str], only: Sequence[str], out: Path | None, jobs: int | None, reporter: Reporter
) -> bool:
    """Run the attacks, print each verdict, and return whether all are contained."""
    if out is not None and not out.absolute().parent.is_dir():
        raise InputError(f"--json {out}: there is no folder {out.parent}")
    given = dict(_option(text) for text in options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeSandboxWarning)  # the report is more specific than the warning
        box = open_sandbox(backend, **{**asdict(CHECK_LIMITS), **given})
    total = (len(set(only)) if only else len(ATTACKS)) + 1
    with reporter.bar(f"sandbox check {backend}", total) as bar:
        verdicts = check_sandbox(
            box, only, jobs=jobs, on_verdict=lambda verdict: bar.advance(status=f"{verdict.attack}: {verdict.fate}")
        )
    _print(verdicts)
    _print_summary(backend, box, verdicts)
    contained = all(verdict.contained for verdict in verdicts)
    if out is not None:
        _write(out, backend, given, box, verdicts)
    return contained


def _option(text: str) -> tuple[str, Any]:
    """Parse `key=value`, with the value as YAML."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise InputError(f"--option: expected KEY=VALUE, got {text!r}")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InputError(f"--option {key}: {value!r} is no YAML value") from error


_STYLE = {"contained": "green", "NOT CONTAINED": "bold red", "could not be tried": "bold yellow"}


def _print(verdicts: Sequence[AttackVerdict]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = results_console()
    if not console.is_terminal:  # one line per attack, for other programs to read
        for verdict in verdicts:
            console.print(f"{verdict.attack:<24} {verdict.fate:<18} {verdict.seen}", soft_wrap=True)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for verdict in verdicts:
        grid.add_row(verdict.attack, Text(verdict.fate, style=_STYLE[verdict.fate]), verdict.seen)
    console.print(grid)


def _print_summary(backend: str, box: Sandbox, verdicts: Sequence[AttackVerdict]) -> None:
    console = results_console()
    bound = memory_bound(box)
    how = "the back end does not say" if bound is None else f"{bound[0] / 1e6:,.0f} MB, {bound[1]}"
    console.print(f"\nmemory bound of all processes together: {how}", soft_wrap=True)
    console.print(f"{backend}: {_summary(verdicts)}", soft_wrap=True)


def _summary(verdicts: Sequence[AttackVerdict]) -> str:
    of = {fate: [verdict.attack for verdict in verdicts if verdict.fate == fate] for fate in _STYLE}
    parts = [f"{len(of['contained'])} of {len(verdicts)} contained"]
    parts += [f"{fate}: {', '.join(names)}" for fate, names in of.items() if names and fate != "contained"]
    return "; ".join(parts)


def _write(out: Path, backend: str, options: dict[str, Any], box: Sandbox, verdicts: Sequence[AttackVerdict]) -> None:
    bound = memory_bound(box)
    report = {
        "backend": backend,
        "options": options,
        "limits": asdict(box.limits),
        "memory_bound": None if bound is None else {"bytes": bound[0], "how": bound[1]},
        "contained": all(verdict.contained for verdict in verdicts),
        "attacks": [asdict(verdict) for verdict in verdicts],
    }
    out.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
