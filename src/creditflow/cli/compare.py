"""`creditflow compare`: train variants of a recipe with the same seeds, and estimate their differences."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from creditflow._utils.files import alone_in, make_folder, write_whole
from creditflow._utils.progress import Reporter
from creditflow.config import Recipe, load_recipe, trained_policies, with_effect
from creditflow.engines.common.components import Components, build_components
from creditflow.engines.local.policy import Policy, pick_device
from creditflow.engines.local.policy_set import model_folder
from creditflow.engines.local.rollouts import total_steps
from creditflow.engines.local.run import run_path
from creditflow.errors import ConfigError, CreditflowError, InputError
from creditflow.monitoring import Evaluation
from creditflow.reports.comparison import ArmResult, RunResult, differences, summary
from creditflow.reports.comparison_plot import draw_comparison
from creditflow.reports.tables import (
    comparison_table,
    comparison_title,
    difference_table,
    difference_title,
    results_console,
    show,
)
from creditflow.runs import RunFolder
from creditflow.studies.comparison.arms import Arm, arms_of, as_yaml, parse_vary, without_entry
from creditflow.studies.comparison.jobs import Job, run_jobs

_EVALUATED = ("data", "actor_rollout_ref.model", "actor_rollout_ref.rollout", "policies", "team", "reward", "recipe")
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
    recipe: Recipe
    settings: tuple[str, ...]
    """The overrides that produce `recipe`."""
    folder: Path
    before: Path
    """File of the evaluation before training."""
    steps: int

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
    path: Path,
    overrides: Sequence[str],
    *,
    vary: str,
    seeds: int,
    jobs: int | None,
    extra: bool,
    only: Sequence[str],
    reporter: Reporter,
) -> None:
    """Train every arm with every seed, print the results, and write `comparison.json` and the figure."""
    if seeds < 1 or (jobs is not None and jobs < 1):
        raise ConfigError(f"{'--seeds' if seeds < 1 else '--jobs'}: expected 1 or more")
    key, values = parse_vary(vary)
    if any(override.partition("=")[0] == key for override in overrides):
        raise ConfigError(f"{key}: is what --vary varies; it cannot be set as well")
    recipe = load_recipe(path, with_effect(path, (), overrides))
    arms = arms_of(recipe, key, values, extra=extra, only=only)
    read = {override for arm in arms for override in with_effect(path, arm.overrides, overrides)}
    if not read.issuperset(overrides):  # every arm ignores one: the loader raises with the reason
        load_recipe(path, (*arms[0].overrides, *overrides))
    folder = run_path(recipe)
    runs = _plan(path, overrides, recipe, key, arms, seeds, folder)

    make_folder(folder, "trainer.default_local_dir")
    # Two comparisons at once would mistake each other's live runs for interrupted ones.
    taken = InputError(f"trainer.default_local_dir: another comparison is running in {folder}")
    with alone_in(folder, taken):
        waiting = [run for run in runs if not _found(run)]
        reporter.say(f"comparison folder: {folder}")
        for arm in arms:
            reporter.say(f"  {arm.name}: {' '.join(arm.overrides)}")
        names = [arm.name for arm in arms]
        if missing := [value for value in without_entry(recipe, values) if value in names]:
            reporter.say(f"compare.values has no entry for {', '.join(missing)}: trained as the recipe says")
        if len(waiting) < len(runs):
            reporter.say(f"{len(runs) - len(waiting)} of {len(runs)} runs are there already, and not repeated")
        if not _drawing():
            reporter.say("no figure: matplotlib is missing (the `report` extra)")
        _work(path, runs, waiting, jobs or _default_jobs(recipe), reporter)
        _tell(f"{recipe.name}: {key}", key, arms, runs, seeds, folder)


def _tell(of: str, key: str, arms: Sequence[Arm], runs: Sequence[ArmRun], seeds: int, folder: Path) -> None:
    """Print the tables; write `comparison.json` and the figure."""
    results = [_result(arm, [run for run in runs if run.arm == arm]) for arm in arms]
    found = differences(results)
    console = results_console()
    tasks = len(results[0].runs[0].after.sampled)
    title = comparison_title(of, {run.steps for run in runs})
    show(console, f"{title}, on {tasks} tasks, {_count(seeds, 'seed')}", comparison_table(results))
    if found:
        show(console, difference_title(seeds), difference_table(found))
    output = RunFolder(folder)
    output.write_text("comparison.json", json.dumps(summary(key, results, found), indent=2) + "\n")
    console.print(f"numbers: {folder / 'comparison.json'}", soft_wrap=True)
    if _drawing():
        write_whole(
            folder / "comparison.png", lambda to: draw_comparison(to, f"{title}, {_count(seeds, 'seed')}", results)
        )
        console.print(f"plots: {folder / 'comparison.png'}", soft_wrap=True)


def _drawing() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _plan(
    path: Path, overrides: Sequence[str], recipe: Recipe, key: str, arms: Sequence[Arm], seeds: int, folder: Path
) -> list[ArmRun]:
    """List every run, seeds in the outer loop, so that an interrupted comparison stays balanced.

    Loads every file and model that an arm names. Bad input therefore raises before anything is written, and a model
    that is created on first use is created once instead of in every run.
    """
    kept = [override for override in overrides if override.partition("=")[0] not in _OWN]
    steps: dict[str, int] = {}
    tasks: dict[str, str] = {}
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
            if arm.name not in steps:
                _check_arm(path, arm, key, settings, resolved)
                components = build_components(resolved)
                tasks[arm.name] = _fingerprint_of_tasks(components)
                if tasks[arm.name] != tasks[arms[0].name]:
                    raise ConfigError(
                        f"compare: {arm.name} is evaluated on other tasks than {arms[0].name}, "
                        "so that they cannot be compared task by task"
                    )
                steps[arm.name] = total_steps(len(components.train_tasks), resolved.config)
                if not steps[arm.name]:
                    raise ConfigError("trainer.total_training_steps: 0 steps would leave nothing to compare")
                for name in trained_policies(resolved.config):
                    if (model := model_folder(resolved, name)) not in models:
                        Policy.load(model, pick_device(resolved.config.trainer.device))
                        models.add(model)
            before = folder / "before" / f"seed{seed}-{_fingerprint(resolved)}.json"
            runs.append(ArmRun(arm, seed, resolved, settings, target, before, steps[arm.name]))
    return runs


def _check_arm(path: Path, arm: Arm, key: str, settings: Sequence[str], resolved: Recipe) -> None:
    """Raise ConfigError if another override would replace one of the arm's."""
    from omegaconf import OmegaConf

    for name in _flat(OmegaConf.to_container(OmegaConf.from_dotlist(list(arm.overrides)))):  # type: ignore[arg-type]
        if name in _OWN:
            raise ConfigError(f"{name}: is set by compare itself, the same for every arm; {arm.name} cannot set it")
    varied = [override for override in arm.overrides if override.partition("=")[0] == key]
    if load_recipe(path, (*settings, *varied)).config != resolved.config:
        raise ConfigError(f"{key}: is what --vary varies; it cannot be set as well, and {arm.name} would not have it")


