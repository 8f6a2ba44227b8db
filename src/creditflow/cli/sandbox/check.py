"""`creditflow sandbox check`: run the attack suite against a back end, one line per attack."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from creditflow._utils.files import write_json
from creditflow._utils.progress import Reporter
from creditflow.errors import InputError
from creditflow.reports.tables import results_console
from creditflow.sandbox import UnsafeSandboxWarning, open_sandbox
from creditflow.sandbox.conformance import ATTACKS, CHECK_LIMITS, AttackVerdict, check_sandbox, memory_bound


def check(
    *,
    backend: Annotated[
        str, typer.Option(help="The back end to attack; auto takes one that protects this machine.")
    ] = "auto",
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option or a limit of the back end; may be repeated."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run only this attack; may be repeated.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the verdicts to FILE.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Attacks that run in parallel; default: one per core, at most 4.")
    ] = None,
) -> None:
    """Run attacks on a sandbox; exit code 0 only if all are contained.

    The attacks are bounded, so that an escape does no lasting harm to the machine.
    """
    if json is not None and not json.absolute().parent.is_dir():
        raise InputError(f"--json {json}: no folder {json.parent}")
    options, attacks = dict(_option(text) for text in option or []), only or []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeSandboxWarning)  # the report is more specific than the warning
        box = open_sandbox(backend, **{**asdict(CHECK_LIMITS), **options})
    total = (len(set(attacks)) if attacks else len(ATTACKS)) + 1
    with Reporter().bar(f"sandbox check {backend}", total) as bar:
        verdicts = check_sandbox(
            box, attacks, jobs=jobs, on_verdict=lambda verdict: bar.advance(status=f"{verdict.attack}: {verdict.fate}")
        )
    bound = memory_bound(box)
    _print(verdicts, backend, bound)
    if json is not None:
        report = {
            "backend": backend,
            "options": options,
            "limits": asdict(box.limits),
            "memory_bound": None if bound is None else {"bytes": bound[0], "how": bound[1]},
            "contained": all(verdict.contained for verdict in verdicts),
            "attacks": [asdict(verdict) for verdict in verdicts],
        }
        write_json(json, report)
    if not all(verdict.contained for verdict in verdicts):
        raise typer.Exit(1)


def _option(text: str) -> tuple[str, Any]:
    """Parse `key=value`, with the value as YAML."""
    import yaml

    key, equals, value = text.partition("=")
    if not (key and equals):
        raise InputError(f"--option: expected KEY=VALUE, got {text!r}")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InputError(f"--option {key}: expected a YAML value, got {value!r}") from error


_STYLE = {"contained": "green", "NOT CONTAINED": "bold red", "could not be tried": "bold yellow"}


def _print(verdicts: Sequence[AttackVerdict], backend: str, bound: tuple[int, str] | None) -> None:
    console = results_console()
    if console.is_terminal:
        grid = Table.grid(padding=(0, 2))
        for _ in range(2):
            grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for verdict in verdicts:
            grid.add_row(verdict.attack, Text(verdict.fate, style=_STYLE[verdict.fate]), verdict.seen)
        console.print(grid)
    else:  # one line per attack, for other programs to read
        for verdict in verdicts:
            console.print(f"{verdict.attack:<24} {verdict.fate:<18} {verdict.seen}", soft_wrap=True)
    text = "unknown to the back end" if bound is None else f"{bound[0] / 1e6:,.0f} MB, {bound[1]}"
    console.print(f"\nmemory bound of all processes together: {text}", soft_wrap=True)
    by_fate = {fate: [verdict.attack for verdict in verdicts if verdict.fate == fate] for fate in _STYLE}
    parts = [f"{len(by_fate.pop('contained'))} of {len(verdicts)} contained"]
    parts += [f"{fate}: {', '.join(names)}" for fate, names in by_fate.items() if names]
    console.print(f"{backend}: {'; '.join(parts)}", soft_wrap=True)
