"""`creditflow eval`: evaluate a model on a recipe's validation tasks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from creditflow.cli._options import JsonFile, Overrides, Recipe
from creditflow.errors import InputError

if TYPE_CHECKING:
    from creditflow._utils.progress import Reporter
    from creditflow.engines.common.components import Components
    from creditflow.engines.local.policy_set import PolicySet
    from creditflow.monitoring import Evaluation


def eval(recipe: Recipe, overrides: Overrides = None, json: JsonFile = None) -> None:
    """Evaluate a model on a recipe's validation tasks.

    The model is the recipe's; actor_rollout_ref.model.path=FOLDER evaluates another one, such as a checkpoint.
    """
    from creditflow._utils.files import make_folder
    from creditflow._utils.progress import Reporter
    from creditflow.config import load_recipe
    from creditflow.engines.common.components import build_components
    from creditflow.engines.local.policy_set import PolicySet
    from creditflow.reports.tables import evaluation_table, results_console, show
    from creditflow.runs import RunFolder

    loaded = load_recipe(recipe, overrides or [])
    components = build_components(loaded, training=False)
    policy_set = PolicySet.for_rollouts(loaded)
    if json is not None:
        if json.is_dir():
            raise InputError(f"--json: {json} is a folder")
        make_folder(json.parent, "--json")  # fails before the evaluation if the folder is not writable
    evaluation = asyncio.run(_evaluate(components, policy_set, Reporter()))
    if json is not None:
        RunFolder(json.parent).write_text(json.name, evaluation.to_json())
    sampling = loaded.config.actor_rollout_ref.rollout.val_kwargs
    n = sampling.n if sampling.do_sample else 1  # greedy rollouts of a task are identical, so one is enough
    rollouts = "1 rollout" if n == 1 else f"{n} rollouts"
    title = f"{loaded.name}, {loaded.validation_words(len(evaluation.sampled))}, {rollouts} of each"
    show(results_console(), title, evaluation_table(evaluation))


async def _evaluate(components: Components, policy_set: PolicySet, reporter: Reporter) -> Evaluation:
    from creditflow.engines.local.trainer import validate
    from creditflow.monitoring.notices import failure_text

    async with components.rewards.open(policy_set.policies):
        evaluation = await validate(components, policy_set, reporter, "evaluation")
    for function in components.rewards.take_report().functions:
        if function.failed:
            reporter.say(f"warning: {failure_text(function)}")
    return evaluation
