"""A frozen model with its tokenizer, called in batches."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from creditflow._utils.huggingface import Kind, load_folder, position_limit
from creditflow._utils.sections import expected
from creditflow.errors import CreditflowError, ModelError

Item = TypeVar("Item")
Result = TypeVar("Result")
Device = Annotated[Literal["auto", "cpu", "cuda"], expected("auto, cpu, cuda")]

MAX_BATCH_TOKENS = 16_384
"""Tokens of one batch, padding included; a longer row forms a batch alone."""

_QUIET_TURNS = 3
"""Event loop turns without a new call after which a batch starts; as in `rollout.scheduler`."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class LoadedModel:
    """A frozen model with its tokenizer; float32 on the CPU, bf16 on CUDA."""

    folder: Path
    model: Any
    tokenizer: Any
    device: Any
    max_positions: int
    """Maximum tokens of one row."""
    pad_id: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held during each use of model or tokenizer: fast tokenizers must not be called by two threads at a time."""

    def encode(self, text: str, *, written_by_a_model: bool) -> tuple[list[int], list[int]]:
        """The tokens of `text`, without added ones, and the position in the text at which each ends.

        `written_by_a_model`: special tokens spelled out in the text are read as text, so that it cannot forge the
        format. Halves of surrogate pairs, which no tokenizer can encode, are read as `?`. Raises ModelError if the
        tokenizer has no offsets (one without a tokenizer.json).
        """
        if not self.tokenizer.is_fast:
            raise ModelError(f"{self.folder} has a tokenizer without offsets; save it as tokenizer.json")
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        text = text.encode("utf-8", "replace").decode()
        encoded = self.tokenizer(text, split_special_tokens=written_by_a_model, **options)
        return list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]

    def encode_prompt(self, text: str) -> tuple[list[int], int]:
        """The tokens of a prompt, led by the beginning-of-sequence token if there is one, and its count (0 or 1)."""
        ids, _ = self.encode(text, written_by_a_model=False)
        bos = self.tokenizer.bos_token_id
        if bos is None:
            return ids, 0
        return (ids if ids[:1] == [bos] else [int(bos), *ids]), 1


_LOADED: weakref.WeakValueDictionary[tuple[Path, Kind, str], LoadedModel] = weakref.WeakValueDictionary()
_LOADING = threading.Lock()


def load_model(folder: Path | str, kind: Kind, device: str = "auto") -> LoadedModel:
    """The model in a Hugging Face folder; the same object for the same arguments while it is in use.

    Reads safetensors and local files only, and runs no code from the folder. `device`: `auto` is CUDA if available.
    Raises ModelError that names the missing part.
    """
    import torch

    path = Path(folder).resolve()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cuda = device.startswith("cuda")
    if on_cuda and not torch.cuda.is_available():
        raise ModelError(f"{path}: device cuda was asked for, but torch sees no CUDA device")
    with _LOADING:  # concurrent callers must not load it twice
        if (loaded := _LOADED.get((path, kind, device))) is None:
            model, tokenizer = load_folder(path, kind, "path", torch.bfloat16 if on_cuda else torch.float32)
            model.to(device).eval().requires_grad_(False)
            model.config.use_cache = False
            limit = min(position_limit(model.config).tokens, int(tokenizer.model_max_length))
            pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
            loaded = LoadedModel(path, model, tokenizer, torch.device(device), limit, int(pad))
            _LOADED[path, kind, device] = loaded
    return loaded


def model_folder(path: object, argument: str) -> Path:
    """Check that an argument names the folder of a model; raises ValueError if not.

    Only looks for config.json: cheap enough for the loading of a recipe.
    """
    if not isinstance(path, str | Path) or not (Path(path) / "config.json").is_file():
        raise ValueError(f"{argument}: expected a Hugging Face folder, {path!r} is none (no config.json)")
    return Path(path)


def stamp(folder: Path) -> str:
    """Names, sizes and times of the files in `folder`; a different model there has a different stamp."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return " ".join(f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files)


def cut_prompt(prompt_ids: Sequence[int], n_response: int, limit: int, keep: int = 0) -> list[int]:
    """The prompt, cut from the left (after its first `keep` tokens) so that a response of `n_response` tokens fits.

    Raises ValueError if the response alone is too long. At least one token is left, from which the first response token
    is predicted.
    """
    room = limit - n_response
    if room < max(1, keep):
        raise ValueError(f"the response has {n_response} tokens for the model, which takes {limit - max(1, keep)}")
    if len(prompt_ids) <= room:
        return list(prompt_ids)
    return [*prompt_ids[:keep], *prompt_ids[len(prompt_ids) - room + keep :]]


def by_length(lengths: Sequence[int], max_rows: int, max_tokens: int = MAX_BATCH_TOKENS) -> list[list[int]]:
    """Group row indices into batches of similar length: at most `max_rows` rows, and `max_tokens` when padded."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and len(batches[-1]) < max_rows and lengths[i] * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def padded(loaded: LoadedModel, rows: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Token ids and attention mask of rows, padded on the right, on the model's device."""
    import torch

    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[loaded.pad_id] * (width - len(row))] for row in rows], device=loaded.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=loaded.device)
    return ids, mask


class Batcher(Generic[Item, Result]):
    """Turns concurrent `await batcher(item)` into few calls of a function that takes many items.

    A batch starts when the event loop has gone quiet, so that all possible calls have arrived. Calls that arrive while
    a batch runs join the next one. The loop stays free meanwhile. One batcher serves any number of event loops.
    """

    def __init__(self, compute: Callable[[list[Item]], Sequence[Result | Exception]]) -> None:
        """`compute`: one result for each item, in order; called in a thread.

        An exception in place of a result is raised in the item's caller, and one that `compute` raises in all callers.
        """
        self._compute = compute
        self._pending: dict[asyncio.AbstractEventLoop, list[tuple[Item, asyncio.Future[Result]]]] = {}
        """The calls of each event loop that wait for a batch."""
        self._dispatching: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}

    async def __call__(self, item: Item) -> Result:
        """The item's result; returns when its batch is done."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._pending.setdefault(loop, []).append((item, future))
        if loop not in self._dispatching or self._dispatching[loop].done():
            self._dispatching[loop] = loop.create_task(self._dispatch(loop))
        return await future

    async def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        try:
            while pending := self._pending.get(loop):
                quiet, seen = 0, 0
                while quiet < _QUIET_TURNS:
                    quiet = quiet + 1 if len(pending) == seen else 0
                    seen = len(pending)
                    await asyncio.sleep(0)
                batch = [(item, future) for item, future in self._pending.pop(loop) if not future.done()]
                if batch:
                    await self._run(batch)
        finally:  # no await since nothing was pending, so no call can have come
            self._dispatching.pop(loop, None)
            for _, future in (*batch, *self._pending.pop(loop, ())):
                future.cancel()  # has no effect on futures that are done

    async def _run(self, batch: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        results: Sequence[Result | Exception]
        try:
            results = await asyncio.to_thread(self._compute, [item for item, _ in batch])
        except Exception as error:  # handed to every caller
            results = [error] * len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():  # its caller was cancelled meanwhile
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


def attempt(make: Callable[..., Result], *arguments: Any) -> Result | Exception:
    """Return the error of one item as a result, so that the rest of its batch is not affected."""
    try:
        return make(*arguments)
    except (ValueError, CreditflowError) as error:
        return error
