"""Families of reasoning-gym that a small model can learn from: `python -m benchmarks.families [--quick] [--only TEXT]`.

SmolLM2-135M-Instruct answers 24 problems of each family four times at temperature 1, after three other problems with
their answers. A family is at the lowest level of its curriculum; one without a curriculum has its default options. A
group of rollouts teaches something if some are right and some are wrong, so a family with pass@1 between 10 and 70 % is
a good start.

Finished families are kept in `runs/families/`. Writes `docs/results/families.json` and the table of the page. About
forty minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import MISSED, ROOT, Figure, exit_with, fill_page, write
from benchmarks.sources import TRAINING, Work
from creditflow._utils.files import write_whole
from creditflow.config import load_recipe
from creditflow.data import Message, Task
from creditflow.data.gym_tasks import gym_tasks
from creditflow.engines.common.components import build_components
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.rollouts import sample_trajectories, score
from creditflow.errors import CreditflowError, DataError, first_line
from creditflow.rollout import Team

MEASURES = (*TRAINING, "src/creditflow/data/gym_tasks.py", "benchmarks/families.yaml")
PAGE, COMMAND = ROOT / "docs" / "how_to" / "own_data.md", "python -m benchmarks.families"
RECIPE = Path(__file__).with_suffix(".yaml")
PROBLEMS, SAMPLES, SHOWN = 24, 4, 3
LOW, HIGH = 0.10, 0.70
"""pass@1 of families to begin with."""
LEFT_OUT = ("codeio", "composite", "sokoban")
"""A family whose programs write files into the working directory, one made of others, and one whose generator does not
end at its lowest level."""
_KEY = "data.val_files"


async def solve(task: Task, team: Team) -> str:
    """One response, after solved problems of the same family and level."""
    turns: list[Message] = []
    for shown in _examples(task.extra_info["family"], task.extra_info["level"]):
        turns += [*shown.prompt, {"role": "assistant", "content": str(shown.ground_truth)}]
    return str((await team.solver([*turns, *task.prompt])).text)


@cache
def _examples(family: str, level: str | None) -> list[Task]:
    """Problems of the training split that have an answer to show."""
    address = _address(family, level, SHOWN)
    return [task for task in gym_tasks([address], _KEY, "train") if task.ground_truth]


def _address(family: str, level: str | None, size: int) -> str:
    return f"reasoning-gym://{family}?size={size}" + ("" if level is None else f"&level={level}")


def measured(family: str, level: str | None, problems: int) -> dict[str, Any]:
    """pass@1 of a family; or, if it cannot be measured, the reason."""
    began = time.monotonic()
    found: dict[str, Any] = {"family": family, "level": level}
    try:
        if len(_examples(family, level)) < SHOWN:
            return found | {"reason": "no unique answers to show"}
        recipe = load_recipe(RECIPE, [f"{_KEY}={_address(family, level, problems)}"])
        components = build_components(recipe, training=False)
        trajectories = asyncio.run(_sampled(components))
    except CreditflowError as error:
        return found | {"reason": first_line(error).removeprefix(f"{_KEY}: ")}
    if any(one.status == "failed" for one in trajectories):
        return found | {"reason": next(one.info["error"] for one in trajectories if one.status == "failed")}
    if too_long := sum(not one.steps for one in trajectories):
        return found | {"reason": f"{too_long} of {len(trajectories)} prompts have more than 1,024 tokens"}
    passed = np.array([one.outcome.value for one in trajectories]).reshape(-1, SAMPLES)
    return found | {
        "pass_at_1": float(passed.mean()),
        "standard_error": float(passed.mean(1).std(ddof=1) / len(passed) ** 0.5),
        "mixed": float(((passed.max(1) > 0) & (passed.min(1) < 1)).mean()),
        "prompt_tokens": float(np.mean([len(one.steps[0].prompt_ids) for one in trajectories])),
        "cut_off": float(np.mean([one.status == "truncated" for one in trajectories])),
        "seconds": round(time.monotonic() - began, 1),
    }


async def _sampled(components: Any) -> list[Any]:
    policies = _policies()
    trajectories = await sample_trajectories(components, policies, components.val_tasks, SAMPLES, 1.0, (0,))
    async with components.rewards.open(policies.policies):
        await score(components, trajectories)
    return trajectories


@cache
def _policies() -> PolicySet:
    return PolicySet.for_rollouts(load_recipe(RECIPE))


def level_of(family: str) -> str | None:
    """The lowest level of a family's curriculum; None without a curriculum, or if it makes no problems there."""
    try:
        gym_tasks([_address(family, "0", 1)], _KEY, "val")
    except DataError:
        return None
    return "0"


