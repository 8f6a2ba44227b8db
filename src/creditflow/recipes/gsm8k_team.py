"""Planner, executor and verifier on grade-school word problems: their workflow and their sub-rewards.

The sub-rewards compare a step with the `<<a*b=c>>` calculations of the published solution, which is hidden from the
agents. Everything that agents write is untrusted: it is clipped, read by expressions of bounded length, and never
evaluated as code.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from creditflow.data import Step, Task, Trajectory
from creditflow.rewards import reward
from creditflow.rewards.support.answers import answer_lines
from creditflow.rewards.support.arithmetic import READ_CHARACTERS, Calculation, calculations_in
from creditflow.rewards.support.text import numbers_in
from creditflow.rollout import Reply, Team

MAX_EXECUTOR_TURNS = 8
"""Retries included; GSM8K's longest solutions have nine calculations, 98 % have six or fewer."""
PLAN_CHARACTERS, LINE_CHARACTERS = 800, 160

# The workflow


async def solve(task: Task, team: Team) -> str:
    """Run the team on one task. Unreadable text never stops the rollout; it is skipped and earns nothing."""
    plan: Reply = await team.planner(
        f"Problem: {task.text}\n\nWrite a numbered plan, one calculation per line. Do not calculate yet."
    )
    sub_steps = plan_lines(plan.text) or ["Solve the problem."]
    results: list[str] = []
    newest: Reply = plan
    accepted = ""
    turns_left = MAX_EXECUTOR_TURNS
    for number, sub_step in enumerate(sub_steps, start=1):
        if turns_left == 0:
            break
        last = number == len(sub_steps) or turns_left <= 2  # a retry may take the other turn
        so_far = "\n".join(results) or "nothing yet"
        situation = f"Problem: {task.text}\n\nResults so far:\n{so_far}\n\nNow: {sub_step}"
        finish = " Then write the final answer on a line of its own: #### answer" if last else ""

        # The results of earlier steps reach this prompt through the newest accepted reply.
        tried: Reply = await team.executor(
            f"Problem: {task.text}\n\nPlan:\n{plan.text[:PLAN_CHARACTERS]}\n\nResults so far:\n{so_far}\n\n"
            f"Now: {sub_step}\n\nWrite one calculation as a*b=c.{finish}",
            parents=[plan, newest],
        )
        turns_left -= 1
        verdict: Reply = await team.verifier(
            f"{situation}\n\nThe executor wrote: {one_line(tried.text)}\n\n"
            "Calculate it again as a*b=c. Then say ok if the executor's value is right, or bad if it is not.",
            info={"candidate": one_line(tried.text)},
        )
        newest = verdict
        if said(verdict.text) == "bad" and turns_left > 0:
            newest = tried = await team.executor(
                f"{situation}\n\nYou wrote: {one_line(tried.text)}\nThe verifier objects: {one_line(verdict.text)}\n\n"
                f"Write the right calculation as a*b=c.{finish}",
                parents=[tried, verdict],
                info={"retry_of": tried.step.index},
            )
            turns_left -= 1
        accepted = tried.text
        value = value_in(accepted)
        results.append(f"{number}. {one_line(sub_step)} Value: {'unknown' if value is None else figure(value)}")
    return answer_line(accepted)


def plan_lines(plan: str) -> list[str]:
    """The numbered lines of a plan, without their numbers; at most MAX_EXECUTOR_TURNS lines."""
    lines = plan[:READ_CHARACTERS].splitlines()
    numbered = [re.fullmatch(r"\s{0,8}(?:[Ss]tep\s)?[0-9]{1,2}[.):]\s?(.{0,2000})", line) for line in lines]
    texts = [match[1].strip()[:LINE_CHARACTERS] for match in numbered if match]
    return [text for text in texts if text][:MAX_EXECUTOR_TURNS]


def one_line(text: str) -> str:
    """A reply as a quotation in another agent's prompt: its calculation if it has one, else its beginning."""
    shown = calculations_in(text)
    return shown[-1].text if shown else " ".join(text[:READ_CHARACTERS].split())[:LINE_CHARACTERS]


