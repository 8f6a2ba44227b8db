"""Checkpoints: folders that are written atomically and carry checksums of their files.

`global_step_N` is the policy's Hugging Face folder (with several policies: one subfolder each). Its `state/` holds the
rest of the training state. Rollouts depend on the seed and the step number, tasks on the seed and the number taken, so
no random generator has a state to save.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model, save_model

from creditflow._utils.files import make_whole
from creditflow.engines.common.checkpoints import folder_of, remove_later, saved_steps
from creditflow.engines.local.policy_set import PolicySet
from creditflow.errors import ConfigError, CreditflowError, DataError, ModelError, first_line

_STATE = "state"
_MANIFEST = "trainer.json"


def save(run: Path, step: int, policy_set: PolicySet, state: Mapping[str, Any], keep: int | None = None) -> Path:
    """Write `checkpoints/global_step_N` and keep the newest `keep` checkpoints. `state`: any JSON value.

    If none of the newest `keep` is `good`, the newest older one that is stays too, because a rollback may need it.

    Raises CreditflowError or OSError if the checkpoint cannot be written; earlier checkpoints stay unchanged.
    """
    target = folder_of(run, step)
    try:
        make_whole(target, lambda folder: _fill(folder, step, policy_set, state))
    except SafetensorError as error:  # mostly a full disk, for which safetensors does not raise OSError
        raise CreditflowError(f"{target}: the checkpoint cannot be written: {error}") from error
    if keep:
        steps = saved_steps(run)
        good = next((step for step in steps if _is_good(folder_of(run, step))), None)
        for old in steps[keep:]:
            if old != good:
                shutil.rmtree(folder_of(run, old))
    return target


def _is_good(folder: Path) -> bool:
    try:
        return bool(_manifest(folder)["state"].get("good", True))
    except DataError:
        return False


def _fill(folder: Path, step: int, policy_set: PolicySet, state: Mapping[str, Any]) -> None:
    own = folder / _STATE
    own.mkdir()
    for name, actor in policy_set.actors.items():
        weights = folder if len(policy_set.actors) == 1 else folder / name
        weights.mkdir(exist_ok=True)
        if actor.narrowed:
            actor.policy.export(weights)  # resuming needs base and adapter separately
            actor.policy.tokenizer.save_pretrained(weights)
            save_model(actor.policy.model, str(own / f"{name}-narrowed.safetensors"))
        else:
            actor.policy.save(weights)
        actor.learner.save(own / f"{name}.safetensors")
    for name, critic in policy_set.critics.items():
        critic.model.save_pretrained(own / f"critic-{name}", safe_serialization=True)
        critic.learner.save(own / f"critic-{name}.safetensors")
    hooks = {name: hook.save(own) for name, hook in policy_set.hooks.items()}
    versions = {name: actor.policy.version for name, actor in policy_set.actors.items()}
    sums = {str(file.relative_to(folder)): _sum(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    manifest = {
        "step": step,
        "versions": versions,
        "narrowed": policy_set.narrowed,
        "state": state,
        **({"hooks": hooks} if hooks else {}),
        "sha256": sums,
    }
    (own / _MANIFEST).write_text(json.dumps(manifest | {"own_sha256": _sum_of(manifest)}, indent=2) + "\n")


def load(run: Path, step: int, policy_set: PolicySet) -> dict[str, Any]:
    """Load weights, optimizers and critics from `checkpoints/global_step_N`; returns its saved `state`.

    All checksums are verified first. Raises DataError if a file is missing or changed, and ConfigError if the models
    differ from the recipe's.
    """
    folder = folder_of(run, step)
    manifest = _manifest(folder)
    for name, expected in manifest["sha256"].items():
        if not (folder / name).is_file() or _sum(folder / name) != expected:
            raise DataError(f"{folder}: {name} is not as it was written")
    if manifest["versions"].keys() != policy_set.actors.keys():
        there, here = ", ".join(manifest["versions"]), ", ".join(policy_set.actors)
        raise ConfigError(f"policies: {folder} holds {there}, and the recipe trains {here}")
    own = folder / _STATE
    _expect_parts(policy_set, folder)
    if manifest["narrowed"] != policy_set.narrowed:
        (policy_set.narrow if manifest["narrowed"] else policy_set.widen)()
    try:
        for name, actor in policy_set.actors.items():
            weights = folder if len(policy_set.actors) == 1 else folder / name
            if actor.narrowed:
                load_model(actor.policy.model, own / f"{name}-narrowed.safetensors")
            elif actor.policy.adapter is not None:
                actor.policy.adapter.load(weights)
            else:
                _load_weights(actor.policy.model, weights)
            actor.policy.version = manifest["versions"][name]
            actor.learner.load(own / f"{name}.safetensors")
        for name, critic in policy_set.critics.items():
            _load_weights(critic.model, own / f"critic-{name}")
            critic.learner.load(own / f"critic-{name}.safetensors")
        for name, hook in policy_set.hooks.items():
            hook.load(own, manifest.get("hooks", {}).get(name))
    except (OSError, SafetensorError, RuntimeError, ModelError) as error:
        raise ConfigError(f"{folder}: is not of this recipe's models: {first_line(error)}") from error
    state: dict[str, Any] = manifest["state"]
    return state


def _expect_parts(policy_set: PolicySet, folder: Path) -> None:
    """Raise ConfigError if a checkpoint lacks a critic of the recipe."""
    for name in policy_set.critics:
        if not (folder / _STATE / f"critic-{name}").is_dir():
            raise ConfigError(f"algorithm.adv_estimator: {folder}: has no critic of {name}")


def _load_weights(model: Any, folder: Path) -> None:
    """Load weights in place, so that optimizers keep their tensors. Raises RuntimeError if they do not fit.

    Uses the model's own loader, because files may name and split weights differently than the model.
    """
    saved, info = type(model).from_pretrained(
        folder, dtype=next(model.parameters()).dtype, use_safetensors=True, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):  # the loader would initialize them randomly
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


def newest(
    run: Path,
    policy_set: PolicySet,
    say: Callable[[str], None],
    accept: Callable[[int, Mapping[str, Any]], bool] = lambda step, state: True,
) -> tuple[int, dict[str, Any]] | None:
    """Load the newest intact checkpoint that `accept(step, state)` accepts; returns its step and state.

    Damaged checkpoints are reported and skipped. Returns None without checkpoints, or if none is accepted. Raises
    DataError if all are damaged, because their remains may still be useful.
    """
    whole = False
    for step in saved_steps(run):
        try:
            if accept(step, _manifest(folder_of(run, step))["state"]):
                return step, load(run, step, policy_set)
            whole = True
        except DataError as error:
            say(f"warning: {error}; the one before it is tried")
    if saved_steps(run) and not whole:
        raise DataError(f"{run / 'checkpoints'}: none of its checkpoints is whole; begin again in another folder")
    return None


def sweep(run: Path, step: int) -> None:
    """Remove unfinished checkpoints and all after `step`, from where the run continues differently."""
    for aside in (run / "checkpoints").glob(".global_step_*"):  # left by killed runs
        shutil.rmtree(aside)
    remove_later(run, step)


def _sum_of(manifest: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(manifest))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def _sum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
