"""Terminal text of an advantage's terms as a tree, and of a trajectory, one line per step. Computes no credit.

Control characters in texts of models, tasks and reward functions are escaped, so that they cannot act on the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from creditflow.credit import Assignment, Explanation
from creditflow.credit.fits.posteriors import bins
from creditflow.data import RIGHT, TRAJECTORY_STATUSES, Bools, Score, TrajectoryBatch
from creditflow.reports.text import aligned, in_yaml, number, plain

_SHOWN = 400
"""Maximum characters of a prompt or response."""
_REASON, _LINE = 200, 400


def step_head(assignment: Assignment, s: int, training_step: int) -> list[str]:
    """The step's identity, prompt, response and scores, as lines of text."""
    batch = assignment.batch
    n = batch.trajectory_of_step[s]
    parents = batch.index_of_step[batch.edge_parent[batch.edge_child == s]].tolist()
    uses = f"uses step{'s' if len(parents) > 1 else ''} {', '.join(map(str, parents))}" if parents else "uses no step"
    lines = [
        f"step {plain(batch.step_ids[s])}: {plain(batch.agent_names[batch.agent_of_step[s]])}, turn "
        f"{batch.turn_of_step[s]}, step {batch.index_of_step[s]} of trajectory {plain(batch.trajectory_ids[n])}, "
        f"{uses}",
        f"training step {training_step}, policy {plain(batch.policy_names[batch.policy_of_step[s]])}, version "
        f"{batch.policy_version[s]}",
        _rule_line(assignment),
        f"prompt:   {plain(batch.prompts[s], _SHOWN)}",
        f"response: {plain(batch.responses[s], _SHOWN)}",
    ]
    scores = batch.raw_scores[s]
    lines += [f"{'scores:  ' if i == 0 else '         '} {_score(*of)}" for i, of in enumerate(scores.items())]
    return lines if scores else [*lines, "scores:   no reward function scored this step"]


def _rule_line(assignment: Assignment) -> str:
    """The rule in force with all options."""
    return f"rule: {plain(in_yaml(assignment.options.propagation.spec()))}"


def tree(explanation: Explanation, *, exact: bool = True) -> list[str]:
    """The lines of `Explanation.tree`, without control characters, with four digits or with six."""
    lines = [plain(line, _LINE) for line in explanation.tree()]
    return lines if exact else [_VALUE.sub(lambda match: f"{float(match[0]):.4g}", line) for line in lines]


def terms(explanation: Explanation, *, exact: bool = True) -> list[str]:
    """A table of the parts that sum to the advantage, with four digits or all; the last line is the advantage.

    Each part is given in units of reward, as in the tree, and in those of the advantage: times weight / divisor.
    """
    total = repr(explanation.advantage) if exact else f"{explanation.advantage:.4g}"
    if not explanation.terms:
        return [explanation.operations[-1].note or "there are no parts", f"= {total}"]
    reward, shown = ("+.6g", "+") if exact else ("+.4g", "+.4g")
    rows = [("part", "in reward", "x weight / divisor = in advantage")]
    rows += [(plain(p.name), format(p.in_reward, reward), format(p.value, shown)) for p in explanation.terms]
    if explanation.rounding and exact:
        rows.append(("rounding", "", f"{explanation.rounding:+}"))
    return [*aligned(rows, left=(0,)), f"= {total}"]


def harmless_lines(explanation: Explanation, assignment: Assignment, s: int) -> list[str]:
    """The origin of a learned probability of no harm, in a paragraph; nothing if the step's credit has none."""
    if assignment.fit is None or all(operation.name != "harmless" for operation in explanation.operations):
        return []
    agent = assignment.batch.agent_names[assignment.batch.agent_of_step[s]]
    rates = assignment.fit.facts["model"]["agents"][agent]
    score = "No score of this step takes part."
    if assignment.rewards.scored_S[s] and assignment.options.decomposed:
        place = int(bins(assignment.rewards.sub_reward_S[s]))
        wrong, right = (f"{of[place]:.0%}" for of in rates["scores"])
        score = f"{_BINS[place]}, as here, comes from {wrong} of the steps that do harm and {right} of the others."
    return [
        f"harmless: by the rates learned so far, {rates['harm']:.0%} of the steps of {plain(agent)} do harm.",
        score,
        "The outcome then raises or lowers the probability, together with the scores of the trajectory's other steps.",
        "",
    ]


