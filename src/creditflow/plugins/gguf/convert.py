"""GGUF files as Hugging Face folders: float32 weights through transformers' reader, tokenizers from the metadata."""

from __future__ import annotations

import hashlib
import io
import json
import math
import shutil
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from importlib import metadata as distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from creditflow._utils.files import alone_in, cache_folder, make_folder, make_whole, remove_unfinished, write_json
from creditflow._utils.huggingface import load_tokenizer, missing_files, quiet
from creditflow._utils.install import install_command
from creditflow._utils.progress import Reporter
from creditflow.errors import InputError, ModelError, first_line
from creditflow.plugins.gguf.tokenizer import (
    byte_level_tokenizer,
    end_tokens,
    finished_tokenizer,
    known_pre_tokenizer,
    warn_of_pre_tokenizer,
)

CONVERSION = 2
"""Version of the conversion; folders of another version are converted again."""
ORIGIN = "origin.json"
"""The file of a converted folder that names its source."""
_UNREAD = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
"""Tensors that change the rotary embedding, and that transformers' reader ignores."""
_SCALED = ("rope.scaling.type", "rope.scale_linear")
"""Keys that change the rotary embedding, and that the reader ignores except for gpt-oss."""


@dataclass(frozen=True, slots=True)
class Source:
    """A GGUF file, and the facts about it that the converted folder states."""

    file: Path
    name: str = ""
    """The model's name; default: the file's."""
    distribution: str = ""
    """The installed distribution that contains the file, with its version; empty if none does."""
    about: str = ""
    """A sentence on the model's authors, for the README."""
    licence: str = ""
    """The text of the licence."""

    @property
    def described(self) -> str:
        """The file's name, its distribution and its size, for messages."""
        origin = f"{self.distribution}, " if self.distribution else ""
        return f"{self.file.name} ({origin}{self.file.stat().st_size / 1e6:.0f} MB)"


@dataclass(frozen=True, slots=True)
class Origin:
    """The content of `origin.json`."""

    file: str
    sha256: str
    distribution: str
    name: str
    licence: str
    architecture: str
    parameters: int
    conversion: int = CONVERSION
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that converted the file."""


def expect_reader() -> None:
    """Raise InputError if the packages that read GGUF files are missing."""
    for name in ("gguf", "accelerate"):
        if find_spec(name) is None:
            raise InputError(f"GGUF needs {name}: {install_command('gguf')}")


def supported_architectures() -> list[str]:
    """The causal language models that the installed transformers reads from GGUF files, by their names there."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    models = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted(name for name in GGUF_SUPPORTED_ARCHITECTURES if name in models or f"{name}_text" in models)


