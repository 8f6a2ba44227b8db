"""`creditflow why`: explain an advantage that a run trained on."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from json import dumps as to_json
from typing import Annotated

import typer

from creditflow.cli._options import Run, number_option
from creditflow.credit import explain
from creditflow.errors import BatchError, InputError
from creditflow.reports.text import plain
from creditflow.reports.why import (
    UNITS,
    harmless_lines,
    most_telling,
    step_head,
    terms,
    trajectory_lines,
    tree,
    worth_a_look_lines,
)
from creditflow.runs import Ledger, Recorded

EXTRA = "report"


def why(
    run: Run,
    step: Annotated[str | None, typer.Argument(metavar="STEP", help="The id of a step.")] = None,
    *,
    token: Annotated[
        int | None, number_option("--token", "Explain one token of the step's response; 0 is the first.", 0)
    ] = None,
    trajectory: Annotated[
        str | None, typer.Option(metavar="T", help="Show the trajectory with this id, one line per step.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the step's operations and terms as JSON.")] = False,
    exact: Annotated[bool, typer.Option("--exact", help="Print the terms with all digits, not with four.")] = False,
) -> None:
    """Explain the advantage of a step, term by term.

    The last line is the number that the run trained on. Without STEP: list notable steps of the newest training step
    with their ids, and explain the one with the largest advantage, up or down.

    Example: creditflow why runs/RUN
    """
    if trajectory is not None and (step, token, json, exact) != (None, None, False, False):
        raise InputError("--trajectory: takes neither STEP nor --token, --json or --exact")
    ledger = Ledger.open(run)
    if trajectory is not None:
        recorded = ledger.read(ledger.training_step_of(trajectory, "trajectory_id"))
        n = recorded.batch.trajectory_ids.index(trajectory)
        _print(ledger, list(trajectory_lines(recorded.assignment, recorded.batch, n, recorded.step)))
        return
    recorded = _newest(ledger) if step is None else ledger.read(ledger.training_step_of(step))
    if recorded.assignment is None:
        raise InputError(f"{ledger.file(recorded.step)}: no credit was assigned, because too many scores had failed")
    s = most_telling(recorded.assignment) if step is None else recorded.batch.step_ids.index(step)
    try:
        explanation = explain(recorded.assignment, s, token)
    except BatchError as error:
        raise InputError(str(error)) from error
    if json:
        facts = {"training_step": recorded.step, "rule": recorded.assignment.options.propagation.spec()}
        print(to_json({**facts, "advantage": explanation.advantage, **asdict(explanation)}))
        return
    token_lines = [] if explanation.token is None else [_token_line(recorded, s, explanation.token)]
    lines = [*step_head(recorded.assignment, s, recorded.step), *token_lines, *UNITS, ""]
    lines += [*tree(explanation, exact=exact), "", *harmless_lines(explanation, recorded.assignment, s)]
    lines += terms(explanation, exact=exact)
    if step is None:
        trajectory, quoted = recorded.batch.trajectory_ids[recorded.batch.trajectory_of_step[s]], shlex.quote(str(run))
        lines[:0] = [*worth_a_look_lines(recorded.assignment, recorded.step), "", "the largest advantage, up or down:"]
        lines += [
            "",
            f"explain another step:  creditflow why {quoted} STEP",
            f"show its trajectory:   creditflow why {quoted} --trajectory {shlex.quote(plain(trajectory))}",
            f"see all trajectories:  creditflow view {quoted}",
        ]
    _print(ledger, lines)


def _newest(ledger: Ledger) -> Recorded:
    """The newest training step with assigned credit. Raises InputError without one."""
    for training_step in reversed(ledger.steps):
        if (recorded := ledger.read(training_step)).assignment is not None:
            return recorded
    raise InputError(f"{ledger.path}: expected a training step with assigned credit, found none")


def _token_line(recorded: Recorded, s: int, token: int) -> str:
    at = int(recorded.batch.token_offsets[s]) + token
    return (
        f"token:    {token} (id {recorded.batch.response_ids[at]}, log-probability {recorded.batch.logprobs[at]:.4f})"
    )


def _print(ledger: Ledger, lines: list[str]) -> None:
    for torn in ledger.torn:
        lines.append(f"set aside: {plain(str(torn))} is incomplete, a crash cut it off")
    print("\n".join(lines))
