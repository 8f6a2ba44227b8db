"""The entry of the distributed engine: launch a run on verl, show its progress and end it.

Training runs in a Ray actor (`trainer.TaskRunner`), which writes the run's folder. This process watches the folder. No
module of verl is loaded before the engine is used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from omegaconf import DictConfig, OmegaConf

from creditflow._utils.files import write_whole
from creditflow._utils.install import install_command
from creditflow._utils.progress import Bar, Reporter, beside
from creditflow.config import Config, Recipe, model_of, trained_policies, with_options
from creditflow.engines.base import Engine
from creditflow.engines.common import rollouts as common_rollouts
from creditflow.engines.common import run as common_run
from creditflow.engines.common.checkpoints import folder_of, remove_later, saved_steps, step_of
from creditflow.engines.common.components import Components, build_components
from creditflow.engines.common.guard import build_guard, roll_back
from creditflow.engines.common.metrics import evaluation_line, status_line, warn_of_first_step
from creditflow.engines.common.tracked import FolderTrackers
from creditflow.engines.models.folders import critic_folder, is_hub_name, model_folder
from creditflow.engines.verl.checks import validate
from creditflow.engines.verl.configuration import as_yaml, checkpoints, compose
from creditflow.engines.verl.overridden import expect_verl
from creditflow.engines.verl.policies import rollout_devices
from creditflow.engines.verl.recipe import KEY, LATEST, NAME, STATE, TRAINER_PREFIX, read_run_handle, recipe_section
from creditflow.errors import ConfigError, CreditflowError, first_line, says_disk_full
from creditflow.monitoring.guard import GuardAction, GuardEvent
from creditflow.monitoring.trackers.base import MakeReport
from creditflow.monitoring.tracking import expect_installed
from creditflow.rewards.builtin.judge import Judge
from creditflow.rewards.registry import leaves
from creditflow.runs import RunFolder
from creditflow.runs.run_folder import rollbacks

_AGAIN = "run the same command again to go on from the last checkpoint"
_POLL_S, _POLLS_OF_NODES = 0.5, 10
"""The interval at which the run's folder is read, and the number of intervals after which machines are counted."""
_MODEL = "actor_rollout_ref.model.path"
_PACKAGES = ("verl", "ray", "TransferQueue", "torch", "transformers", "numpy")
"""Distributions with a version in `run.json`."""


class VerlEngine(Engine):
    """A run on a Ray cluster. The arguments after `--` are verl's, in Hydra's language."""

    name = NAME
    has_options = True

    def train(
        self, recipe: Recipe, options: Sequence[str], reporter: Reporter, make_report: MakeReport | None = None
    ) -> RunFolder:
        """Train the recipe on verl or resume its run; errors of creditflow in other processes are raised unchanged."""
        expect_installed(recipe.config.trainer.logger)
        with reporter.bar("loading verl, tasks and models", keep=False):
            config = _checked(recipe, options, reporter)
            run = read_run_handle(config)
            components = build_components(run.recipe)
            _expect_rewards(components)
            _expect_machine(config)
            build_guard(run.config, run.recipe.folder, components.rewards.functions, NAME)
            total = total_steps(config, len(components.train_tasks))
            begun = _begun(config, run.run_folder, total)
            if config.trainer.resume_mode == "auto" and (facts := common_run.read_facts(run.run_folder, NAME)):
                now = common_run.data_facts(components, total)
                common_run.expect_unchanged(run.run_folder, facts, components.recipe, now)
            _bring_models(config, run.recipe)
        with (
            common_run.sole_writer(run.run_folder),
            FolderTrackers.start(run.recipe, run.run_folder, begun or 0, reporter.say) as tracked,
        ):
            while True:
                folder = _open_folder(config, components, run.run_folder, begun, total, reporter)
                try:
                    with reporter.bar("train", total, "steps") as bar:
                        bar.skip(begun or 0)
                        _run(config, reporter, _News(folder, bar, reporter, components, tracked))
                    break
                except GuardAction as error:
                    reporter.say(error.event.text)
                    reporter.say(_roll_back(error.event, folder, run.config))
                    config.trainer.resume_mode, config.trainer.resume_from_path = "auto", None
                    begun = _begun(config, run.run_folder, total)
            if make_report is not None:
                tracked.send_report(make_report)
        return folder

    def expect_trainable(self, recipe: Recipe, reporter: Reporter) -> None:
        expect_installed(recipe.config.trainer.logger)
        _checked(recipe, (), reporter)
        _expect_rewards(build_components(recipe))

    def configuration(self, recipe: Recipe, options: Sequence[str], reporter: Reporter) -> str:
        return as_yaml(_checked(recipe, options, reporter))