def said(text: str) -> str | None:
    """The verifier's verdict: the last `ok` or `bad`; None without either."""
    words = re.findall(r"\b(?:not ok|ok|bad)\b", text[-READ_CHARACTERS:].lower())
    return {"not ok": "bad"}.get(words[-1], words[-1]) if words else None


def answer_line(text: str) -> str:
    """`#### answer` from the last accepted reply: its marked answer, else its value; empty without either."""
    if marked := answer_lines(text[-READ_CHARACTERS:]):
        return f"#### {marked[-1].strip()[:LINE_CHARACTERS]}"
    value = value_in(text)
    return "" if value is None else f"#### {figure(value)}"


def figure(value: float) -> str:
    """A number in everyday notation: 24 for 24.0."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.10g}"


# Values


def value_in(text: str) -> float | None:
    """The value of a reply: its last calculation's, else its last number."""
    if shown := calculations_in(text):
        return shown[-1].stated
    numbers = numbers_in(text[-READ_CHARACTERS:])
    return numbers[-1].value if numbers else None


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def _among(value: float, values: Sequence[float]) -> bool:
    return any(_same(value, other) for other in values)


# The sub-rewards


def solution(task: Task) -> list[Calculation]:
    """The calculations of the published solution.

    Raises ValueError if it shows none (one task in eighty): the step is then unscored, not wrong.
    """
    shown = [c for text in task.extra_info.get("calculations") or () for c in calculations_in(text)]
    if not shown:
        raise ValueError("the published solution shows no <<calculation>> to compare with")
    return shown


_WORDS: dict[str, tuple[str, float | None]] = {
    **dict.fromkeys(("add", "adding", "plus", "sum", "total"), ("+", None)),
    **dict.fromkeys(("subtract", "subtracting", "minus", "difference", "less"), ("-", None)),
    **dict.fromkeys(("multiply", "multiplying", "times", "product"), ("*", None)),
    **dict.fromkeys(("divide", "dividing", "divided", "split", "quotient"), ("/", None)),
    "half": ("/", 2.0),
    "twice": ("*", 2.0),
    "double": ("*", 2.0),
    "triple": ("*", 3.0),
}
_SYMBOLS = {
    "+": r"\+",
    "-": r"(?<=[0-9 )])[-\u2212](?=[0-9 ($])",
    "*": r"[*\u00d7]|(?<=[0-9 ])x(?=[ 0-9])",
    "/": r"[/\u00f7]",
}


def _mentions(line: str) -> set[str | float]:
    """The numbers and the operations in a line of a plan."""
    mentions: set[str | float] = {round(abs(number.value), 6) for number in numbers_in(line)}
    mentions |= {operation for operation, symbol in _SYMBOLS.items() if re.search(symbol, line)}
    for word in re.findall(r"[a-z]{3,12}", line.lower()):
        mentions |= {part for part in _WORDS.get(word, ()) if part is not None}
    return mentions


@reward(agent_match="^planner$")
def plan_covers(step: Step, trajectory: Trajectory) -> float:
    """Score the plan's coverage of the solution: the mean over its calculations of their fit to a line of the plan.

    Fit: shared / all numbers and operations of line and calculation (Jaccard), where values that an earlier calculation
    found need not be named. Each line counts for one calculation at most, so that neither a line that lists everything
    nor a copy of the question pays.

    Range: [0, 1]. Cost: negligible.
    """
    lines = [_mentions(line) for line in plan_lines(step.response)]
    calculations = solution(trajectory.task)
    earlier_values: set[str | float] = set()
    fits = []
    for c, calculation in enumerate(calculations):
        features = ({round(operand, 6) for operand in calculation.operands} - earlier_values) | calculation.operators
        fits += [(len(line & features) / len((line - earlier_values) | features), c, n) for n, line in enumerate(lines)]
        earlier_values.add(round(abs(calculation.stated), 6))
    total, calculations_left, lines_left = 0.0, set(range(len(calculations))), set(range(len(lines)))
    for fit, c, n in sorted(fits, key=lambda pair: -pair[0]):  # the best pairs first
        if c in calculations_left and n in lines_left:
            total += fit
            calculations_left.remove(c)
            lines_left.remove(n)
    return total / len(calculations)


