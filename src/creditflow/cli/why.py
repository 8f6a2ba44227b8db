"""`creditflow why`: explain an advantage that a run trained on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from creditflow.cli._options import Run, number_option
from creditflow.credit import explain
from creditflow.errors import BatchError, InputError
from creditflow.reports.text import plain
from creditflow.reports.why import UNITS, step_head, terms, trajectory_lines, tree, worth_a_look_lines
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
) -> None:
    """Explain the advantage of a step, term by term.

    The last line is the number that the run trained on. Without STEP: list notable steps with their ids.

    Example: creditflow why runs/RUN
    """
    if step is not None and trajectory is not None:
        raise InputError("why: expected the id of a step or --trajectory T, got both")
    if step is None and (token is not None or json):
        raise InputError(f"{'--token' if token is not None else '--json'}: expected the id of a step beside it")
    if trajectory is not None:
        _explain_trajectory(run, trajectory)
    elif step is not None:
        _explain_step(run, step, token, as_json=json)
    else:
        _list_notable_steps(run)


def _explain_step(path: Path, step: str, token: int | None, *, as_json: bool) -> None:
    """Print the terms of a step's or a token's advantage; the last line is the number trained on."""
    from json import dumps

    ledger = Ledger.open(path)
    recorded = ledger.read(ledger.training_step_of(step))
    if recorded.assignment is None:
        raise InputError(f"{ledger.file(recorded.step)}: no credit was assigned, because too many scores had failed")
    s = recorded.batch.step_ids.index(step)
    try:
        explanation = explain(recorded.assignment, s, token)
    except BatchError as error:
        raise InputError(str(error)) from error
    if as_json:
        facts = {"training_step": recorded.step, "rule": recorded.assignment.options.propagation.spec()}
        print(dumps({**facts, "advantage": explanation.advantage, **asdict(explanation)}))
        return
    head = step_head(recorded.assignment, s, recorded.step)
    token_lines = [] if explanation.token is None else [_token_line(recorded, s, explanation.token)]
    _print(ledger, [*head, *token_lines, *UNITS, "", *tree(explanation), "", *terms(explanation)])


def _list_notable_steps(path: Path) -> None:
    """List notable steps of the newest training step, and the commands that explain them."""
    ledger = Ledger.open(path)
    for training_step in reversed(ledger.steps):
        recorded = ledger.read(training_step)
        if recorded.assignment is not None:
            break
    else:
        raise InputError(f"{path}: expected a training step with assigned credit, found none")
    lines = worth_a_look_lines(recorded.assignment, recorded.step)
    trajectory = plain(recorded.batch.trajectory_ids[0])
    hints = [
        "",
        f"explain one of them:   creditflow why {path} STEP",
        f"show its trajectory:   creditflow why {path} --trajectory T   (such as {trajectory})",
        f"see all trajectories:  creditflow view {path}",
    ]
    _print(ledger, [*lines, *hints])


def _explain_trajectory(path: Path, trajectory: str) -> None:
    """Print a trajectory, one line per step."""
    ledger = Ledger.open(path)
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