ENGINE = VerlEngine()


def _checked(recipe: Recipe, verl_overrides: Sequence[str], reporter: Reporter) -> DictConfig:
    expect_verl()
    config = compose(recipe, verl_overrides, common_run.run_path(recipe))
    for warning in validate(config):
        reporter.say(f"warning: {warning}")
    return config


# Checks before the start


def _expect_rewards(components: Components) -> None:
    """Raise ConfigError for rewards that agent-loop workers cannot compute."""
    if components.rewards.needs_reference:
        raise ConfigError(
            "reward.functions: one of them reads the reference's log-probs (needs_reference), which --engine verl "
            "computes after scoring; use --engine local, or actor_rollout_ref.actor.use_kl_loss in its place"
        )
    for function in leaves(components.rewards.functions):
        if isinstance(function.instance, Judge) and function.instance.policy is not None:
            raise ConfigError(
                f"reward.functions: {function.name} judges by a policy of the run, which --engine verl samples for "
                "rollouts alone; serve the judge, and name its address as endpoint"
            )
    if components.recipe.config.reward.backend == "inline":
        raise ConfigError(
            "reward.backend: inline calls functions in the process that runs hundreds of rollouts at once, and each "
            "would stop them all; with --engine verl expected process or ray"
        )


def _expect_machine(config: DictConfig) -> None:
    """Raise ConfigError if a local Ray on this machine cannot run the configuration."""
    import ray
    import torch
    from verl.utils.device import get_device_name

    init = config.ray_kwargs.ray_init
    if ray.is_initialized() or init.get("address") or os.environ.get("RAY_ADDRESS") or get_device_name() != "cuda":
        return  # a cluster's resources are checked on the cluster
    needed = config.trainer.n_gpus_per_node * config.trainer.nnodes + rollout_devices(config)
    available = torch.cuda.device_count() if init.get("num_gpus") is None else init.num_gpus
    if needed > available:
        raise ConfigError(
            f"trainer.n_gpus_per_node: {needed} wanted (times trainer.nnodes, with those of rollouts), and this "
            f"machine has {available} devices; set trainer.n_gpus_per_node after --, or join a cluster: "
            "ray_kwargs.ray_init.address=auto"
        )
    server = config.actor_rollout_ref.rollout.name
    if server in ("vllm", "sglang") and importlib.util.find_spec(server) is None:
        how = f"{install_command('verl')} 'verl[vllm]>=0.9.1'" if server == "vllm" else "see verl's documentation"
        raise ConfigError(f"actor_rollout_ref.rollout.name: {server} is not installed; {how}, or name another")


def total_steps(config: DictConfig, n_tasks: int) -> int:
    """The training steps of a run, counted as in verl's trainer."""
    limit = config.data.train_max_samples
    return common_rollouts.total_steps(min(n_tasks, limit) if limit >= 0 else n_tasks, config)


def _bring_models(config: DictConfig, recipe: Recipe) -> None:
    """Create generated models and set absolute paths, so that all processes of the run find them."""
    trained, paths = trained_policies(recipe.config), dict[str, str]()
    for name in trained:
        path, key = model_of(recipe.config, name)
        paths[key] = _bring_model(path, partial(model_folder, recipe, name))
    config[KEY] = recipe_section(with_options(recipe, paths).absolute(), read_run_handle(config).run_folder)
    # With several policies, that of the first; verl's agent-loop workers load its tokenizer.
    OmegaConf.update(config, _MODEL, next(iter(paths.values())))
    if (path := recipe.config.critic.model.path) is not None:
        OmegaConf.update(config, "critic.model.path", _bring_model(path, lambda: critic_folder(recipe, trained[0])[0]))


def _bring_model(path: Any, make: Callable[[], Path]) -> str:
    if "://" in str(path) or (isinstance(path, str) and is_hub_name(path)):
        return str(path)  # verl downloads it
    return str(make().resolve())


# The run's folder


