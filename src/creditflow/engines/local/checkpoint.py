"""Checkpoints: folders that appear whole or not at all, and say of themselves whether they still are.

`global_step_N` is the policy's Hugging Face folder (of several policies: a folder for each), with `state/` in it: what
else the next training step depends on. Plays follow from the seed and the step's number, tasks from the seed and how
many were taken, so that no generator has a state.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model, save_model

from creditflow.engines.local.crew import Crew
from creditflow.errors import ConfigError, CreditflowError, DataError, ModelError, first_line
from creditflow.files import make_whole

_STATE = "state"
_MANIFEST = "trainer.json"


def save(run: Path, step: int, crew: Crew, state: Mapping[str, Any], keep: int | None = None) -> Path:
    """Write `checkpoints/global_step_N`, and remove the oldest beyond `keep`. `state`: whatever JSON can hold.

    Of those beyond, the newest that is `good` stays where none of the others is: a run may have to go back to it.

    Raises CreditflowError or OSError where it cannot be written; the ones before are as they were.
    """
    target = folder_of(run, step)
    try:
        make_whole(target, lambda folder: _fill(folder, step, crew, state))
    except SafetensorError as error:  # a full disk above all; it is no OSError there
        raise CreditflowError(f"{target}: the checkpoint cannot be written: {error}") from error
    good_is_kept = False
    for place, old in enumerate(saved_steps(run) if keep else ()):
        good = not good_is_kept and _is_good(folder_of(run, old))
        if place >= (keep or 0) and not good:
            shutil.rmtree(folder_of(run, old))
        good_is_kept = good_is_kept or good
    return target


def _is_good(folder: Path) -> bool:
    try:
        return bool(_manifest(folder)["state"].get("good", True))
    except DataError:
        return False


def _fill(folder: Path, step: int, crew: Crew, state: Mapping[str, Any]) -> None:
    own = folder / _STATE
    own.mkdir()
    for name, actor in crew.actors.items():
        weights = folder if len(crew.actors) == 1 else folder / name
        weights.mkdir(exist_ok=True)
        if actor.narrowed:
            actor.policy.save_merged(weights)  # for others; what goes on needs base and adapter apart
            save_model(actor.policy.model, str(own / f"{name}-narrowed.safetensors"))
        else:
            actor.policy.save(weights)
        actor.learner.save(own / f"{name}.safetensors")
    for name, critic in crew.critics.items():
        critic.model.save_pretrained(own / f"critic-{name}", safe_serialization=True)
        critic.learner.save(own / f"critic-{name}.safetensors")
    versions = {name: actor.policy.version for name, actor in crew.actors.items()}
    sums = {str(file.relative_to(folder)): _sum(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    manifest = {"step": step, "versions": versions, "narrowed": crew.narrowed, "state": state, "sha256": sums}
    (own / _MANIFEST).write_text(json.dumps(manifest | {"own_sha256": _sum_of(manifest)}, indent=2) + "\n")


def load(run: Path, step: int, crew: Crew) -> dict[str, Any]:
    """Go on from `checkpoints/global_step_N`: weights, optimizers, critics; returns what was given as `state`.

    Raises DataError where a file of it is missing or not as it was written, which is looked at before any is taken;
    ConfigError where it is of other models than the recipe's.
    """
    folder = folder_of(run, step)
    manifest = _manifest(folder)
    for name, expected in manifest["sha256"].items():
        if not (folder / name).is_file() or _sum(folder / name) != expected:
            raise DataError(f"{folder}: {name} is not as it was written")
    if manifest["versions"].keys() != crew.actors.keys():
        there, here = ", ".join(manifest["versions"]), ", ".join(crew.actors)
        raise ConfigError(f"policies: {folder} holds {there}, and the recipe trains {here}")
    own = folder / _STATE
    for name in crew.critics:
        if not (own / f"critic-{name}").is_dir():
            raise ConfigError(f"algorithm.adv_estimator: {folder}: has no critic of {name}")
    if manifest["narrowed"] != crew.narrowed:
        (crew.narrow if manifest["narrowed"] else crew.widen)()
    try:
        for name, actor in crew.actors.items():
            weights = folder if len(crew.actors) == 1 else folder / name
            if actor.narrowed:
                load_model(actor.policy.model, own / f"{name}-narrowed.safetensors")
            elif actor.policy.adapter is not None:
                actor.policy.adapter.load(weights)
            else:
                _load_weights(actor.policy.model, weights)
            actor.policy.version = manifest["versions"][name]
            actor.learner.load(own / f"{name}.safetensors")
        for name, critic in crew.critics.items():
            _load_weights(critic.model, own / f"critic-{name}")
            critic.learner.load(own / f"critic-{name}.safetensors")
    except (OSError, SafetensorError, RuntimeError, ModelError) as error:
        raise ConfigError(f"{folder}: is not of this recipe's models: {first_line(error)}") from error
    state: dict[str, Any] = manifest["state"]
    return state


def _load_weights(model: Any, folder: Path) -> None:
    """In place, so that optimizers keep their weights. Raises RuntimeError where they do not fit.

    Read by the model's own loader: files may hold weights under other names, and in other pieces, than the model does.
    """
    saved, info = type(model).from_pretrained(
        folder, dtype=next(model.parameters()).dtype, use_safetensors=True, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):  # which the loader makes up
        raise RuntimeError(f"it lacks {', '.join(missing[:3])}")
    model.load_state_dict(saved.state_dict())


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / _STATE / _MANIFEST).read_text())
        if manifest.pop("own_sha256", None) != _sum_of(manifest):
            raise ValueError("it is not as it was written")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{folder}: {_STATE}/{_MANIFEST} cannot be read: {first_line(error)}") from error
    return dict(manifest)


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a training step lies."""
    return run / "checkpoints" / f"global_step_{step}"