_VALUE = re.compile(r"(?<= = )-?[0-9][0-9.e+-]*(?=$|   #)")
_BINS = ("A score of 0", "A score below 0.5", "A score from 0.5 to below 1", "A score of 1")


UNITS = (
    "units: a raw score is in its function's range; sub-rewards and thresholds are in [0, 1]; own, received, outcome,",
    "credit, baseline and spread are in reward; weights, gates, shares and gamma are factors; an advantage is credit",
    "minus baseline, divided by the divisor: a number of spreads, or reward where the divisor is 1.",
)
"""The units of the numbers in `tree` and `terms`, as lines of text."""


def is_trained(a: Assignment) -> Bools:
    """[S] whether the loss includes each step. Steps of an untrained policy have no sampled token."""
    sampled_S = a.batch.sampled_of_step > 0
    return a.groups.trained_S & (sampled_S | (not sampled_S.any()))  # a batch may come without tokens


def most_telling(a: Assignment) -> int:
    """The trained step with the largest advantage, up or down; the first of several."""
    return int(np.argmax(np.abs(np.where(is_trained(a), a.advantage.advantage_S, 0.0))))


def worth_a_look(a: Assignment) -> list[tuple[int, str]]:
    """Notable steps with the reason for each: positions in the batch, each at most once."""
    trained_S = is_trained(a)
    right_S = trained_S & a.rewards.scored_S & (a.rewards.sub_reward_S >= RIGHT)
    wrong_S = trained_S & a.rewards.scored_S & (a.rewards.sub_reward_S < RIGHT)
    none_S = np.zeros(a.batch.n_steps)
    withheld_S = none_S if a.credit.withheld_S is None else np.abs(np.nan_to_num(a.credit.withheld_S))
    frozen_S = none_S > 0 if a.credit.frozen_S is None else a.credit.frozen_S
    candidates = (
        (wrong_S & (a.advantage.advantage_S > 0), a.advantage.advantage_S, "wrong by its score, but raised most"),
        (right_S & (a.advantage.advantage_S < 0), -a.advantage.advantage_S, "right by its score, but lowered most"),
        (trained_S & (a.advantage.advantage_S > 0), a.advantage.advantage_S, "the highest advantage"),
        (trained_S & (a.advantage.advantage_S < 0), -a.advantage.advantage_S, "the lowest advantage"),
        (withheld_S > 0, withheld_S, "its gate withheld the most credit"),
        (a.rewards.failed_S, np.ones(len(a.rewards.failed_S)), "its scoring failed"),
        (frozen_S, none_S + 1.0, a.options.propagation.why_frozen),
    )
    reasons: dict[int, str] = {}
    for among_S, size_S, reason in candidates:
        if among_S.any():
            s = int(np.argmax(np.where(among_S, size_S, -np.inf)))
            reasons[s] = f"{reasons[s]}; {reason}" if s in reasons else reason
    return list(reasons.items())


def worth_a_look_lines(assignment: Assignment, training_step: int) -> list[str]:
    """The steps of `worth_a_look` with their numbers, one per line."""
    batch = assignment.batch
    head = ("step", "agent", "sub-reward", "credit", "advantage", "why it is worth a look")
    rows = [head]
    for s, reason in worth_a_look(assignment):
        _, agent, _, _, score, _, credit, advantage, _ = _step_row(assignment, batch, s)
        rows.append((plain(batch.step_ids[s]), agent, score, credit, advantage, reason))
    title = f"training step {training_step}: {batch.n_steps:,} steps of {batch.n_trajectories:,} trajectories"
    return [title, _rule_line(assignment), "", *aligned(rows, left=range(len(head)))]


