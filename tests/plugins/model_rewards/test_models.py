import asyncio
import gc
import json
import shutil
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from creditflow.errors import ModelError
from creditflow.plugins.model_rewards.models import (
    Batcher,
    LoadedModel,
    attempt,
    by_length,
    cut_prompt,
    load_model,
    stamp,
)
from tests.plugins.model_rewards.tiny_models import bpe_tokenizer, save_causal, save_classifier
from tests.rewards.processes import HANG_S

BPE = bpe_tokenizer()


def load(folder: Path | str, kind: str, device: str = "auto") -> LoadedModel:
    return load_model(folder, kind, device)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_causal(tmp_path_factory.mktemp("causal"), BPE)


def test_folder_is_loaded_once_while_in_use(causal: Path) -> None:
    one, again = load(causal, "causal"), load(str(causal) + "/../" + causal.name, "causal", "cpu")
    assert one is again
    assert one.model.dtype == torch.float32
    assert not one.model.training
    assert not any(parameter.requires_grad for parameter in one.model.parameters())
    kept = weakref.ref(one.model)
    del one
    gc.collect()
    assert load(causal, "causal") is again
    assert kept() is not None
    del again
    gc.collect()
    assert kept() is None


def test_missing_parts_of_a_folder_are_named(causal: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"path: .* is not a Hugging Face model folder"):
        load(tmp_path, "causal")
    with pytest.raises(ModelError, match=r"lacks weights of a token classification model: score\."):
        load(causal, "token_classification")
    bare = Path(shutil.copytree(causal, tmp_path / "bare"))
    (bare / "model.safetensors").unlink()
    torch.save({}, bare / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"cannot be loaded: .*safetensors"):
        load(bare, "causal")


