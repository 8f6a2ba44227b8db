"""Coder, tester and reviewer on small functions: their workflow and their sub-rewards.

Each task has tests, a reference and a few wrong variants (mutants), all hidden from the agents. Everything that agents
write is untrusted: it is clipped, checks are accepted only if they consist of literals, and every program runs in the
sandbox that `reward.sandbox` names.
"""

from __future__ import annotations

import ast
import asyncio
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from creditflow.data import Score, Step, Task, Trajectory
from creditflow.data.datasets import load_tasks
from creditflow.rewards import reward
from creditflow.rewards.builtin.code import code_in, open_box, run_tests, sandbox_options
from creditflow.rewards.support.test_cases import Case, CaseCall, read_tests, shown
from creditflow.rollout import Reply, Team
from creditflow.sandbox import Sandbox

MAX_REWRITES = 1
MAX_CHECKS = 8
"""Maximum checks of a tester; each takes a run of the reference and, if it is right, of the mutants."""
CHECK_CHARACTERS = 200
READ_CHARACTERS, CODE_CHARACTERS, REASON_CHARACTERS = 4_000, 2_000, 400
SECONDS = 2.0
"""Limit of each run for the sub-rewards: these programs take milliseconds."""
HELD_OUT = 5
"""Every fifth task is for validation."""

# The tasks


def tasks(split: str, recipe: Mapping[str, Any]) -> list[Task]:
    """The tasks of a split: 32 for training, 8 for validation."""
    file = Path(__file__).with_name("code_tasks.jsonl")
    every = load_tasks(str(file), file.parent, recipe, "train")
    return [task for i, task in enumerate(every) if (i % HELD_OUT == HELD_OUT - 1) == (split == "val")]


# The workflow


async def solve(task: Task, team: Team) -> str:
    """Run the team on one task. The answer is the last code, whatever the reviewer's verdict."""
    code: Reply
    tests: Reply
    code, tests = await asyncio.gather(
        team.coder(f"{task.text}\n\nWrite this function in a ```python block.", parents=[]),
        team.tester(
            f"{task.text}\n\nWrite up to {MAX_CHECKS} tests of this function, one a line, each with a result that you "
            f"worked out: assert {name_of(task)}(...) == ...",
            parents=[],
        ),
    )
    listed = "\n".join(check_lines(tests.text)) or "none"
    for _ in range(MAX_REWRITES):
        program = code_in(code.text, {name_of(task)})[:CODE_CHARACTERS]
        verdict: Reply = await team.reviewer(
            f"{task.text}\n\nThe code:\n{program}\n\nThe tests:\n{listed}\n\n"
            f"First name the input that is most likely to break it, with its right result: assert {name_of(task)}(...) "
            "== ...\nThen end with a line that says accept, or reject: why.",
            parents=[code, tests],
            info={"defines": defines(program, name_of(task))},
        )
        if said(verdict.text) != "reject":
            break
        code = await team.coder(
            f"{task.text}\n\nYou wrote:\n{program}\n\nThe reviewer rejects it:\n{verdict.text[-REASON_CHARACTERS:]}\n\n"
            "Write the function again in a ```python block.",
            parents=[code, verdict],
        )
    team.answer_from(code)
    return code.text


def name_of(task: Task) -> str:
    """The name of the function in the task."""
    return str(task.extra_info["name"])


def check_lines(text: str) -> list[str]:
    """The lines of a reply that begin with `assert`, clipped in number and length."""
    lines = (line.strip().strip("`").strip() for line in text[:READ_CHARACTERS].splitlines())
    return [line[:CHECK_CHARACTERS] for line in lines if line.startswith("assert ")][:MAX_CHECKS]


def said(text: str) -> str | None:
    """The reviewer's verdict: `accept` or `reject`, from the last line that starts with either; None without one."""
    words = re.findall(r"(?m)^\W{0,8}(accept|reject)", text[-READ_CHARACTERS:].lower())
    return str(words[-1]) if words else None


def defines(code: str, name: str) -> bool:
    """Whether the code defines a function of this name at its outermost level."""
    return re.search(rf"(?m)^def {re.escape(name)}[ ]?\(", code) is not None


# Checks: the tester's and the reviewer's claims about the function


