"""A run's credit assigned again under other options, from its recorded trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from creditflow.config import with_loaded_files
from creditflow.credit import Assignment, BatchStats, Threshold, assign, make_threshold
from creditflow.credit.analysis.metrics import batch_stats
from creditflow.credit.history import History
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.errors import BatchError, InputError
from creditflow.runs import Ledger, Recorded


def reassigned(ledger: Ledger, changed: Mapping[str, Any]) -> Iterator[tuple[Recorded, Assignment | None]]:
    """Yield each recorded training step with its assignment under the recorded options and `changed`.

    Without a changed threshold, the recorded thresholds apply; a changed one adapts from training step to training
    step, as in training, and so do fitted parts of credit. A training step without assigned credit yields None. Runs
    the files that the options name. Raises InputError if options are invalid, cannot be loaded, or need a critic that
    the run did not have.
    """
    spec = changed.get("propagation_threshold")
    new_threshold = None if spec is None else make_threshold(spec)
    history: History | None = None
    accuracy = {row["step"]: row["val/pass_at_1"] for row in ledger.metrics() if "val/pass_at_1" in row}
    for recorded in ledger:
        if recorded.assignment is None:
            yield recorded, None
            continue
        assignment = reassign(recorded, changed, f"training step {recorded.step}", new_threshold, history)
        history = assignment.history_after
        if new_threshold is not None:
            new_threshold.update(batch_stats(assignment))
            if accuracy.get(recorded.step) is not None:
                new_threshold.update(BatchStats({}, {}, accuracy=accuracy[recorded.step]))
        yield recorded, assignment


def reassign(
    recorded: Recorded,
    changed: Mapping[str, Any],
    subject: str,
    threshold: Threshold | None = None,
    history: History | None = None,
) -> Assignment:
    """Assign a training step's credit under its recorded options and `changed`.

    `threshold`, `history`: default: the recorded ones; a changed threshold begins anew. Raises InputError if options
    are invalid, or, with `subject` in front, if the recorded trajectories do not fit them.
    """
    before = recorded.assignment
    assert before is not None
    options = with_loaded_files(replace(before.options, shadow=None, **changed), Path.cwd())
    rules = PROPAGATION_RULES[options.propagation], PROPAGATION_RULES[before.options.propagation]
    if rules[0].expects and not rules[1].expects and "outcome_to" not in changed:
        options = replace(options, outcome_to="auto")  # with the outcome of the other rule it would count twice
    options.validate()
    options.refuse_ignored(changed)
    if threshold is None and "propagation_threshold" not in changed:
        threshold = before.standing_threshold()  # reads the floor of the kind, whose file is loaded by now
    values_T = None if before.critic is None else before.critic.values_T
    try:
        return assign(
            recorded.batch,
            options,
            values_T=values_T,
            threshold=threshold,
            history=before.history if history is None else history,
        )
    except BatchError as error:
        raise InputError(f"{subject}: {error}") from error