def test_code_of_a_folder_is_never_run(causal: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(causal, tmp_path / "code"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "ours", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\nclass M: pass\n")
    with pytest.raises(ModelError, match=r"has no usable config\.json"):
        load(folder, "causal")
    assert not (tmp_path / "ran").exists()


def test_batches_respect_row_and_token_limits() -> None:
    lengths = [5, 90, 7, 6, 40, 41, 5, 300]
    batches = by_length(lengths, max_rows=3, max_tokens=100)
    assert sorted(i for batch in batches for i in batch) == list(range(8))
    assert [[lengths[i] for i in batch] for batch in batches] == [[5, 5, 6], [7, 40], [41], [90], [300]]


def test_prompt_is_cut_after_the_kept_tokens() -> None:
    assert cut_prompt([0, 1, 2, 3, 4], n_response=3, limit=8) == [0, 1, 2, 3, 4]
    assert cut_prompt([0, 1, 2, 3, 4], n_response=4, limit=8) == [1, 2, 3, 4]
    assert cut_prompt([0, 1, 2, 3, 4], n_response=4, limit=8, keep=1) == [0, 2, 3, 4]
    assert cut_prompt([0, 1, 2, 3, 4], n_response=7, limit=8, keep=1) == [0]
    with pytest.raises(ValueError, match="the response has 8 tokens for the model, which takes 7"):
        cut_prompt([0, 1], n_response=8, limit=8)


def test_text_by_a_model_cannot_spell_special_tokens(tmp_path: Path) -> None:
    loaded = load(save_classifier(tmp_path, BPE, bos="<s>"), "token_classification")
    assert loaded.encode("a<|end|>", written_by_a_model=False)[0] == [BPE.encode("a").ids[0], 0]
    ids, ends = loaded.encode("a<|end|>", written_by_a_model=True)
    assert 0 not in ids
    assert BPE.decode(ids) == "a<|end|>"
    assert ends[-1] == 8
    assert loaded.encode_prompt("a<|end|>") == ([1, BPE.encode("a").ids[0], 0], 1)
    assert loaded.encode_prompt("<s>a") == ([1, BPE.encode("a").ids[0]], 1)


def test_half_of_a_surrogate_pair_is_read_as_a_question_mark(causal: Path) -> None:
    model = load(causal, "causal")
    for broken, read in (("the \ud83d sum", "the ? sum"), ("\ud83d\ude42", "??")):
        assert model.encode(broken, written_by_a_model=True) == model.encode(read, written_by_a_model=True)


def test_stamp_changes_with_the_model(tmp_path: Path) -> None:
    save_causal(tmp_path, BPE, seed=0)
    first = stamp(tmp_path)
    assert first == stamp(tmp_path)
    time.sleep(0.01)  # file systems have a resolution of milliseconds at worst
    save_causal(tmp_path, BPE, seed=1)
    assert stamp(tmp_path) != first


class Doubler:
    """Doubles numbers, and records its batches and threads."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.threads: set[int] = set()

    def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.threads.add(threading.get_ident())
        if -1 in items:
            raise ZeroDivisionError("minus one")
        return [2 * item for item in items]


def test_concurrent_calls_form_one_batch_in_another_thread() -> None:
    doubler = Doubler()
    batcher = Batcher(doubler)

    async def late(n: int) -> int:
        await asyncio.sleep(0)
        return await batcher(n)

    async def main() -> list[int]:
        cancelled = asyncio.create_task(batcher(-1))
        asyncio.get_running_loop().call_soon(cancelled.cancel)
        return await asyncio.gather(*(batcher(n) for n in range(50)), late(50))

    assert asyncio.run(main()) == [2 * n for n in range(51)]
    assert doubler.batches == [list(range(51))]
    assert threading.get_ident() not in doubler.threads


def test_calls_during_a_batch_form_the_next_one() -> None:
    """A call that is cancelled during its batch spares the others of it."""
    started, go = threading.Event(), threading.Event()
    batches: list[list[int]] = []

    def compute(items: list[int]) -> list[int]:
        batches.append(items)
        started.set()
        assert go.wait(HANG_S)
        return items

    batcher = Batcher(compute)

    async def main() -> list[int]:
        cancelled, first = asyncio.create_task(batcher(0)), asyncio.create_task(batcher(1))
        assert await asyncio.to_thread(started.wait, HANG_S)
        cancelled.cancel()
        others = [asyncio.create_task(batcher(n)) for n in (2, 3)]
        await asyncio.sleep(0)
        go.set()
        return [await task for task in (first, *others)]

    assert asyncio.run(main()) == [1, 2, 3]
    assert batches == [[0, 1], [2, 3]]


def test_error_of_a_batch_reaches_only_its_callers() -> None:
    batcher = Batcher(Doubler())

    async def main() -> tuple[list[int | BaseException], int]:
        return await asyncio.gather(batcher(-1), batcher(1), return_exceptions=True), await batcher(1)

    failed, fine = asyncio.run(main())
    assert [str(error) for error in failed] == ["minus one", "minus one"]
    assert fine == 2


def test_error_in_place_of_a_result_reaches_only_its_caller() -> None:
    batcher = Batcher[int, int](lambda items: [attempt(int, f"{n}" if n else "none") for n in items])

    async def main() -> list[int | BaseException]:
        return await asyncio.gather(*(batcher(n) for n in range(3)), return_exceptions=True)

    failed, *fine = asyncio.run(main())
    assert isinstance(failed, ValueError)
    assert fine == [1, 2]


def test_batcher_serves_event_loops_in_several_threads() -> None:
    batcher = Batcher(Doubler())

    async def many(k: int) -> list[int]:
        return [await batcher(100 * k + n) for n in range(20)]

    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda k: asyncio.run(many(k)), range(1, 4)))
    assert results == [[2 * (100 * k + n) for n in range(20)] for k in range(1, 4)]


def test_batcher_serves_successive_event_loops() -> None:
    batcher = Batcher(Doubler())

    async def broken_off() -> None:
        asyncio.create_task(batcher(1))  # noqa: RUF006 (the loop ends before it does: that is the case)
        await asyncio.sleep(0)

    for n in range(3):
        asyncio.run(broken_off())
        assert asyncio.run(batcher_once(batcher, n)) == 2 * n
    assert not batcher._pending
    assert not batcher._dispatching


async def batcher_once(batcher: Batcher[int, int], n: int) -> int:
    return await batcher(n)
