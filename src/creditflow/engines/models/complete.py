"""Whether a model folder has all of its files."""

from __future__ import annotations

import json
from pathlib import Path

_WHOLE = ("model.safetensors", "pytorch_model.bin")


def is_gguf(file: Path) -> bool:
    """Whether the name is that of a GGUF file."""
    return file.suffix.lower() == ".gguf"


def missing_files(folder: Path) -> list[str]:
    """The missing files of a Hugging Face folder: its configuration, and the weights in one file or in parts.

    An index of parts that cannot be read counts as missing. Empty for a folder that does not exist or has no file, and
    for one with a GGUF file.
    """
    files = {file.name for file in folder.iterdir()} if folder.is_dir() else set[str]()
    if not files or any(is_gguf(Path(name)) for name in files):
        return []
    expected = ["config.json"]
    for whole in _WHOLE:
        if f"{whole}.index.json" in files:
            try:
                index = json.loads((folder / f"{whole}.index.json").read_text())
                parts = sorted({str(part) for part in index["weight_map"].values()})
            except (ValueError, LookupError, TypeError, AttributeError):
                return [f"{whole}.index.json"]
            return [name for name in (*expected, *parts) if name not in files]
    if not any(name in files for name in _WHOLE):
        expected.append(_WHOLE[0])
    return [name for name in expected if name not in files]