def _found(run: ArmRun) -> bool:
    """Whether the run is already finished. Raises InputError if its folder holds anything else."""
    facts = run.folder / "run.json"
    if not facts.exists():
        if run.folder.exists() and any(run.folder.iterdir()):
            raise InputError(f"trainer.default_local_dir: {run.folder} holds something else than a run")
        return False
    there = _flat(json.loads(facts.read_text())["config"])
    wanted = _flat(json.loads(json.dumps(run.recipe.to_dict())))
    for key in sorted(there.keys() | wanted.keys()):
        if there.get(key) != wanted.get(key) and not key.startswith(_UNCOMPARED):
            raise InputError(
                f"trainer.default_local_dir: {run.folder} holds a run with {key}={there.get(key)}, "
                f"but {wanted.get(key)} is wanted; name another folder"
            )
    return run.finished


def _work(path: Path, runs: Sequence[ArmRun], waiting: Sequence[ArmRun], at_once: int, reporter: Reporter) -> None:
    """Execute the missing evaluations and runs. Raises CreditflowError if any of them fails."""
    jobs: list[Job] = []
    before = {run.before for run in runs if run.before.exists()}
    for run in runs:
        if run.before not in before:
            before.add(run.before)
            jobs.append(_before_job(path, run))
        if run in waiting:
            if run.folder.exists():
                reporter.say(f"{run.name}: was broken off, starts again")
                shutil.rmtree(run.folder)
            jobs.append(_train_job(path, run))
    if not jobs:
        return
    failures = run_jobs(jobs, at_once, reporter, "compare")
    if failures:
        raise CreditflowError(
            f"{len(failures)} of {_count(len(jobs), 'run')} failed: {'; '.join(f.job.name for f in failures)}. "
            f"The others are kept; to go on: the same, with trainer.default_local_dir={runs[0].folder.parent.parent}"
        )


def _train_job(path: Path, run: ArmRun) -> Job:
    command = (sys.executable, "-m", "creditflow", "train", str(path), *run.settings)
    return Job(run.name, command, run.folder.with_suffix(".log"), run.steps, run.steps_done)


def _before_job(path: Path, run: ArmRun) -> Job:
    command = (sys.executable, "-m", "creditflow", "eval", str(path), *run.settings, "--json", str(run.before))
    log = run.before.with_suffix(".log")
    return Job(f"before training, seed {run.seed}", command, log, 1, lambda: 0)


def _result(arm: Arm, runs: Sequence[ArmRun]) -> ArmResult:
    return ArmResult(
        name=arm.name,
        before=[Evaluation.from_json(run.before.read_text(), str(run.before)) for run in runs],
        runs=[RunResult.read(run.folder) for run in runs],
    )


def _fingerprint(recipe: Recipe) -> str:
    config = _flat(recipe.to_dict())
    relevant = {key: value for key, value in config.items() if key.startswith(_EVALUATED)}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=repr).encode()).hexdigest()[:8]


def _fingerprint_of_tasks(components: Components) -> str:
    return hashlib.sha256(json.dumps([asdict(task) for task in components.val_tasks]).encode()).hexdigest()


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _default_jobs(recipe: Recipe) -> int:
    """The number of cores; 1 if runs would share a GPU."""
    if pick_device(recipe.config.trainer.device).type == "cuda":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