def check_in(line: str, name: str) -> Case | None:
    """Parse the check in a line; None without a valid check.

    A valid check calls the function with literals and compares the result with a literal: then it makes a claim about
    the function that can be right or wrong. `assert True`, or `assert f(1) == f(1)`, would be right about any.
    """
    try:
        (statement,) = ast.parse(line).body
        if not isinstance(statement, ast.Assert) or not isinstance(statement.test, ast.Compare):
            return None
        compared = statement.test
        if len(compared.ops) != 1 or not isinstance(compared.ops[0], ast.Eq | ast.Is):
            return None
        expected = ast.literal_eval(compared.comparators[0])
        call = compared.left
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != name:
            return None
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            ast.literal_eval(argument)
        same = operator.eq if isinstance(compared.ops[0], ast.Eq) else operator.is_
        return CaseCall({"call": ast.unparse(call)}, (expected,), same)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def checks_in(text: str, name: str) -> list[Case | None]:
    """The distinct checks of a reply; None for a line that begins with `assert` and holds no valid check."""
    return [check_in(line, name) for line in dict.fromkeys(check_lines(text))]


# The sub-rewards


def _box(sandbox: Mapping[str, Any] | None) -> Sandbox:
    return open_box(sandbox_options(sandbox, SECONDS))


def _passes(box: Sandbox, code: str, tests: Sequence[Case]) -> bool:
    """Whether the code passes all of the tests; stops at the first failure."""
    return all(run_tests(box, code, [test])[0].passed for test in tests)


@reward(agent_match="^tester$")
def checks_bite(step: Step, trajectory: Trajectory, sandbox: Mapping[str, Any] | None = None) -> Score:
    """Score the share of right checks among the tester's, and the share of mutants that the right ones detect.

    Right: the reference passes. Value: right / written * (0.5 + 0.5 * detected / mutants); 0 without a written check. A
    line with `assert` and without a valid check (see `check_in`) counts as written and not right; lines beyond 8, and
    text beyond 4,000 characters, are not read; a repeated check counts once.

    Range: [0, 1]. Cost: a run in the sandbox for each check, and for each pair of a right check and a mutant until one
    detects it: at most 8 + 8 * 3, 0.8 s. Raises SandboxError.
    """
    checks = checks_in(step.response, name_of(trajectory.task))
    if not checks:
        return Score(0.0, reason="no line with assert")
    box, info = _box(sandbox), trajectory.task.extra_info
    written = [check for check in checks if check is not None]
    verdicts = run_tests(box, info["reference"], written)
    right = [check for check, verdict in zip(written, verdicts, strict=True) if verdict.passed]
    found_out = sum(not _passes(box, mutant, right) for mutant in info["mutants"]) if right else 0
    share = found_out / len(info["mutants"])
    value = len(right) / len(checks) * (0.5 + 0.5 * share)
    return Score(
        value, reason=f"right {len(right)}/{len(checks)}, mutants found out {found_out}/{len(info['mutants'])}"
    )


@reward(agent_match="^reviewer$")
def review_right(step: Step, trajectory: Trajectory, sandbox: Mapping[str, Any] | None = None) -> Score:
    """Give 0.6 for the right verdict on the code, and 0.4 for an input that matters.

    `accept` is right if the code passes all tests of the task. The input is the first check in the reply, `assert
    f(...) == ...`: 0.4 if its result is right (the reference passes it) and, if the code is wrong, the code fails it;
    0.2 if the result is right, but the code, wrong elsewhere, passes it too; else 0.

    Range: [0, 1]. Cost: a run in the sandbox for each test of the task, up to the first failure, and two more.
    Raises ValueError without an earlier coder's step, SandboxError.
    """
    judged = [s for s in trajectory.steps[: step.index] if s.agent == "coder"]
    if not judged:
        raise ValueError("expected a coder's step before the reviewer's, found none")
    box, task = _box(sandbox), trajectory.task
    code = code_in(judged[-1].response, {name_of(task)})
    is_right = _passes(box, code, read_tests(task.ground_truth))
    verdict = said(step.response)
    value = 0.6 * (verdict == ("accept" if is_right else "reject"))
    named = next((check for check in checks_in(step.response, name_of(task)) if check is not None), None)
    what = "no input"
    if named is not None:
        holds = _passes(box, task.extra_info["reference"], [named])
        tells = holds and (is_right or not _passes(box, code, [named]))
        value += 0.4 if tells else 0.2 if holds else 0.0
        what = "a telling input" if tells else "an input with its right result" if holds else "a wrong result"
    return Score(value, reason=f"the code is {'right' if is_right else 'wrong'}; said {shown(verdict)}, named {what}")


def code_kind(step: Step) -> str | None:
    """Stratum of a reviewer's step: whether the code in its prompt defines the function at all.

    Without it, a reviewer that rejects everything scores well while most replies hold no such function.
    """
    if step.agent != "reviewer":
        return None
    return "defined" if step.info.get("defines") else "missing"
