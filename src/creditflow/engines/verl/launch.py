"""Starts a run on verl, shows how it stands, and ends it: what happens in the process of the command line.

Training itself happens in a Ray actor (`task_runner`), which writes the run's folder; this process watches that.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from creditflow.config import ModelConfig, Recipe, different_options, model_of, trained_policies
from creditflow.engines.local.crew import critic_folder, model_folder
from creditflow.engines.local.plays import needs_reference
from creditflow.engines.local.run import run_path
from creditflow.engines.local.trainer import status_line, warn_of_first_step, warn_of_idle_gate
from creditflow.engines.verl.configuration import as_yaml, checkpoints, compose, expect_verl, validate
from creditflow.engines.verl.recipe import KEY, carried, carry
from creditflow.errors import ConfigError, CreditflowError, InputError, first_line, says_disk_full
from creditflow.ledger import RunFolder
from creditflow.ledger.run_folder import read_events
from creditflow.monitor import Event, Guard
from creditflow.monitor.guard import RolledBack
from creditflow.parts import Parts, build_parts
from creditflow.progress import Bar, Reporter
from creditflow.reward.judge import Judge
from creditflow.reward.registry import leaves

_POLL_S = 0.5
"""How often the run's folder is looked at."""
_MODEL = "actor_rollout_ref.model.path"


def dry_run(recipe: Recipe, verl_overrides: Sequence[str], reporter: Reporter) -> str:
    """verl's configuration for the recipe as YAML, checked by verl; neither Ray nor model nor data are touched."""
    return as_yaml(_checked(recipe, verl_overrides, reporter))


def launch(recipe: Recipe, verl_overrides: Sequence[str], reporter: Reporter) -> RunFolder:
    """Train as the recipe says, on verl; returns the run's folder. Bad input raises before anything is written.

    A folder that holds a run with a checkpoint is gone on with. Raises CreditflowError where training failed; its own
    errors are those of the processes that met them.
    """
    config = _checked(recipe, verl_overrides, reporter)
    run = carried(config)
    parts = build_parts(run.recipe)
    _expect_rewards(parts)
    _expect_machine(config)
    Guard.of(run.config, run.recipe.folder, parts.rewards.functions, "verl")
    total = total_steps(config, len(parts.train_tasks))
    begun = _begun(config, run.run_folder, total)
    _bring_models(config, run.recipe)
    while True:
        folder = _open_folder(config, run.recipe, run.run_folder, begun, reporter)
        try:
            with (
                reporter.bar("train", total) as bar,
                _watching(folder, begun, _Shown(bar, reporter, parts, folder.path)),
            ):
                _run(config, reporter)
            return folder
        except RolledBack as back:
            reporter.say(str(back))
            config.trainer.resume_mode, config.trainer.resume_from_path = "auto", None
            begun = _begun(config, run.run_folder, total)


def _checked(recipe: Recipe, verl_overrides: Sequence[str], reporter: Reporter) -> DictConfig:
    expect_verl()
    config = compose(recipe, verl_overrides, run_path(recipe))
    for warning in validate(config):
        reporter.say(f"warning: {warning}")
    return config


_MAY_CHANGE = {"trainer.default_local_dir", "trainer.total_training_steps"}


# Before anything is started


def _expect_rewards(parts: Parts) -> None:
    """Raises ConfigError where the agent-loop workers could not score."""
    if needs_reference(parts):
        raise ConfigError(
            "reward.functions: one of them reads the reference's log-probs (needs_reference), which --engine verl "
            "computes after scoring; use --engine local, or actor_rollout_ref.actor.use_kl_loss in its place"
        )
    for function in leaves(parts.rewards.functions):
        if isinstance(function.instance, Judge) and function.instance.policy is not None:
            raise ConfigError(
                f"reward.functions: {function.name} judges by a policy of the run, which --engine verl samples for "
                "plays alone; serve the judge, and name its address as endpoint"
            )
    if parts.recipe.config.reward.backend == "inline":
        raise ConfigError(
            "reward.backend: inline calls functions in the process that plays hundreds at once, and each would stop "
            "them all; with --engine verl expected process or ray"
        )