def _begun(config: DictConfig, path: Path, total: int) -> int | None:
    """The training step at which the run in this folder resumes; None if the folder holds no run.

    Raises InputError if the run cannot be resumed, or is finished.
    """
    mode, named = config.trainer.resume_mode, config.trainer.resume_from_path
    resumed = step_of(path, named) if mode == "resume_path" else None
    if common_run.read_facts(path, NAME) is None:
        return None
    latest = checkpoints(path) / LATEST
    if mode == "disable":
        raise common_run.folder_error(path, "already, and trainer.resume_mode is disable")
    if resumed is None and not latest.exists():
        raise common_run.folder_error(path, "already, and it has no checkpoint to go on from")
    begun = int(latest.read_text()) if resumed is None else resumed
    if begun >= total and (path / common_run.FINISHED).exists():
        raise common_run.folder_error(path, f"that is finished, at step {begun}", common_run.LONGER)
    return begun


def _open_folder(
    config: DictConfig, components: Components, path: Path, begun: int | None, total: int, reporter: Reporter
) -> RunFolder:
    facts, recipe, now = common_run.read_facts(path, NAME), components.recipe, common_run.data_facts(components, total)
    if begun is None or facts is None:
        folder = common_run.create_folder(recipe, path, common_run.run_facts(recipe, NAME, _PACKAGES, **now), reporter)
    else:
        folder = RunFolder.open(path)
        remove_later(path, begun)
        folder.rewind(begun)
        reporter.say(f"run folder: {folder.path}, goes on after step {begun}")
        common_run.say_changes(facts, recipe, now, reporter)
    folder.write_text("verl.yaml", as_yaml(config))
    return folder


def _roll_back(event: GuardEvent, folder: RunFolder, config: Config) -> str:
    """Roll the run back to its newest good checkpoint; returns the message for the user. Raises GuardStop."""
    path, partners = folder.path, trained_policies(config)[1:]
    latest = checkpoints(path) / LATEST
    newest = min(int(latest.read_text()), event.step - 1) if latest.is_file() else 0

    def newest_good() -> int | None:
        for step in saved_steps(path):
            models = [folder_of(path, step), *(folder_of(path, step) / "policies" / name for name in partners)]
            # verl removes the models of old checkpoints (`max_actor_ckpt_to_keep`), so their folders are incomplete.
            whole = (models[0] / STATE).is_file() and all((model / "actor").is_dir() for model in models)
            if step <= newest and whole and json.loads((models[0] / STATE).read_text())["good"]:
                write_whole(latest, methodcaller("write_text", str(step)))  # verl resumes from it
                return step
        return None

    return roll_back(event, folder, len(rollbacks(path)), config.guard.max_rollbacks, newest_good, remove_later)


# Running and watching


def _run(config: DictConfig, reporter: Reporter, news: _News) -> None:
    """Start verl's `run_ppo` with creditflow's task runner, and always clean up on Ray afterwards."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError
    from verl.trainer.main_ppo import run_ppo

    from creditflow.engines.verl.trainer import TaskRunner

    ours, name, token = not ray.is_initialized(), f"creditflow_{uuid4().hex}", read_run_handle(config).token
    config = config.copy()
    config.trainer.v1.trainer_mode = TRAINER_PREFIX + config.trainer.v1.trainer_mode
    folder = config.ray_kwargs.ray_init.get("_temp_dir") or Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"
    logs = f"Ray's logs: {folder}/session_latest/logs"
    reporter.say(logs)
    # Standard output is for results. Output of verl and, with log_to_driver, of Ray's workers is redirected.
    talks = config.ray_kwargs.ray_init.get("log_to_driver")
    try:
        with contextlib.redirect_stdout(sys.stderr if talks else io.StringIO()), _watching(news, name, token) as lost:
            # One core, as in verl's recipes.
            run_ppo(config, task_runner_class=ray.remote(num_cpus=1, name=name)(TaskRunner))
    except (RayTaskError, RayActorError) as error:
        if lost:
            raise CreditflowError(f"a machine of the cluster was lost: {', '.join(lost)}; {logs}; {_AGAIN}") from error
        _raise_reason(error, f"{logs}; {_AGAIN}")
    except ConnectionError as error:
        raise ConfigError(f"ray_kwargs.ray_init.address: Ray cannot be joined: {first_line(error)}") from error
    finally:
        if ours:
            ray.shutdown()
        else:
            _kill(name)
            for group in _placement_groups(token):  # Ray otherwise keeps them until the whole job ends
                ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))
        news.show()


def _kill(driver: str) -> None:
    """Kill the actor of this name with all that it owns."""
    import ray

    with contextlib.suppress(ValueError):  # it has ended, or never began
        ray.kill(ray.get_actor(driver))


def _raise_reason(error: Exception, advice: str) -> NoReturn:
    """Raise the reason for which the run's driver ended with `error`."""
    from ray.exceptions import RayError, RayTaskError

    if isinstance(error, RayTaskError):
        cause = _cause(error)
        if isinstance(cause, CreditflowError) or says_disk_full(cause):
            raise cause from None
        dead = isinstance(cause, RayError) and not isinstance(cause, RayTaskError)
        if not dead and not _says_peer_lost(cause):
            raise error
        what = "a process of the run died" if dead else "a process of the run died, or the connection to it"
        raise CreditflowError(f"{what}: {first_line(cause)}; {advice}") from error
    raise CreditflowError(f"the run's driver process ended: {first_line(error)}; {advice}") from error


