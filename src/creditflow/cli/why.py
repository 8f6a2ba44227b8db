"""`creditflow why`: explain an advantage that a run trained on."""

from __future__ import annotations

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
    if step is not None and trajectory is not None:
        raise InputError("why: expected the id of a step or --trajectory T, got both")
    ledger = Ledger.open(run)
    if trajectory is not None:
        _explain_trajectory(ledger, trajectory)
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
    head = step_head(recorded.assignment, s, recorded.step)
    token_lines = [] if explanation.token is None else [_token_line(recorded, s, explanation.token)]
    learned = harmless_lines(explanation, recorded.assignment, s)
    lines = [*head, *token_lines, *UNITS, "", *tree(explanation, exact=exact), "", *learned]
    lines += terms(explanation, exact=exact)
    if step is None:
        of = recorded.batch.trajectory_of_step[s]
        lines[:0] = [*worth_a_look_lines(recorded.assignment, recorded.step), "", "the largest advantage, up or down:"]
        lines += [
            "",
            f"explain another step:  creditflow why {run} STEP",
            f"show its trajectory:   creditflow why {run} --trajectory {plain(recorded.batch.trajectory_ids[of])}",
            f"see all trajectories:  creditflow view {run}",
        ]
    _print(ledger, lines)


def _newest(ledger: Ledger) -> Recorded:
    """The newest training step with assigned credit. Raises InputError without one."""
    for training_step in reversed(ledger.steps):
        if (recorded := ledger.read(training_step)).assignment is not None:
            return recorded
    raise InputError(f"{ledger.path}: expected a training step with assigned credit, found none")


def _explain_trajectory(ledger: Ledger, trajectory: str) -> None:
    """Print a trajectory, one line per step."""
    recorded = ledger.read(ledger.training_step_of(trajectory, "trajectory_id"))
    n = recorded.batch.trajectory_ids.index(trajectory)
    _print(ledger, list(trajectory_lines(recorded.assignment, recorded.batch, n, recorded.step)))


def _token_line(recorded: Recorded, s: int, token: int) -> str:
    at = int(recorded.batch.token_offsets[s]) + token
    return (
        f"token:    {token} (id {recorded.batch.response_ids[at]}, log-probability {recorded.batch.logprobs[at]:.4f})"
    )


def _print(ledger: Ledger, lines: list[str]) -> None:
    for torn in ledger.torn:
        lines.append(f"set aside: {plain(str(torn))} is incomplete, a crash cut it off")
    print("\n".join(lines))
