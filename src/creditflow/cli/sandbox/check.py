"""`creditflow sandbox check`: try ten probes on a back end, one line per probe."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from creditflow._utils.files import write_json, write_named
from creditflow._utils.progress import Reporter
from creditflow.cli._options import JsonFile, make_json_folder
from creditflow.errors import InputError
from creditflow.reports.tables import results_console
from creditflow.sandbox import Sandbox, UnsafeSandboxWarning, open_sandbox
from creditflow.sandbox.self_check import CHECK_LIMITS, CONTAINED, PROBES, check_sandbox


def check(
    *,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="The back end to check; auto takes one that protects this machine.")
    ] = "auto",
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option or a limit of the back end; may be repeated."),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Try ten probes on a sandbox; exit code 0 only if all are contained.

    A harmless program must work, and nine bounded attacks must fail. An escape does no lasting harm to the machine.
    """
    make_json_folder(json)
    options = dict(_option(text) for text in option or [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeSandboxWarning)  # the report is more specific than the warning
        box = open_sandbox(backend, **{**asdict(CHECK_LIMITS), **options})
    verdicts, console = [], results_console()
    with Reporter().bar(f"sandbox check {backend}", len(PROBES)) as bar:
        for verdict in check_sandbox(box):
            verdicts.append(verdict)
            bar.advance(status=f"{verdict.probe}: {verdict.fate}")
    for verdict in verdicts:
        console.print(f"{verdict.probe:<14} {verdict.fate:<18} {verdict.seen}", soft_wrap=True)
    not_bounded = list(_unbounded(box))
    for line in not_bounded:
        console.print(f"not bounded: {line}", soft_wrap=True)
    contained = sum(verdict.fate == CONTAINED for verdict in verdicts)
    console.print(f"{backend}: {contained} of {len(PROBES)} probes contained", soft_wrap=True)
    if json is not None:
        facts = {"backend": backend, "options": options, "limits": asdict(box.limits), "not_bounded": not_bounded}
        write_named(json, lambda file: write_json(file, facts | {"probes": [*map(asdict, verdicts)]}), "--json")
    if contained < len(PROBES):
        raise typer.Exit(1)


def _option(text: str) -> tuple[str, Any]:
    """Parse `key=value`, with the value as YAML."""
    import yaml

    key, equals, value = text.partition("=")
    if key in ("", "backend") or not equals:  # --backend names the back end
        raise InputError(f"--option: expected KEY=VALUE, an option or a limit of the back end, got {text!r}")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InputError(f"--option {key}: expected a YAML value, got {value!r}") from error


def _unbounded(box: Sandbox) -> Iterator[str]:
    """Resources that the back end does not bound by its limits, by its `memory_bound` and `files_bound`."""
    for name, what, most in (
        ("memory_bound", "memory of all processes together", box.limits.memory_mb << 20),
        ("files_bound", "number of files", box.limits.files),
    ):
        bound, how = getattr(box, name)() if hasattr(box, name) else (None, "the back end states no bound")
        if bound is None or bound > most:
            yield f"{what}: {how}"
