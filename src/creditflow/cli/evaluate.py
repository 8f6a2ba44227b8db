"""`creditflow eval`: evaluate a model on a recipe's validation tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from creditflow._utils.files import make_folder
from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.engines.common.components import Components, build_components
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.trainer import validate
from creditflow.errors import InputError
from creditflow.monitoring import Evaluation
from creditflow.monitoring.notices import failure_text
from creditflow.reports.tables import evaluation_table, results_console, show
from creditflow.runs import RunFolder


def evaluate(path: Path, overrides: Sequence[str], json_file: Path | None, reporter: Reporter) -> None:
    """Print the evaluation of the recipe's model, and write it to `json_file` if given."""
    recipe = load_recipe(path, overrides)
    components = build_components(recipe, training=False)
    policy_set = PolicySet.for_rollouts(recipe)
    if json_file is not None:
        if json_file.is_dir():
            raise InputError(f"--json: {json_file} is a folder")
        make_folder(json_file.parent, "--json")  # fails before the evaluation if the folder is not writable
    evaluation = asyncio.run(_evaluate(components, policy_set, reporter))
    if json_file is not None:
        RunFolder(json_file.parent).write_text(json_file.name, evaluation.to_json())
    kwargs = recipe.config.actor_rollout_ref.rollout.val_kwargs
    n = kwargs.n if kwargs.do_sample else 1  # greedy rollouts of a task are identical, so one is enough
    rollouts = "1 rollout" if n == 1 else f"{n} rollouts"
    title = f"{recipe.name}, {recipe.validation_words(len(evaluation.sampled))}, {rollouts} of each"
    show(results_console(), title, evaluation_table(evaluation))


async def _evaluate(components: Components, policy_set: PolicySet, reporter: Reporter) -> Evaluation:
    async with components.rewards.open(policy_set.policies):
        evaluation = await validate(components, policy_set, reporter, "evaluation")
    for function in components.rewards.take_report().functions:
        if function.failed:
            reporter.say(f"warning: {failure_text(function)}")
    return evaluation