def trajectory_lines(
    assignment: Assignment | None, batch: TrajectoryBatch, n: int, training_step: int
) -> Iterator[str]:
    """A trajectory: its task and outcome, then one line per step; the first wrong step is marked."""
    task, outcome = batch.tasks[n], batch.outcome_scores[n]
    yield (
        f"trajectory {plain(batch.trajectory_ids[n])} of task "
        f"{plain(batch.group_names[batch.group_of_trajectory[n]])}, training step {training_step}, "
        f"{TRAJECTORY_STATUSES[batch.status_of_trajectory[n]]}"
    )
    if assignment is not None:
        yield _rule_line(assignment)
    yield f"task:    {plain(task.text, _SHOWN)}"
    yield f"answer:  {plain(str(batch.answers[n]), _SHOWN)}"
    if error := batch.trajectory_info[n].get("error"):
        yield f"failed:  {plain(str(error), _SHOWN)}"
    yield f"outcome: {'nobody scored it' if outcome is None else _score('', outcome)}"
    for agent, own in (batch.outcomes_of_agents[n] if batch.outcomes_of_agents else {}).items():
        yield f"outcome of {_score(agent, own)}"
    yield ""
    at = np.flatnonzero(batch.trajectory_of_step == n).tolist()
    gated = assignment is not None and assignment.credit.gate_open_S is not None
    rows = [_without_gate(_step_row(assignment, batch, s), gated) for s in at]
    wrong = first_error(assignment, batch, at)
    head = _without_gate(("step", "agent", "turn", "uses", "score", "gate", "credit", "advantage", "response"), gated)
    for s, line in zip((None, *at), aligned((head, *rows), left=(1,)), strict=True):
        yield (f"{line}  <- first error" if s is not None and s == wrong else line).rstrip()


def first_error(assignment: Assignment | None, batch: TrajectoryBatch, steps: Sequence[int]) -> int | None:
    """The first of `steps` with a sub-reward below the maximum, or None."""
    if assignment is None:
        return None
    return next(
        (s for s in steps if assignment.rewards.scored_S[s] and assignment.rewards.sub_reward_S[s] < RIGHT), None
    )


def _step_row(a: Assignment | None, batch: TrajectoryBatch, s: int) -> tuple[str, ...]:
    parents = batch.index_of_step[batch.edge_parent[batch.edge_child == s]].tolist()
    where = (
        str(batch.index_of_step[s]),
        plain(batch.agent_names[batch.agent_of_step[s]]),
        str(batch.turn_of_step[s]),
        ",".join(map(str, parents)) or "-",
    )
    response = plain(batch.responses[s], 40)
    if a is None:
        return (*where, "-", "-", "-", "-", response)
    score = (
        "failed" if a.rewards.failed_S[s] else number(a.rewards.sub_reward_S[s], 2) if a.rewards.scored_S[s] else "-"
    )
    gate = "-" if a.credit.gate_open_S is None else "open" if a.credit.gate_open_S[s] else "closed"
    advantage = "masked" if not is_trained(a)[s] else number(a.advantage.advantage_S[s], signed=True)
    return (*where, score, gate, number(a.credit.total_S[s], signed=True), advantage, response)


def _without_gate(row: tuple[str, ...], gated: bool) -> tuple[str, ...]:
    """The cells of a step, without the one of its gate if the rule has none."""
    return row if gated else (*row[:5], *row[6:])


def _score(name: str, score: Score) -> str:
    value = "by token" if isinstance(score.value, tuple) else f"{score.value:g}"
    low, high = score.range
    result = value if score.status == "ok" else score.status
    result += f" in [{low:g}, {high:g}]" if (low, high) != (0.0, 1.0) and score.status == "ok" else ""
    parts = [f"{plain(name)} {result}".strip()]
    parts += ["weight 0: not part of credit"] if score.weight == 0 else []
    parts += [plain(score.reason, _REASON)] if score.reason else []
    parts += [f"{score.seconds:.2g} s"] if score.seconds else []
    return "; ".join(parts)