def read_metadata(file: Path) -> dict[str, Any]:
    """The metadata of a GGUF file; raise ModelError for another file.

    Its entry `tensors` holds the bits per weight of each tensor.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        metadata = {name: entry.contents() for name, entry in reader.fields.items()}
        bits = {str(tensor.name): 8 * float(tensor.n_bytes) / int(tensor.n_elements) for tensor in reader.tensors}
        return {**metadata, "tensors": bits}
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, OSError, MemoryError) as error:
        raise ModelError(f"{file} cannot be read as GGUF: {first_line(error)}") from error


def _expect_convertible(file: Path, metadata: Mapping[str, Any]) -> str:
    """The architecture of a GGUF file; raise ModelError if the converted model would be missing or wrong."""
    import transformers

    architecture = str(metadata.get("general.architecture", ""))
    plain = {name.replace("_", ""): name for name in supported_architectures()}
    if architecture.replace("-", "").replace("_", "") not in plain:
        raise ModelError(
            f"{file}: expected an architecture that transformers {transformers.__version__} reads from GGUF files "
            f"({', '.join(plain.values())}), got {architecture or 'none'!r}"
        )
    names = ("model", "tokens", *["merges"] * (metadata.get("tokenizer.ggml.model") == "gpt2"))
    if absent := [key for name in names if (key := f"tokenizer.ggml.{name}") not in metadata]:
        raise ModelError(f"{file}: expected a tokenizer, got none ({absent[0]} is missing)")
    ignored = sorted(_UNREAD.intersection(metadata["tensors"]))
    if architecture != "gpt-oss":
        scalings = ((key, metadata.get(f"{architecture}.{key}")) for key in _SCALED)
        ignored += [f"{architecture}.{key}={value}" for key, value in scalings if value not in (None, "none", 1.0)]
    if ignored:
        raise ModelError(
            f"{file}: its rotary embedding is scaled ({', '.join(ignored)}), which transformers' reader ignores, so "
            "the converted model would differ; use the original weights: hf download ORG/NAME"
        )
    return architecture


def convert(source: Source, target: Path) -> Origin:
    """Write a GGUF file as a Hugging Face folder; `target` appears when it is complete.

    Raises ModelError for files in another format, or of an architecture that transformers does not read, and InputError
    if a package is missing or `target` holds something else. Warns of an unknown pre-tokenizer.
    """
    expect_reader()
    if target.resolve() == Path.cwd():
        raise InputError("FOLDER: expected a new folder, got the working directory")
    metadata = read_metadata(source.file)
    architecture = _expect_convertible(source.file, metadata)
    make_folder(target.parent, "FOLDER")
    with alone_in(target.parent):  # another process would do the same work again
        if origin := converted(source, target):
            return origin
        remove_unfinished(target)
        make_whole(target, lambda folder: _fill(folder, source, metadata, architecture))
    origin = converted(source, target)
    assert origin is not None
    return origin


def converted(source: Source, target: Path) -> Origin | None:
    """The origin of `target` if it is the converted source, and None if the folder is missing or empty.

    Raises InputError if there is something else, or if a file is missing.
    """
    origin = origin_of(target)
    if origin is not None and origin.sha256 == sha256_of(source.file):
        if absent := missing_files(target):
            raise InputError(f"{target} is incomplete: {absent[0]} is missing; remove the folder to convert it again")
        return origin
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} exists, and holds something else; name a new folder, or remove this one first")
    return None


def cached(source: Source) -> Path:
    """The source as a folder in the user's cache, converted at the first call. Its name contains the content's hash.

    Prints a line before it converts, on standard error.
    """
    target = cache_folder() / f"{source.file.stem}-{sha256_of(source.file)[:12]}-{CONVERSION}"
    if missing_files(target):
        shutil.rmtree(target, ignore_errors=True)  # damaged; the cache is not the user's
    if converted(source, target) is None:
        Reporter().say(f"converting {source.described} once, into {target}")
        convert(source, target)
    return target


def origin_of(folder: Path) -> Origin | None:
    """The origin of a converted folder; None for any other folder, or if another version converted it."""
    try:
        origin = Origin(**json.loads((folder / ORIGIN).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return origin if origin.conversion == CONVERSION else None


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file's content."""
    status = file.stat()
    return _sha256(file.resolve(), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=32)
def _sha256(file: Path, size: int, changed: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _fill(folder: Path, source: Source, metadata: Mapping[str, Any], architecture: str) -> None:
    with quiet(), redirect_stderr(io.StringIO()):  # the reader shows its own progress bar
        model = _load_model(source.file)
        _tie_embeddings(model, metadata["tensors"])
        tokenizer = _load_tokenizer(source.file, metadata, model.config)
    _name_special_tokens(model, tokenizer, metadata)
    with quiet():
        model.save_pretrained(folder, safe_serialization=True)
        tokenizer.save_pretrained(folder)
    _expect_same_tokens(folder, tokenizer)
    origin = Origin(
        file=source.file.name,
        sha256=sha256_of(source.file),
        distribution=source.distribution,
        name=source.name or source.file.stem,
        licence=str(metadata.get("general.license", "unknown")),
        architecture=architecture,
        parameters=model.num_parameters(),
        versions={name: distributions.version(name) for name in ("transformers", "gguf", "creditflow")},
    )
    if source.licence:
        (folder / "LICENSE").write_text(source.licence)
    (folder / "README.md").write_text(_readme(origin, source))
    write_json(folder / ORIGIN, asdict(origin))


def _load_model(file: Path) -> Any:
    import transformers

    # Newer versions of transformers can keep the file's blocks, which they cannot save.
    config = getattr(transformers, "GgufConfig", None)
    dequantized = {"quantization_config": config(dequantize=True)} if config else {}
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **dequantized,
        )
    except (OSError, ValueError, LookupError, TypeError, NotImplementedError, RuntimeError, AttributeError) as error:
        raise ModelError(f"{file} cannot be converted by transformers: {first_line(error)}") from error
    lacking = [*info["missing_keys"], *map(str, info["mismatched_keys"])]
    if lacking:
        raise ModelError(f"{file} lacks weights, or transformers does not find them: {', '.join(sorted(lacking)[:3])}")
    return model


def _tie_embeddings(model: Any, bits: Mapping[str, float]) -> None:
    """Tie the embeddings of a model whose file stores them twice, and keep the finer copy.

    Some files of tied models have an output matrix too, quantized differently. A matrix that differs from the
    embeddings by more than rounding in any element stays apart.
    """
    input_bits, output_bits = bits.get("token_embd.weight"), bits.get("output.weight")
    if model.config.tie_word_embeddings or input_bits is None or output_bits is None:
        return
    table, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    are_copies = partial(_are_copies, bits=(input_bits, output_bits))
    if table.shape == head.shape and all(map(are_copies, table.split(4096), head.split(4096))):
        if output_bits > input_bits:
            table.copy_(head)
        model.config.tie_word_embeddings = True
        model.tie_weights()


