"""`creditflow compare`: train variants of a recipe with the same seeds, and estimate their differences."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from creditflow._utils.files import alone_in, make_folder, write_whole
from creditflow._utils.progress import Reporter
from creditflow.cli._options import EngineName, Overrides, Recipe, number_option
from creditflow.errors import ConfigError, CreditflowError, InputError
from creditflow.monitoring.evaluation import Evaluation
from creditflow.reports.tables import (
    comparison_table,
    comparison_title,
    difference_table,
    difference_title,
    example_lines,
    results_console,
    show,
)
from creditflow.reports.text import counted
from creditflow.runs import RunFolder
from creditflow.studies.comparison.jobs import Job, run_jobs
from creditflow.studies.comparison.results import ArmResult, RunResult, differences, summary

if TYPE_CHECKING:
    from creditflow.config import Recipe as LoadedRecipe
    from creditflow.engines.base import Engine
    from creditflow.studies.comparison.arms import Arm

_SAMPLER = ("actor_rollout_ref.model", "actor_rollout_ref.rollout", "trainer.device", "trainer.precision")
_EVALUATED = ("data", "policies", "team", "reward", "recipe", *_SAMPLER)
"""Config keys that an evaluation before training depends on; arms that agree on them share one."""
_UNCOMPARED = ("compare", "trainer.default_local_dir")
"""Config keys that may differ between an existing run and the requested one."""
_OWN = ("data.seed", "trainer.default_local_dir", "trainer.val_before_train")
"""Config keys that `compare` sets for every run."""


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One arm with one seed."""

    arm: Arm
    seed: int
    recipe: LoadedRecipe
    settings: tuple[str, ...]
    """The overrides that produce `recipe`."""
    folder: Path
    before: Path
    """File of the evaluation before training."""
    steps: int
    tasks: Mapping[str, str]
    """Number and hash of the tasks, by option."""

    @property
    def name(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        return (self.folder / "evaluation.json").exists()

    def steps_done(self) -> int:
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def compare(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    engine: EngineName = "local",
    vary: Annotated[str, typer.Option(metavar="KEY=A,B,C", help="The option to vary, and its values.")],
    seeds: Annotated[int, number_option("--seeds", "Runs per arm; their seeds count up from data.seed.", 1)] = 1,
    jobs: Annotated[
        int | None, number_option("--jobs", "Runs in parallel; default: one per core, or one on a GPU.", 1)
    ] = None,
    arms: Annotated[bool, typer.Option(help="Also run the arms in the recipe's compare.arms.")] = True,
    only: Annotated[str | None, typer.Option(metavar="A,B", help="Run only these arms; default: all.")] = None,
) -> None:
    """Train variants of a recipe on the same seeds, and compare them.

    Prints the differences, with confidence intervals from five seeds on. compare.values.VALUE in the recipe sets
    further options for a value. Results go to trainer.default_local_dir, which keeps the finished runs of the same
    comparison.

    Example: creditflow compare sums_team --vary algorithm.preset=dr_mas,magrpo
    """
    from creditflow.config import load_recipe, with_effect

    reporter, settings = Reporter(), overrides or []
    with reporter.bar(f"loading {recipe.stem}", announce=True, keep=False):
        from creditflow.engines.base import find_engine
        from creditflow.engines.common.run import run_path
        from creditflow.studies.comparison.arms import arms_of, parse_vary, split_values, without_entry

        chosen = find_engine(engine)
    key, values = parse_vary(vary)
    if any(override.partition("=")[0] == key for override in settings):
        raise ConfigError(f"{key}: is varied by --vary; it cannot be set as well")
    loaded = load_recipe(recipe, with_effect(recipe, (), settings))
    compared = arms_of(loaded, key, values, extra=arms, only=() if only is None else split_values(only))
    effective = {override for arm in compared for override in with_effect(recipe, arm.overrides, settings)}
    if not effective.issuperset(settings):  # every arm ignores one: the loader raises with the reason
        load_recipe(recipe, (*compared[0].overrides, *settings))
    folder = run_path(loaded)
    if (folder / "run.json").exists():
        another = f"name another folder, such as trainer.default_local_dir={folder}_compared"
        raise InputError(f"trainer.default_local_dir: {folder} holds a run already; {another}")
    with reporter.bar("loading the arms", keep=False):
        runs = _plan(recipe, settings, loaded, key, compared, seeds, folder, chosen, reporter)

    make_folder(folder, "trainer.default_local_dir")
    # Two comparisons at once would mistake each other's live runs for interrupted ones.
    taken = InputError(f"trainer.default_local_dir: another comparison is running in {folder}")
    with alone_in(folder, taken):
        waiting = [run for run in runs if not _is_finished(run, chosen.name)]
        reporter.say(f"comparison folder: {folder}")
        for arm in compared:
            reporter.say(f"  {arm.name}: {' '.join(arm.overrides)}")
        names = [arm.name for arm in compared]
        if missing := [value for value in without_entry(loaded, values) if value in names]:
            reporter.say(f"compare.values has no entry for {', '.join(missing)}: trained with the recipe's options")
        if len(waiting) < len(runs):
            reporter.say(f"{len(runs) - len(waiting)} of {len(runs)} runs are finished already, and not repeated")
        _run(recipe, runs, waiting, jobs or chosen.concurrent_runs(loaded), reporter, engine)
        _print(f"{loaded.name}: {key}", key, compared, runs, seeds, folder)


def _print(name: str, key: str, arms: Sequence[Arm], runs: Sequence[ArmRun], seeds: int, folder: Path) -> None:
    """Print the tables and an example; write `comparison.json` and the figure."""
    from creditflow.reports.comparison_plot import draw_comparison

    results = [_result(arm, [run for run in runs if run.arm == arm]) for arm in arms]
    pairs = differences(results)
    console = results_console()
    tasks = counted(len(results[0].runs[0].after.sampled), "task")
    title = comparison_title(name, {run.steps for run in runs})
    show(f"{title}, on {tasks}, {counted(seeds, 'seed')}", comparison_table(results))
    if pairs:
        show(difference_title(seeds), difference_table(pairs))
    for line in example_lines(results):
        console.print(line, soft_wrap=True)
    output = RunFolder(folder)
    output.write_text("comparison.json", json.dumps(summary(key, results, pairs), indent=2) + "\n")
    console.print(f"numbers: {folder / 'comparison.json'}", soft_wrap=True)
    figure = folder / "comparison.png"
    write_whole(figure, lambda file: draw_comparison(file, f"{title}, {counted(seeds, 'seed')}", results))
    console.print(f"plots: {figure}", soft_wrap=True)


def _plan(
    path: Path,
    overrides: Sequence[str],
    recipe: LoadedRecipe,
    key: str,
    arms: Sequence[Arm],
    seeds: int,
    folder: Path,
    engine: Engine,
    reporter: Reporter,
) -> list[ArmRun]:
    """List every run, seeds in the outer loop, so that an interrupted comparison stays balanced.

    Loads every file and model that an arm names. Bad input therefore raises before anything is written, and a model
    that is created on first use is created once instead of in every run.
    """
    from creditflow.config import leaves, load_recipe, with_effect
    from creditflow.engines.common.components import build_components
    from creditflow.engines.common.guard import build_guard
    from creditflow.engines.common.run import data_facts
    from creditflow.studies.comparison.arms import as_yaml

    kept = [override for override in overrides if override.partition("=")[0] not in _OWN]
    steps: dict[str, int] = {}
    evaluated_on: dict[int, str] = {}
    """Number and hash of the validation tasks by seed, the same for all arms."""
    models: set[Path] = set()
    runs: list[ArmRun] = []
    for seed in range(recipe.config.data.seed, recipe.config.data.seed + seeds):
        for arm in arms:
            target = folder / arm.folder / f"seed{seed}"
            settings = (
                *arm.overrides,
                *with_effect(path, arm.overrides, kept),
                f"data.seed={seed}",
                f"trainer.default_local_dir={as_yaml(str(target))}",
                "trainer.val_before_train=false",  # evaluated once for all arms
            )
            resolved = load_recipe(path, settings)
            components = build_components(resolved)
            tasks: Any = data_facts(components, 0)["tasks"]
            if evaluated_on.setdefault(seed, tasks["data.val_files"]) != tasks["data.val_files"]:
                raise ConfigError(
                    f"compare: {arm.name} and {arms[0].name} are evaluated on different tasks, so that they cannot "
                    "be compared task by task"
                )
            if arm.name not in steps:
                _check_arm(path, arm, key, settings, resolved)
                engine.expect_trainable(resolved, reporter)
                # Raises the errors of the guard before anything is written.
                build_guard(resolved.config, resolved.folder, components.rewards.functions, engine.name)
                steps[arm.name] = engine.total_steps(components)
                if not steps[arm.name]:
                    raise ConfigError("trainer.total_training_steps: 0 steps would leave nothing to compare")
                engine.prepare(resolved, models)
            options = {key: value for key, value in leaves(resolved.to_dict()) if key.startswith(_EVALUATED)}
            evaluated = _fingerprint((options, tasks["data.val_files"]))
            before = folder / "before" / f"seed{seed}-{evaluated[:8]}.json"
            runs.append(ArmRun(arm, seed, resolved, settings, target, before, steps[arm.name], tasks))
    return runs


def _check_arm(path: Path, arm: Arm, key: str, settings: Sequence[str], resolved: LoadedRecipe) -> None:
    """Raise ConfigError if another override would replace one of the arm's."""
    from omegaconf import OmegaConf

    from creditflow.config import leaves, load_recipe

    for name, _ in leaves(OmegaConf.to_container(OmegaConf.from_dotlist(list(arm.overrides)))):
        if name in _OWN:
            raise ConfigError(f"{name}: is set by compare itself, the same for every arm; {arm.name} cannot set it")
    varied = [override for override in arm.overrides if override.partition("=")[0] == key]
    if load_recipe(path, (*settings, *varied)).config != resolved.config:
        raise ConfigError(f"{key}: is varied by --vary; {arm.name} cannot set it as well")


def _is_finished(run: ArmRun, engine: str) -> bool:
    """Whether the run is already finished. Raises InputError if its folder holds anything else."""
    from creditflow.config import leaves
    from creditflow.engines.common.run import read_facts

    facts = run.folder / "run.json"
    if not facts.exists():
        if run.folder.exists() and any(run.folder.iterdir()):
            raise InputError(f"trainer.default_local_dir: {run.folder} holds files that are not of a run")
        return False
    began = read_facts(run.folder, engine) or {}
    existing = dict(leaves({**began["config"], "tasks": began.get("tasks", run.tasks)}))
    expected = dict(leaves({**json.loads(json.dumps(run.recipe.to_dict())), "tasks": dict(run.tasks)}))
    for key in sorted(existing.keys() | expected.keys()):
        if existing.get(key) != expected.get(key) and not key.startswith(_UNCOMPARED):
            raise InputError(
                f"trainer.default_local_dir: {run.folder} holds a run with {key}={existing.get(key)}, "
                f"expected {expected.get(key)}; name another folder"
            )
    return run.finished


def _run(
    path: Path, runs: Sequence[ArmRun], waiting: Sequence[ArmRun], parallel: int, reporter: Reporter, engine: str
) -> None:
    """Execute the missing evaluations and runs. Raises CreditflowError if any of them fails.

    `train` resumes an interrupted run from its newest checkpoint.
    """
    from creditflow.engines.common.checkpoints import saved_steps

    creditflow, jobs = (sys.executable, "-m", "creditflow"), list[Job]()
    evaluated = {run.before for run in runs if run.before.exists()}
    for run in runs:
        if run.before not in evaluated:
            evaluated.add(run.before)
            command = (*creditflow, "eval", str(path), *run.settings, "--engine", engine, "--json", str(run.before))
            log = run.before.with_suffix(".log")
            jobs.append(Job(f"before training, seed {run.seed}", command, log, 0, lambda: 0))
        if run in waiting:
            if (run.folder / "run.json").exists():
                newest = next(iter(saved_steps(run.folder)), 0)
                again = f"goes on after step {newest}" if newest else "starts again"
                reporter.say(f"{run.name}: was interrupted, {again}")
            command = (*creditflow, "train", str(path), *run.settings, "--engine", engine)
            jobs.append(Job(run.name, command, run.folder.with_suffix(".log"), run.steps, run.steps_done))
    if not jobs:
        return
    failures = run_jobs(jobs, parallel, reporter, "compare")
    if failures:
        raise CreditflowError(
            f"{len(failures)} of {counted(len(jobs), 'run')} failed: {'; '.join(job.name for job in failures)}. "
            "The others are kept; to continue, repeat the command with "
            f"trainer.default_local_dir={runs[0].folder.parent.parent}"
        )


def _result(arm: Arm, runs: Sequence[ArmRun]) -> ArmResult:
    before = [Evaluation.from_json(run.before.read_text(), str(run.before)) for run in runs]
    return ArmResult(arm.name, before, [RunResult.read(run.folder) for run in runs])


def _fingerprint(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()