@contextlib.contextmanager
def _watching(news: _News, driver: str, token: str) -> Iterator[list[str]]:
    """Show the news of a run from a thread, and kill its `driver` if a machine with devices of the run is lost.

    Yields the addresses of lost machines. The driver may wait without limit for a process of such a machine: neither
    TransferQueue nor gloo detects it.
    """
    import ray

    lost, seen = list[str](), dict[str, str]()

    def watch(over: threading.Event) -> None:
        polls = itertools.count(1)
        while not over.wait(_POLL_S):
            news.show()
            if next(polls) % _POLLS_OF_NODES or lost or not ray.is_initialized():
                continue
            alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
            lost.extend(sorted(seen[node] for node in seen.keys() - alive.keys()))
            if lost:
                _kill(driver)
            for group in _placement_groups(token):
                seen.update({node: alive[node] for node in group["bundles_to_node_id"].values() if node in alive})

    with beside(watch, "creditflow-progress"):
        yield lost


def _placement_groups(token: str) -> list[dict[str, Any]]:
    """The placement groups of the run, which hold its devices."""
    import ray

    groups = ray.util.placement_group_table().values()
    return [group for group in groups if token in group["name"] and group["state"] != "REMOVED"]


_BACKENDS = ("gloo", "NCCL", "TCPStore")
_LOST = ("reset by peer", "closed by peer", "Connection was likely closed", "remote process exited")
"""Parts of an error of torch.distributed in a process whose peer has died."""


def _says_peer_lost(error: BaseException) -> bool:
    """Whether collective communication failed because another process of the run died.

    Its survivors often notice it before Ray does.
    """
    text = str(error)
    return isinstance(error, RuntimeError) and all(any(part in text for part in of) for of in (_BACKENDS, _LOST))


def _cause(error: BaseException) -> BaseException:
    """The original exception, unwrapped from Ray's errors of any number of processes."""
    from ray.exceptions import RayTaskError

    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


class _News:
    """New metrics and events of a run's folder, printed like the local engine's and sent to the run's trackers."""

    def __init__(
        self, folder: RunFolder, bar: Bar, reporter: Reporter, components: Components, tracked: FolderTrackers
    ) -> None:
        self.bar, self.reporter, self.components, self.tracked = bar, reporter, components, tracked
        self.metrics, self.events = NewLines(folder.path / "metrics.jsonl"), NewLines(folder.path / "events.jsonl")

    def show(self) -> None:
        """Print and send new lines: those of a training step, of a validation alone, and of the guard."""
        for row in self.metrics.rows():
            step = int(row["step"])
            numbers = {key: value for key, value in row.items() if value is not None and key != "step"}
            validated = {key: value for key, value in numbers.items() if key.startswith("val/")}
            if trained := {key: value for key, value in numbers.items() if key not in validated}:
                if step == 1:
                    warn_of_first_step(numbers, self.components, self.tracked.folder, self.reporter)
                self.bar.advance(status=status_line(trained))
            if validated:
                when = "before training" if step == 0 else f"after step {step}"
                self.reporter.say(evaluation_line(validated, when, self.components))
            self.tracked.send_step(step, numbers)
        for row in self.events.rows():
            self.reporter.say(GuardEvent.from_dict(row).text)


class NewLines:
    """The complete lines that a JSON lines file gains from now on."""

    def __init__(self, file: Path) -> None:
        self._file, self._end = file, file.stat().st_size if file.exists() else 0

    def rows(self) -> list[dict[str, Any]]:
        """The lines added since the last call."""
        if not self._file.exists():
            return []
        with self._file.open("rb") as file:
            file.seek(self._end)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._end += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