def _are_copies(first: torch.Tensor, second: torch.Tensor, bits: tuple[float, float]) -> bool:
    """Whether two dequantized matrices are copies of one, element by element. `bits`: their bits per weight.

    Copies of one type agree within the rounding of bfloat16. Those of two types may also differ by half the step of
    each copy's block, and by a whole one near its largest value: of 16 codes from -8 to 7, the last also stands for 8.
    """
    bound = 2**-8 * first.abs().maximum(second.abs()) + 2**-24  # the rounding of bfloat16, and of float16 near 0
    for weights, size in zip((first, second), bits, strict=True):
        if size < 16 and bits[0] != bits[1]:
            blocks = weights.abs().reshape(len(weights), -1, 32)
            largest = blocks.amax(2, keepdim=True)
            step = 2 * largest / (2 ** (math.ceil(size) - 1) - 1)  # the scales take the rest of a weight's bits
            # The last term is for the rounding of scales to float16.
            bound += (torch.where(blocks > largest - 1.1 * step, step, step / 2) + 2**-9 * largest).flatten(1)
    return bool(((first - second).abs() <= bound).all())


def _load_tokenizer(file: Path, metadata: Mapping[str, Any], config: Any) -> Any:
    """The tokenizer of a GGUF file: from its metadata if the vocabulary is byte-level, else by transformers."""
    longest = getattr(config, "max_position_embeddings", None)
    if metadata["tokenizer.ggml.model"] != "gpt2":
        return finished_tokenizer(_converted_tokenizer(file, metadata), metadata, longest)
    pre_tokenizer = known_pre_tokenizer(metadata)
    if pre_tokenizer is None:
        pre_tokenizer = _converted_tokenizer(file, metadata).pre_tokenizer
        warn_of_pre_tokenizer(metadata)
    return finished_tokenizer(byte_level_tokenizer(metadata, pre_tokenizer), metadata, longest)


def _converted_tokenizer(file: Path, metadata: Mapping[str, Any]) -> Any:
    """The tokenizer (of the tokenizers library) that transformers makes of a GGUF file."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True, trust_remote_code=False
        ).backend_tokenizer
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        kind = f"{metadata['tokenizer.ggml.model']}, {metadata.get('tokenizer.ggml.pre', 'no pre-tokenizer')}"
        why = f"transformers cannot convert its tokenizer ({kind}): {first_line(error)}"
        raise ModelError(f"{file}: {why}") from error


def _name_special_tokens(model: Any, tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    """Set the special tokens of the model's configurations to the tokenizer's."""
    from transformers import GenerationConfig

    ends = end_tokens(tokenizer, metadata)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, id in ids.items():
        setattr(model.config, name, id)
    model.config.name_or_path = ""
    model.generation_config = GenerationConfig(**ids)


_PROBES = (
    "Solve 12 + 345 = 357.\n\n  Then, it's done!\t",
    "def f(x):\n    return x * 2  # naïve\r\n",
    "Ünïcödé, 数字, العربية ١٢٣, हिन्दी १२३, 🙂 don't DON'T",
)


def _expect_same_tokens(folder: Path, tokenizer: Any) -> None:
    """Raise ModelError if the saved tokenizer splits texts differently from `tokenizer`.

    For some architectures transformers replaces the tokenizer of a folder by its own.
    """
    saved = load_tokenizer(folder, "GGUF")
    before, after = tokenizer.backend_tokenizer, saved.backend_tokenizer
    differ = [f"other tokens for {text!r}" for text in _PROBES if before.encode(text).ids != after.encode(text).ids]
    if len(saved) != len(tokenizer):
        differ.append(f"{len(saved)} tokens, not {len(tokenizer)}")
    if differ:
        raise ModelError(
            f"GGUF: for this architecture transformers loads the tokenizer as {type(saved).__name__}, with "
            f"{differ[0]}; use the original folder: hf download ORG/NAME"
        )


def _readme(origin: Origin, source: Source) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in origin.versions.items())
    licence = f"{origin.licence}{' (LICENSE)' if source.licence else ''}"
    lines = [
        f"# {origin.name}",
        "",
        *([source.about, ""] if source.about else []),
        f"* source: {origin.file}{f' in {origin.distribution}' if origin.distribution else ''}",
        f"* SHA-256 of the source: {origin.sha256}",
        f"* licence: {licence}",
        f"* parameters: {origin.parameters:,} in float32, dequantized from the source",
        f"* converted by: {packages}",
        "",
    ]
    return "\n".join(lines)
