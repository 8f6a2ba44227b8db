"""The folders of a run's checkpoints: `checkpoints/global_step_N` for training step N, on every engine."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from creditflow.errors import ConfigError


def folder_of(run: Path, step: int) -> Path:
    """The checkpoint folder of a training step."""
    return run / "checkpoints" / f"global_step_{step}"


def saved_steps(run: Path) -> list[int]:
    """The training steps with a checkpoint, newest first."""
    matches = (re.fullmatch("global_step_([0-9]+)", path.name) for path in (run / "checkpoints").glob("global_step_*"))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def step_of(run: Path, named: object) -> int:
    """The training step of the checkpoint folder `named`; raises ConfigError if `run` has no such checkpoint."""
    folder = Path(str(named)).absolute()
    match = re.fullmatch("global_step_([0-9]+)", folder.name)
    if match is None or folder != folder_of(run, int(match[1])).absolute() or not folder.is_dir():
        raise ConfigError(
            f"trainer.resume_from_path: expected {folder_of(run, 0).with_name('global_step_<number>')}, got {named!r}; "
            "to begin from another run's weights, name them as actor_rollout_ref.model.path"
        )
    return int(match[1])


def model_folders(checkpoint: Path) -> dict[str, Path]:
    """The Hugging Face or peft folders in a checkpoint, by policy; the only one is named `default`.

    The local engine writes one policy into the checkpoint itself and several into subfolders; verl writes
    `actor/huggingface`, and further policies likewise below `policies/<name>`.
    """
    for single in (checkpoint, checkpoint / "actor" / "huggingface"):
        if _is_model(single) and not (checkpoint / "policies").is_dir():
            return {"default": single}
    if _is_model(first := checkpoint / "actor" / "huggingface"):
        further = {path.name: path / "actor" / "huggingface" for path in sorted((checkpoint / "policies").iterdir())}
        return {"default": first} | {name: path for name, path in further.items() if _is_model(path)}
    return {path.name: path for path in sorted(checkpoint.iterdir()) if path.name != "state" and _is_model(path)}


def _is_model(folder: Path) -> bool:
    names = ("config.json", "adapter_config.json")
    return any((folder / name).is_file() for name in names) and any(folder.glob("*.safetensors"))


def remove_later(run: Path, step: int) -> None:
    """Remove all checkpoints after `step`, from where the run continues differently."""
    for later in saved_steps(run):
        if later > step:
            shutil.rmtree(folder_of(run, later))
