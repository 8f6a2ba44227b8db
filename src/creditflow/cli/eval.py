"""`creditflow eval`: evaluate a model on a recipe's validation tasks."""

from __future__ import annotations

from creditflow._utils.files import write_named
from creditflow._utils.progress import Reporter
from creditflow.cli._options import EngineName, JsonFile, Overrides, Recipe, make_json_folder
from creditflow.monitoring.notices import failure_text
from creditflow.reports.tables import evaluation_table, show
from creditflow.reports.text import counted


def eval(recipe: Recipe, overrides: Overrides = None, json: JsonFile = None, engine: EngineName = "local") -> None:
    """Evaluate a model on a recipe's validation tasks.

    The model is the recipe's; actor_rollout_ref.model.path=FOLDER evaluates another one, such as a checkpoint.

    Example: creditflow eval my_team/recipe.yaml data.val_files=other.jsonl
    """
    from creditflow.config import load_recipe

    reporter = Reporter()
    loaded = load_recipe(recipe, overrides or [])
    with reporter.bar(f"loading {loaded.name}", announce=True, keep=False):
        from creditflow.engines.base import find_engine, sampling_engine
        from creditflow.engines.common.components import build_components

        chosen = sampling_engine(find_engine(engine))
        components = build_components(loaded, training=False)
    make_json_folder(json)  # fails before the evaluation
    with reporter.bar("evaluation", keep=False):
        evaluation = chosen.evaluate(components, reporter)
    for function in components.rewards.take_report().functions:
        if function.failed:
            reporter.say(f"warning: {failure_text(function)}")
    sampling = loaded.config.actor_rollout_ref.rollout.val_kwargs
    n = sampling.n if sampling.do_sample else 1  # greedy rollouts of a task are identical, so one is enough
    title = f"{loaded.name}, {loaded.validation_words(len(evaluation.sampled))}, {counted(n, 'rollout')} of each"
    show(title, evaluation_table(evaluation))
    if json is not None:
        write_named(json, lambda file: file.write_text(evaluation.to_json()), "--json")
