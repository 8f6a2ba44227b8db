"""`creditflow why`: explain an advantage that a run trained on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from creditflow.credit import explain
from creditflow.errors import BatchError, InputError
from creditflow.reports.text import plain
from creditflow.reports.why import UNITS, step_head, terms, trajectory_lines, tree, worth_a_look_lines
from creditflow.runs import Ledger, Recorded


def why_step(path: Path, step: str, token: int | None, *, as_json: bool) -> None:
    """Print the terms of a step's or a token's advantage; the last line is the number trained on."""
    ledger = Ledger.open(path)
    recorded = ledger.read(ledger.training_step_of(step))
    if recorded.assignment is None:
        raise InputError(f"{ledger.file(recorded.step)}: credit was never assigned there: too many scores had failed")
    s = recorded.batch.step_ids.index(step)
    try:
        explanation = explain(recorded.assignment, s, token)
    except BatchError as error:
        raise InputError(str(error)) from error
    if as_json:
        facts = {"training_step": recorded.step, "advantage": explanation.advantage, **asdict(explanation)}
        print(json.dumps(facts))
        return
    head = step_head(recorded.assignment, s, recorded.step)
    of_token = [] if explanation.token is None else [_token_line(recorded, s, explanation.token)]
    _print(ledger, [*head, *of_token, *UNITS, "", *tree(explanation), "", *terms(explanation)])


def why_run(path: Path) -> None:
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


def why_trajectory(path: Path, trajectory: str) -> None:
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
