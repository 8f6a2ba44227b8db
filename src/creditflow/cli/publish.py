"""`creditflow publish`: write a run's model as a folder for the Hugging Face hub."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from creditflow._utils.files import make_whole
from creditflow._utils.progress import Reporter
from creditflow.cli._options import Run, make_new_folder
from creditflow.errors import InputError, first_line
from creditflow.runs import Ledger

_PUBLISHED = re.compile(
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|(generation_|adapter_)?config\.json"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt"
    r"|chat_template\.jinja|(tokenizer|sentencepiece\.bpe|spiece)\.model|vocab\.txt"
)
"""Names of the published files: weights, configuration, tokenizer. Training state and code are left out."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_LICENCE = re.compile(r"[a-z0-9][a-z0-9.\-]{0,60}")
_SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


def publish(
    run: Run,
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="The folder to write; default: RUN/published."),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="The base model's name on the hub; default: the recipe's, if it is one."),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The licence, such as apache-2.0, which the base model's must allow."),
    ] = None,
) -> None:
    """Write a run's model as a folder for the Hugging Face hub.

    The folder holds the weights and the tokenizer of the newest checkpoint, and a model card. Nothing is sent: the
    command for the upload is printed.

    Example: creditflow publish runs/RUN -o model --license apache-2.0
    """
    from creditflow.config import leaves
    from creditflow.engines.common.checkpoints import folder_of, model_folders, saved_steps
    from creditflow.reports.model_card import PublishedPolicy, model_card

    ledger, out = Ledger.open(run), out or run / "published"
    if base_model is not None and not _HUB_NAME.fullmatch(base_model):
        raise InputError(f"--base-model: expected ORG/NAME, got {base_model!r}")
    if license is not None and not _LICENCE.fullmatch(license):
        raise InputError(f"--license: expected an identifier of the hub, such as apache-2.0, got {license!r}")
    if not (steps := saved_steps(run)):
        raise InputError(f"{run}: expected a checkpoint, found none; trainer.save_freq saves them")
    if not (folders := model_folders(folder_of(run, steps[0]))):
        raise InputError(f"{folder_of(run, steps[0])}: expected the weights of a model, found none")
    facts, policies = ledger.run, list[PublishedPolicy]()
    settings = dict(leaves(facts["config"])) if isinstance(facts.get("config"), dict) else {}
    for name, source in folders.items():
        path = settings.get(f"policies.{name}.model.path") or settings.get("actor_rollout_ref.model.path")
        # The subfolder has its name in the checkpoint, which for verl is the policy's.
        subfolder = "" if len(folders) == 1 else name if source.name == "huggingface" else source.name
        adapter = (source / "adapter_config.json").is_file()
        policies.append(PublishedPolicy(name, subfolder, adapter, base_model or _hub_name(path)))
    before, after = dict[str, Any](), dict[str, Any]()
    for row in ledger.metrics():  # a repeated evaluation has a separate row
        (before if row["step"] == 0 else after if row["step"] == steps[0] else {}).update(row)
    card = model_card(facts, steps[0], policies, license, before, after)

    def fill(target: Path) -> None:
        for policy, folder in zip(policies, folders.values(), strict=True):
            place = target / policy.subfolder
            place.mkdir(parents=True, exist_ok=True)
            _copy(folder, place, policy.base)
        (target / "README.md").write_text(card, encoding="utf-8")

    out = out.resolve()  # a link to a folder cannot be replaced
    make_new_folder(out, "--out")
    reporter = Reporter()
    with reporter.bar("publish", announce=True, keep=False):
        make_whole(out, fill)
    for policy in policies:
        if policy.adapter and policy.base is None:
            reporter.say(
                f"warning: {policy.name}: adapter_config.json names a folder of this machine as the base model; "
                "--base-model ORG/NAME replaces it"
            )
    if license is None:
        reporter.say("warning: the card states no licence; --license ID sets the one that the base model's allows")
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{out}: the checkpoint of training step {steps[0]}, {size / 1e6:.1f} MB; nothing was sent")
    print(f"\nnext, after a look at {out / 'README.md'}:\n  hf upload ORG/NAME {shlex.quote(str(out))} .")


def _hub_name(path: object) -> str | None:
    """The hub name of the model that `model.path` names; None for a folder, a file or a made model."""
    from creditflow.engines.models.folders import is_hub_name

    if path == "smollm2":
        return _SMOLLM2
    return path if isinstance(path, str) and is_hub_name(path) and _HUB_NAME.fullmatch(path) else None


def _copy(source: Path, target: Path, base: str | None) -> None:
    """Copy the published files of a model folder. Configuration files lose the paths of this machine."""
    for file in sorted(source.iterdir()):
        if not _PUBLISHED.fullmatch(file.name) or not file.is_file():
            continue
        if file.name not in _PATHS:
            shutil.copyfile(file, target / file.name)
            continue
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{file}: expected JSON: {first_line(error)}") from error
        key = _PATHS[file.name]
        if base is not None and key in config:
            config[key] = base
        elif file.name == "config.json":
            config.pop(key, None)
        (target / file.name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


_PATHS = {"config.json": "_name_or_path", "adapter_config.json": "base_model_name_or_path"}
"""Files with the path of a base model, and its key."""