def _expect_machine(config: DictConfig) -> None:
    """Raises ConfigError where a Ray of our own on this machine could not run the configuration."""
    import ray
    import torch
    from verl.utils.device import get_device_name

    init = config.ray_kwargs.ray_init
    if ray.is_initialized() or init.get("address") or os.environ.get("RAY_ADDRESS") or get_device_name() != "cuda":
        return  # what a cluster has is seen there
    wanted = config.trainer.n_gpus_per_node * config.trainer.nnodes
    there = torch.cuda.device_count() if init.get("num_gpus") is None else init.num_gpus
    if wanted > there:
        raise ConfigError(
            f"trainer.n_gpus_per_node: {wanted} wanted (times trainer.nnodes), and this machine has {there} devices; "
            "set trainer.n_gpus_per_node after --, or join a cluster: ray_kwargs.ray_init.address=auto"
        )
    server = config.actor_rollout_ref.rollout.name
    if server in ("vllm", "sglang") and importlib.util.find_spec(server) is None:
        how = "pip install 'verl[vllm]>=0.9.1'" if server == "vllm" else "see verl's documentation"
        raise ConfigError(f"actor_rollout_ref.rollout.name: {server} is not installed; {how}, or name another")


def total_steps(config: DictConfig, n_tasks: int) -> int:
    """Training steps of a run, as verl's trainer counts them."""
    if config.trainer.total_training_steps is not None:
        return int(config.trainer.total_training_steps)
    if config.data.train_max_samples >= 0:
        n_tasks = min(n_tasks, config.data.train_max_samples)
    return int(n_tasks // config.data.train_batch_size * config.trainer.total_epochs)


def _bring_models(config: DictConfig, recipe: Recipe) -> None:
    """Make the models that are made, and name them so that every process of the run finds them."""
    trained = trained_policies(recipe.config)
    made = {
        name: _bring_model(model_of(recipe.config, name)[0], partial(model_folder, recipe, name)) for name in trained
    }
    own = replace(recipe.config.actor_rollout_ref, model=replace(recipe.config.actor_rollout_ref.model))
    changed = replace(recipe.config, actor_rollout_ref=own, policies=dict(recipe.config.policies))
    for name, path in made.items():
        if model_of(recipe.config, name)[1] == _MODEL:
            own.model.path = path
        else:
            changed.policies[name] = replace(changed.policies[name], model=ModelConfig(path=path))
    config[KEY] = carry(replace(recipe, config=changed).absolute(), carried(config).run_folder)
    OmegaConf.update(config, _MODEL, next(iter(made.values())) if len(made) == 1 else own.model.path)
    if (path := recipe.config.critic.model.path) is not None:
        OmegaConf.update(config, "critic.model.path", _bring_model(path, lambda: critic_folder(recipe, trained[0])[0]))


def _bring_model(path: Any, make: Callable[[], Path]) -> str:
    if "://" in str(path):
        return str(path)  # verl fetches it
    folder = make()
    return str(folder.resolve() if folder.exists() else folder)  # what is no folder is a name on the hub


# The run's folder


def _begun(config: DictConfig, path: Path, total: int) -> int | None:
    """The training step that an earlier run in this folder was saved at; None where the folder holds no run.

    Raises InputError where its run cannot be gone on with, or is finished.
    """
    mode, named = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode == "resume_path" and not _is_checkpoint_of(path, named):
        raise ConfigError(
            f"trainer.resume_from_path: expected {checkpoints(path)}/global_step_<number>, got {named!r}; to begin "
            f"from another run's weights, name them as {_MODEL}"
        )
    if not (path / "run.json").exists():
        return None
    latest = checkpoints(path) / "latest_checkpointed_iteration.txt"
    if mode == "resume_path":
        begun = int(str(named).rpartition("_")[2])
    elif mode != "disable" and latest.exists():
        begun = int(latest.read_text())
    else:
        why = "trainer.resume_mode is disable" if mode == "disable" else "it has no checkpoint to go on from"
        raise InputError(f"trainer.default_local_dir: {path} holds a run already, and {why}; name another folder")
    if begun >= total and (path / "evaluation.json").exists():
        raise InputError(
            f"trainer.default_local_dir: {path} holds a run that is finished, at step {begun}; name another folder, or "
            "raise trainer.total_training_steps"
        )
    return begun


def _is_checkpoint_of(path: Path, named: Any) -> bool:
    found = Path(str(named)).absolute()
    return (
        found.parent == checkpoints(path)
        and re.fullmatch("global_step_[0-9]+", found.name) is not None
        and found.is_dir()
    )


def _open_folder(config: DictConfig, recipe: Recipe, path: Path, begun: int | None, reporter: Reporter) -> RunFolder:
    if begun is None:
        folder = RunFolder.create(path, run_facts(recipe), recipe.to_yaml())
        reporter.say(f"run folder: {folder.path}")
    else:
        folder = RunFolder.open(path)
        reporter.say(f"run folder: {folder.path}, goes on after step {begun}")
        before = json.loads((path / "run.json").read_text())["config"]
        now = json.loads(json.dumps(recipe.to_dict()))
        if changed := sorted(set(different_options(before, now)) - _MAY_CHANGE):
            reporter.say(f"warning: not as the run began: {', '.join(changed)}")
    folder.write_text("verl.yaml", as_yaml(config))
    return folder


def run_facts(recipe: Recipe) -> dict[str, object]:
    """What `run.json` says: configuration, versions, seed, machine."""
    packages = ("creditflow", "verl", "ray", "TransferQueue", "torch", "transformers", "numpy")
    return {
        "recipe": recipe.name,
        "engine": "verl",
        "seed": recipe.config.data.seed,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
        "config": recipe.to_dict(),
    }


# While it runs


def _run(config: DictConfig, reporter: Reporter) -> None:
    """verl's own start of a run, with our task runner; whatever happens, nothing of a Ray of our own is left behind."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError
    from verl.trainer.main_ppo import run_ppo

    from creditflow.engines.verl.task_runner import task_runner_class

    ours = not ray.is_initialized()
    runner = _Started(task_runner_class(), config, reporter)
    # Standard output is for results: what verl and, if asked for, Ray's workers say goes elsewhere.
    talks = config.ray_kwargs.ray_init.get("log_to_driver")
    try:
        with contextlib.redirect_stdout(sys.stderr if talks else io.StringIO()):
            run_ppo(config, task_runner_class=runner)
    except RayTaskError as error:
        cause = _cause(error)
        if isinstance(cause, CreditflowError) or says_disk_full(cause):
            raise cause from None
        raise
    except RayActorError as error:
        raise CreditflowError(f"the run's driver process ended: {first_line(error)}; {runner.logs}") from error
    except ConnectionError as error:
        raise ConfigError(f"ray_kwargs.ray_init.address: Ray cannot be joined: {first_line(error)}") from error
    finally:
        if ours:
            ray.shutdown()
        else:
            runner.kill()
            _give_back_devices(carried(config).token)


def _give_back_devices(token: str) -> None:
    """Remove the run's placement groups; by itself Ray does so only when the whole job ends."""
    import ray

    for group in ray.util.placement_group_table().values():
        if token in group["name"] and group["state"] != "REMOVED":
            ray.util.remove_placement_group(ray.util.get_placement_group(group["name"]))


def _cause(error: BaseException) -> BaseException:
    """What was raised in the first place, however many processes it came through."""
    from ray.exceptions import RayTaskError

    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


@dataclass
class _Started:
    """verl's way to start the task runner's actor, which lets us have its handle, and tells where Ray writes."""

    actor_class: Any
    config: DictConfig
    reporter: Reporter
    handle: Any = None
    logs: str = "Ray did not start"

    def options(self, **options: Any) -> _Started:
        """As of an actor class."""
        self.actor_class = self.actor_class.options(**options)
        return self

    def remote(self) -> Any:
        """As of an actor class."""
        import ray

        folder = self.config.ray_kwargs.ray_init.get("_temp_dir") or Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"
        self.logs = f"Ray's logs: {folder}/{ray.get_runtime_context().get_session_name()}/logs"
        self.reporter.say(self.logs)
        self.handle = self.actor_class.remote()
        return self.handle

    def kill(self) -> None:
        """End the actor, and with it all that it owns."""
        import ray

        if self.handle is not None:
            ray.kill(self.handle)
            self.handle = None


@dataclass(frozen=True)
class _Shown:
    """Where a run's metrics are shown, as the local engine says them when they happen."""

    bar: Bar
    reporter: Reporter
    parts: Parts
    folder: Path

    def show(self, row: Mapping[str, Any]) -> None:
        """One line of `metrics.jsonl`."""
        step = int(row["step"])
        numbers = {key: value for key, value in row.items() if value is not None}
        validated = {key: value for key, value in numbers.items() if key.startswith("val/")}
        if step == 1:
            warn_of_first_step(numbers, self.parts, self.reporter)
            warn_of_idle_gate(numbers, self.folder, self.reporter)
        if step > 0:
            self.bar.advance(status=status_line({key: numbers[key] for key in numbers.keys() - validated.keys()}))
        if validated:
            when = "before training" if step == 0 else f"after step {step}"
            words = self.parts.recipe.validation_words(len(self.parts.val_tasks))
            self.reporter.say(f"{when}: {status_line(validated)} on {words}")

    def show_event(self, row: Mapping[str, Any]) -> None:
        """One line of `events.jsonl`."""
        self.reporter.say(Event.from_dict(row).text)


@contextlib.contextmanager
def _watching(folder: RunFolder, begun: int | None, shown: _Shown) -> Iterator[None]:
    """Shows what is written to the folder's metrics, from a thread: this one waits for Ray."""
    after = -1 if begun is None else begun
    metrics, events = Tail(folder.path / "metrics.jsonl", after), NewEvents(folder.path)
    if begun:
        shown.bar.advance(begun)
    over = threading.Event()

    def watch() -> None:
        last = False
        while not last:
            last = over.wait(_POLL_S)
            for row in metrics.rows():
                shown.show(row)
            for row in events.rows():
                shown.show_event(row)

    thread = threading.Thread(target=watch, name="creditflow-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class NewEvents:
    """The events that are added to a run's folder; not those that are there, however often the file is made anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = [json.dumps(row) for row in read_events(path)]

    def rows(self) -> list[dict[str, Any]]:
        """What is new."""
        new = [row for row in read_events(self._path) if json.dumps(row) not in self._seen]
        self._seen += [json.dumps(row) for row in new]
        return new


@dataclass
class Tail:
    """The whole lines that are added to a run's `metrics.jsonl`, of steps later than `after`."""

    file: Path
    after: int
    _read: int = 0
    _inode: int = field(default=-1)

    def __post_init__(self) -> None:
        if self.after >= 0 and self.file.exists():  # what is there was shown; what is taken back will be written anew
            self._read, self._inode = self.file.stat().st_size, self.file.stat().st_ino

    def rows(self) -> list[dict[str, Any]]:
        """What is new."""
        try:
            with self.file.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._read:
                    self._read, self._inode = 0, status.st_ino
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        rows = [row for row in map(json.loads, whole.splitlines()) if row["step"] > self.after]
        if rows:
            self.after = max(self.after, *(row["step"] for row in rows))
        return rows
