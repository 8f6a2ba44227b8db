"""A run's credit assigned again under other options, from its recorded trajectories."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from creditflow.config import credit_options, load_named_files
from creditflow.config.algorithm import CHOOSING, merge_options, rule_options
from creditflow.config.references import spelled_out
from creditflow.credit import Assignment, BatchStats, CreditOptions, Threshold, assign
from creditflow.credit.analysis.metrics import batch_stats
from creditflow.credit.history import History
from creditflow.credit.records import RULE
from creditflow.credit.thresholds.base import Constant
from creditflow.errors import BatchError, ConfigError, InputError
from creditflow.monitoring.guard import FALLBACK_RULE
from creditflow.runs import Ledger, Recorded


def reassigned(
    ledger: Ledger, changed: Mapping[str, Any], steps: Sequence[int] | None = None
) -> Iterator[tuple[Recorded, Assignment | None]]:
    """Yield each training step with its assignment under the recorded options and `changed`.

    `steps`: ascending; None: all recorded ones.

    Without a changed threshold, the recorded thresholds apply; a changed one adapts from training step to training
    step, as in training, and so do fitted parts of credit. A training step without assigned credit yields None. One in
    a fallback of the guard keeps the rule `identical` unless `changed` names another one. Runs the files that the
    options name.

    Raises InputError if options are invalid, cannot be loaded, or need a critic that the run did not have.
    """
    names_rule = RULE in rule_options(changed.get("propagation"))
    in_fallback = changed if names_rule else {key: value for key, value in changed.items() if key not in CHOOSING}
    own_rule = ""
    new_threshold: Threshold | None = None
    history: History | None = None
    accuracy = {row["step"]: row["val/pass_at_1"] for row in ledger.metrics() if "val/pass_at_1" in row}
    for recorded in map(ledger.read, ledger.steps if steps is None else steps):
        if recorded.assignment is None:
            yield recorded, None
            continue
        rule = recorded.assignment.options.propagation.name
        own_rule = own_rule or rule
        if new_threshold is None and _sets_threshold(changed):
            new_threshold = _changed(recorded.assignment.options, changed).propagation.make_threshold()
        applied = in_fallback if rule == FALLBACK_RULE != own_rule else changed
        before, options = recorded.assignment, _changed(recorded.assignment.options, applied)
        # Reads the floor of the kind, whose file is loaded by now.
        threshold = standing_threshold(before) if new_threshold is None else new_threshold
        values_T = None if before.advantage.critic is None else before.advantage.critic.values_T
        history = before.history if history is None else history
        try:
            assignment = assign(recorded.batch, options, values_T=values_T, threshold=threshold, history=history)
        except BatchError as error:
            raise InputError(f"training step {recorded.step}: {error}") from error
        history = assignment.history_after
        if new_threshold is not None:
            new_threshold.update(batch_stats(assignment))
            if accuracy.get(recorded.step) is not None:
                new_threshold.update(BatchStats({}, {}, accuracy=accuracy[recorded.step]))
        yield recorded, assignment


def reassigned_step(ledger: Ledger, recorded: Recorded, changed: Mapping[str, Any]) -> Assignment:
    """The assignment of one training step that `reassigned` yields. Reads earlier steps only if they influence it."""
    assert recorded.assignment is not None
    adapts = _changed(recorded.assignment.options, changed).propagation.learns or _sets_threshold(changed)
    steps = [step for step in ledger.steps if step == recorded.step or (adapts and step < recorded.step)]
    ((_, assignment),) = deque(reassigned(ledger, changed, steps), maxlen=1)
    assert assignment is not None
    return assignment


def _changed(before: CreditOptions, changed: Mapping[str, Any]) -> CreditOptions:
    """The recorded options with `changed`, after the files that they name are loaded; without a shadow."""
    recorded = spelled_out(before)
    rule = merge_options(rule_options(recorded["propagation"]), rule_options(changed.get("propagation")))
    if "theta" in rule and (theta := changed.get("propagation_threshold")) is not None:
        rule = merge_options(rule, {"theta": theta})
    estimator = changed.get("adv_estimator", before.adv_estimator)
    load_named_files({**recorded, "propagation": rule, "adv_estimator": estimator}, Path.cwd())
    try:
        return credit_options(before, **changed)
    except ConfigError as error:
        own = {RULE: rule[RULE], **rule_options(changed.get("propagation"))}
        credit_options(**{**changed, "propagation": own})  # raises if the changes alone are invalid
        raise ConfigError(f"{error}, under the run's recorded options") from error


def _sets_threshold(changed: Mapping[str, Any]) -> bool:
    spec = changed.get("propagation")
    return "propagation_threshold" in changed or (isinstance(spec, Mapping) and "theta" in spec)


def standing_threshold(assignment: Assignment) -> Threshold | None:
    """A constant threshold: each agent keeps the one in force. None for a rule without gates."""
    batch, threshold_S = assignment.batch, assignment.credit.threshold_S
    if threshold_S is None:
        return None
    agents, first = np.unique(batch.agent_of_step, return_index=True)
    theta_of = {batch.agent_names[a]: float(theta) for a, theta in zip(agents, threshold_S[first], strict=True)}
    return Constant(theta_of, assignment.options.propagation.make_threshold().floor)
