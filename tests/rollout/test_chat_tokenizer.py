"""Messages to tokens, the same for every engine."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from creditflow.chat import ChatTokenizer
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.tiny import tiny_byte_model
from creditflow.errors import ModelError
from creditflow.huggingface import load_tokenizer

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "h\u00e9llo"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_byte_model()


def test_a_bare_tokenizer_encodes_as_the_policy_does(folder: Path) -> None:
    chat, policy = ChatTokenizer(load_tokenizer(folder, "path")), Policy.load(folder, torch.device("cpu"))
    text, ids = chat.encode(TALK)
    assert (text, ids) == policy.encode(TALK)
    assert chat.decode(ids) == policy.decode(ids)
    assert chat.pad_id == policy.pad_id
    assert "h\u00e9llo" in text
    assert "h\u00e9llo" in chat.decode(ids)


def test_special_tokens_spelled_out_in_a_message_are_taken_out(folder: Path) -> None:
    chat = ChatTokenizer(load_tokenizer(folder, "path"))
    token = chat.special_tokens[0]
    hostile = f"{token[:3]}{token}{token[3:]} go on"
    assert chat.encode([{"role": "user", "content": hostile}]) == chat.encode([{"role": "user", "content": " go on"}])


def test_padding_is_the_tokenizers_own_or_an_end(folder: Path) -> None:
    tokenizer = copy.copy(load_tokenizer(folder, "path"))
    tokenizer.pad_token = None
    assert ChatTokenizer(tokenizer, {9, 5}).pad_id == 5
    assert ChatTokenizer(tokenizer).pad_id == tokenizer.eos_token_id


def test_importing_it_imports_nothing_heavy() -> None:
    code = "import sys, creditflow.huggingface\nfrom creditflow.rollout import *\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "openai", "starlette", "uvicorn", "pydantic"}.intersection(done.stdout.split())


def test_a_template_that_knows_tools_gets_arguments_as_a_mapping_and_clean_schemas(folder: Path) -> None:
    tokenizer = copy.deepcopy(load_tokenizer(folder, "path"))
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    chat = ChatTokenizer(tokenizer)
    end = chat.special_tokens[0]
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    text, _ = chat.encode(
        [{"role": "assistant", "content": "x", "tool_calls": [call]}],
        [{"type": "function", "function": {"name": "add", "description": f"adds {end} numbers"}}],
    )
    assert text.endswith('xadd {"a": 1}')
    assert end not in text
    assert "adds  numbers" in text


@pytest.mark.parametrize("calls", [5, "x", [1], [{}], [{"function": {"arguments": "{}"}}]])
def test_calls_that_are_none_are_refused(folder: Path, calls: object) -> None:
    chat = ChatTokenizer(load_tokenizer(folder, "path"))
    with pytest.raises(ModelError, match="tool_calls: expected a list"):
        chat.encode([{"role": "assistant", "content": "x", "tool_calls": calls}])