_EVERYDAY = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 24, 30, 52, 60, 100, 365, 1000)
"""Numbers that a right calculation may use although the question has no such figure (`three`, `a week`, `half`)."""


def _open_values(step: Step, trajectory: Trajectory) -> tuple[list[float], list[float]]:
    """Values of the solution that earlier executor steps have not found, and the values that those steps found."""
    earlier = [s for s in trajectory.steps[: step.index] if s.agent == "executor"]
    replaced = {s.info.get("retry_of") for s in [*earlier, step]}
    past_values = [value for s in earlier if s.index not in replaced and (value := value_in(s.response)) is not None]
    open_values = [calculation.stated for calculation in solution(trajectory.task)]
    for number in numbers_in(str(trajectory.task.ground_truth))[-1:]:
        if not _among(number.value, open_values):
            open_values.append(number.value)
    for value in past_values:
        claimed = next((i for i, other in enumerate(open_values) if _same(value, other)), None)
        if claimed is not None:
            del open_values[claimed]
    return open_values, past_values


@reward(agent_match="^executor$")
def value_matches(step: Step, trajectory: Trajectory) -> float:
    """Score whether the step's value is a new value of the solution.

    1: a new value by a correct calculation; 0.75: a new value without a calculation; 0.5: another value, but the
    calculation is correct and uses only known numbers (a finer step than the solution's, or another way); 0.25: a
    correct calculation from unknown numbers, or a new value from a false calculation; 0: otherwise.
    """
    value, shown = value_in(step.response), calculations_in(step.response)
    open_values, past_values = _open_values(step, trajectory)
    if value is None:
        return 0.0
    matches = _among(value, open_values)
    if not shown:
        return 0.75 if matches else 0.0
    if matches:
        return 1.0 if shown[-1].holds else 0.25
    if not shown[-1].holds:
        return 0.0
    question = [abs(number.value) for number in numbers_in(trajectory.task.text)]
    inputs = [*question, *(abs(v) for v in past_values), *_EVERYDAY]
    return 0.5 if all(_among(operand, inputs) for operand in shown[-1].operands) else 0.25


@reward(agent_match="^verifier$")
def verdict_right(step: Step, trajectory: Trajectory) -> float:
    """Give 0.6 for the right verdict on the executor's step, and 0.4 for the right value.

    `ok` is right if `value_matches` gives the step 0.5 or more. The right value is then the executor's own; else the
    true result of its calculation, or any value of the solution still to be found.

    Range: [0, 1]. Raises ValueError without an earlier executor's step.
    """
    judged = [s for s in trajectory.steps[: step.index] if s.agent == "executor"]
    if not judged:
        raise ValueError("expected an executor's step before the verifier's, found none")
    candidate = judged[-1]
    right = value_matches(candidate, trajectory) >= 0.5
    candidate_value, shown = value_in(candidate.response), calculations_in(candidate.response)
    if right and candidate_value is not None:
        values = [candidate_value]
    else:
        values, _ = _open_values(candidate, trajectory)
        values += [c.computed for c in shown[-1:] if c.computed is not None]
    value = value_in(step.response)
    return 0.6 * (said(step.response) == ("ok" if right else "bad")) + 0.4 * (
        value is not None and _among(value, values)
    )


def candidate_kind(step: Step) -> str | None:
    """Stratum of a verifier's step: whether the calculation in its prompt is correct.

    Without it, a verifier that always answers `ok` scores well while most calculations are right.
    """
    if step.agent != "verifier":
        return None
    shown = calculations_in(str(step.info.get("candidate", "")))
    return "none" if not shown else "holds" if shown[-1].holds else "wrong"