def _kept(family: str, folder: Path, problems: int) -> dict[str, Any]:
    file = folder / f"{family}.json"
    if not file.exists():
        found = measured(family, level_of(family), problems)
        write_whole(file, lambda part: part.write_text(json.dumps(found) + "\n"))
        print(family, found.get("reason", f"{100 * found.get('pass_at_1', 0):.0f} %"), flush=True)
    known: dict[str, Any] = json.loads(file.read_text())
    return known


def table_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The families between the bounds as a table, and the others by name."""
    rated = sorted((one for one in found if "pass_at_1" in one), key=lambda one: (-one["pass_at_1"], one["family"]))
    good = [one for one in rated if LOW <= one["pass_at_1"] <= HIGH]
    made = ["| family | pass@1 | mixed groups | prompt tokens |", "| --- | --- | --- | --- |"]
    for one in good:
        name = f"`{one['family']}`" + ("" if one["level"] is None else ", level 0")
        rate = f"{100 * one['pass_at_1']:.0f} ± {100 * one['standard_error']:.0f} %"
        made.append(f"| {name} | {rate} | {100 * one['mixed']:.0f} % | {one['prompt_tokens']:.0f} |")
    rest = {
        f"Above {100 * HIGH:.0f} %": [one["family"] for one in rated if one["pass_at_1"] > HIGH],
        f"Below {100 * LOW:.0f} %, but not 0": [one["family"] for one in rated if 0 < one["pass_at_1"] < LOW],
        "Never right": [one["family"] for one in rated if one["pass_at_1"] == 0],
        "Not measured, because there are too few problems, prompts are too long or problems have no unique answer": [
            one["family"] for one in found if "pass_at_1" not in one
        ],
    }
    return [*made, "", *(f"* {title}: {', '.join(sorted(names))}." for title, names in rest.items() if names)]


def main() -> int:
    """Measure the missing families; write the result file and the page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two problems of two families; writes nothing")
    parser.add_argument("--only", default="", help="only families whose name contains this; writes nothing")
    given = parser.parse_args()
    from reasoning_gym import factory

    families = [name for name in sorted(factory.DATASETS) if given.only in name and name not in LEFT_OUT]
    if given.quick:
        families = ["chain_sum", "coin_flip"]
    work = Work.begin("families", MEASURES, quick=given.quick)
    problems = 2 if given.quick else PROBLEMS
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as two_at_a_time:
        found = list(
            two_at_a_time.map(_kept, families, [work.folder] * len(families), [problems] * len(families), timeout=None)
        )
    lines = table_lines(found)
    print(*lines, sep="\n")
    if not (given.quick or given.only):
        good = sum(LOW <= one.get("pass_at_1", 0.0) <= HIGH for one in found)
        figures = [Figure("families with pass@1 between 10 and 70 %", good, unit="families")]
        write("families", figures, ("creditflow", "torch", "reasoning_gym"), work.measured, {"families": found})
        fill_page(PAGE, COMMAND, lines)
    print(f"{MISSED}: 0 of 0")
    return 0


if __name__ == "__main__":
    exit_with(main)
