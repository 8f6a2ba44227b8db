"""`creditflow publish`: write a run's model as a folder for the Hugging Face hub."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from creditflow._utils.files import make_whole
from creditflow._utils.progress import Reporter
from creditflow.cli._options import Run
from creditflow.errors import CreditflowError, InputError, first_line
from creditflow.runs import Ledger

if TYPE_CHECKING:
    from creditflow.reports.model_card import PublishedPolicy

_PUBLISHED = re.compile(
    r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|(generation_|adapter_)?config\.json"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt"
    r"|chat_template\.jinja|(tokenizer|sentencepiece\.bpe|spiece)\.model|vocab\.txt"
)
"""Names of the published files: weights, configuration, tokenizer. Training state and code are left out."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
_CARD_SIZE = 1_000_000
"""Maximum bytes of a base model's card that is read."""


def publish(
    run: Run,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="The folder to write; default: RUN/published."),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="The base model's name on the hub; default: the recipe's, if it is one."),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(metavar="ID", help="The licence, such as apache-2.0; default: the base model's, where known."),
    ] = None,
) -> None:
    """Write a run's model as a folder for the Hugging Face hub.

    The folder holds the weights and the tokenizer of the newest checkpoint, and a model card. Nothing is sent: the
    command for the upload is printed.
    """
    from creditflow.engines.common.checkpoints import folder_of, model_folders, saved_steps
    from creditflow.reports.model_card import accepted_licence, model_card

    ledger, output = Ledger.open(run), output or run / "published"
    if output.exists():
        raise InputError(f"--output: {output} exists already; name another folder, or remove it")
    if base_model is not None and not _HUB_NAME.fullmatch(base_model):
        raise InputError(f"--base-model: expected ORG/NAME, got {base_model!r}")
    if license is not None and accepted_licence(license) is None:
        raise InputError(f"--license: expected an identifier of the hub, such as apache-2.0, got {license!r}")
    steps = saved_steps(run)
    if not steps:
        raise InputError(f"{run}: expected a checkpoint, found none; trainer.save_freq saves them")
    folders = model_folders(folder_of(run, steps[0]))
    if not folders:
        raise InputError(f"{folder_of(run, steps[0])}: expected the weights of a model, found none")
    facts = ledger.run
    policies = [_policy(facts, name, folder, len(folders) == 1) for name, folder in folders.items()]
    policies = [replace(p, base=base_model or p.base, licence=license or p.licence) for p in policies]
    before, after = dict[str, Any](), dict[str, Any]()
    for row in ledger.metrics():  # a repeated evaluation has a separate row
        (before if row["step"] == 0 else after if row["step"] == steps[0] else {}).update(row)
    card = model_card(facts, steps[0], policies, before, after)

    def fill(target: Path) -> None:
        for policy, folder in zip(policies, folders.values(), strict=True):
            place = target / policy.subfolder
            place.mkdir(parents=True, exist_ok=True)
            _copy(folder, place, policy.base)
        (target / "README.md").write_text(card, encoding="utf-8")

    reporter = Reporter()
    with reporter.bar("publish", announce=True, keep=False):
        make_whole(output, fill)
    for policy in policies:
        if policy.adapter and policy.base is None:
            reporter.say(
                f"warning: {policy.name}: adapter_config.json names a folder of this machine as the base model; "
                "--base-model ORG/NAME replaces it"
            )
        if policy.licence is None:
            reporter.say(f"warning: {policy.name}: the base model's licence is unknown; --license sets one")
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    print(f"{output}: the checkpoint of training step {steps[0]}, {size / 1e6:.1f} MB; nothing was sent")
    print(f"\nnext, after a look at {output / 'README.md'}:\n  hf upload ORG/NAME {shlex.quote(str(output))} .")


def _policy(run: Mapping[str, Any], name: str, folder: Path, alone: bool) -> PublishedPolicy:
    """A policy of the run, with its base model as far as it is known."""
    from creditflow.reports.model_card import PublishedPolicy

    base, licence = _base(_model_path(run, name))
    adapter = (folder / "adapter_config.json").is_file()
    # The subfolder has its name in the checkpoint, which for verl is the policy's.
    subfolder = "" if alone else name if folder.name == "huggingface" else folder.name
    return PublishedPolicy(name, subfolder, adapter, base, licence)


def _model_path(run: Mapping[str, Any], policy: str) -> str | None:
    """`model.path` of a policy in a run's configuration; None for another value."""
    config: Any = run.get("config")
    for keys in (("policies", policy, "model", "path"), ("actor_rollout_ref", "model", "path")):
        value = config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, str):
            return value
    return None


def _base(path: str | None) -> tuple[str | None, str | None]:
    """The hub name and the licence of a base model, where they are known. Uses no network."""
    from creditflow.engines.models.folders import is_hub_name, local_folder

    if path is None or path == "tiny" or path.partition(":")[0].endswith(".py"):
        return None, None
    if path == "smollm2":
        return _SMOLLM2, "apache-2.0"
    name = path if is_hub_name(path) and _HUB_NAME.fullmatch(path) else None
    try:
        return name, _licence_in(local_folder(path, "model.path"))
    except CreditflowError:  # the base model is no longer on this machine
        return name, None


def _licence_in(folder: Path) -> str | None:
    """The licence that a model folder states, in its card or its `origin.json`."""
    from huggingface_hub import ModelCard

    from creditflow.reports.model_card import accepted_licence

    card, origin = folder / "README.md", folder / "origin.json"
    licence: object = None
    try:
        if card.is_file() and card.stat().st_size <= _CARD_SIZE:
            licence = ModelCard(card.read_text(encoding="utf-8"), ignore_metadata_errors=True).data.get("license")
        if licence is None and origin.is_file() and origin.stat().st_size <= _CARD_SIZE:
            stated = json.loads(origin.read_text()).get("licence")
            licence = None if stated == "unknown" else stated
    except Exception:  # the base model's files are foreign, and their licence is then unknown
        return None
    return accepted_licence(licence)


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