def saved_steps(run: Path) -> list[int]:
    """The training steps that there are checkpoints of, the newest first."""
    found = (re.fullmatch("global_step_([0-9]+)", path.name) for path in (run / "checkpoints").glob("global_step_*"))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def step_of(run: Path, named: str) -> int:
    """The training step of the checkpoint that is named; raises ConfigError where it is none of `run`'s."""
    found = re.fullmatch("global_step_([0-9]+)", Path(named).name)
    if found is None or Path(named).absolute() != folder_of(run, int(found[1])).absolute() or not Path(named).is_dir():
        raise ConfigError(
            f"trainer.resume_from_path: expected {folder_of(run, 0).with_name('global_step_<number>')}, got {named!r}; "
            "to begin from another run's weights, name them as actor_rollout_ref.model.path"
        )
    return int(found[1])


def newest(
    run: Path,
    crew: Crew,
    say: Callable[[str], None],
    accept: Callable[[int, Mapping[str, Any]], bool] = lambda step, state: True,
) -> tuple[int, dict[str, Any]] | None:
    """Go on from the newest checkpoint that is whole, and accepted by its step and state, which are returned.

    None where there is no checkpoint, or none that is accepted. Those that are not whole are said to be. Raises
    DataError where none is: what is left of them may be of use.
    """
    whole = False
    for step in saved_steps(run):
        try:
            if accept(step, _manifest(folder_of(run, step))["state"]):
                return step, load(run, step, crew)
            whole = True
        except DataError as error:
            say(f"warning: {error}; the one before it is tried")
    if saved_steps(run) and not whole:
        raise DataError(f"{run / 'checkpoints'}: none of its checkpoints is whole; begin again in another folder")
    return None


def sweep(run: Path, step: int) -> None:
    """Remove the checkpoints after `step`, from which the run goes on another way, and those never finished."""
    for aside in (run / "checkpoints").glob(".global_step_*"):  # a killed run cannot do it itself
        shutil.rmtree(aside)
    for later in saved_steps(run):
        if later > step:
            shutil.rmtree(folder_of(run, later))


def _sum_of(manifest: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(manifest))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def _sum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
