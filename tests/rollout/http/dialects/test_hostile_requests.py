"""Hostile requests of every dialect: each ends in its answer, or in a 4xx in the dialect's own format."""

import asyncio
import json
import threading

import httpx
import pytest
from anthropic.types.shared import ErrorResponse
from hypothesis import given
from hypothesis import strategies as st

from creditflow.rollout import Scheduler
from creditflow.rollout.http.dialects import DIALECTS
from creditflow.rollout.http.server import OpenAIServer
from tests.builders import examples
from tests.rewards.processes import HANG_S
from tests.rollout.http.dialects.clients import (
    CHAT_TOOL,
    MESSAGE_TOOL,
    RESPONSE_TOOL,
    anthropic_messages,
    chat_messages,
    response_items,
)
from tests.rollout.http.test_server import CALL, Templated, recorder_for

TURNS = [("user", "x"), ("assistant", "", [("c", "f", {"a": [1]})]), ("tool", "c", "3")]
BODIES = {
    "openai_chat": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}, *chat_messages(None, TURNS)],
        "tools": [CHAT_TOOL],
        "metadata": {"mine": 1},
        "stop": ["zz"],
    },
    "openai_responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}, *response_items(TURNS)],
        "instructions": "x",
        "tools": [RESPONSE_TOOL],
        "include": ["message.output_text.logprobs"],
        "text": {"format": {"type": "text"}},
        "metadata": {"mine": 1},
    },
    "anthropic_messages": {
        "max_tokens": 9,
        "system": [{"type": "text", "text": "x"}],
        "messages": anthropic_messages(TURNS),
        "tools": [MESSAGE_TOOL],
        "tool_choice": {"type": "auto"},
        "output_config": {"effort": "low"},
        "metadata": {"mine": 1},
    },
}
RAW = {
    "@huge": "1" + "0" * 5000,
    "@big": "1" + "0" * 400,
    "@infinite": "1e999",
    "@nan": "NaN",
    "@surrogate": '"\\ud800"',
    "@nul": '"\\u0000"',
    "@deep": "[" * 150 + "]" * 150,
    "@deeper": '{"a":' * 300 + "1" + "}" * 300,
    "@abyss": "[" * 100_000,
}
"""Values that Python's encoder does not write, by placeholder."""
VALUES = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1 << 31, 1 << 63, 1e308, "", "x" * 1000, [], {}, *RAW]),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
        max_leaves=6,
    ),
)


def places(value, place=()):
    """Yield the paths to all values of a body."""
    yield place
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from places(inner, (*place, key))


def changed(body, place, value):
    if not place:
        return value
    copy = dict(body) if isinstance(body, dict) else list(body)
    copy[place[0]] = changed(copy[place[0]], place[1:], value)
    return copy


WORDS = (
    "stream temperature n tool_choice type role content previous_response_id tools text thinking metadata tool_calls "
    "id name max_tokens stop seed reasoning cache_control"
)
NAMES = st.sampled_from(WORDS.split())


@st.composite
def hostile(draw, dialect: str) -> bytes:
    """Return a valid body with a few values replaced, removed or added."""
    body = {"model": "writer", **BODIES[dialect]}
    for _ in range(draw(st.integers(1, 2))):
        place = draw(st.sampled_from(sorted(places(body), key=repr)))
        inner = body
        for key in place:
            inner = inner[key]
        if isinstance(inner, dict) and draw(st.booleans()):
            value = {**inner, draw(NAMES): draw(VALUES)}
        else:
            value = draw(VALUES)
        body = changed(body, place, value)
    text = json.dumps(body)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


@pytest.fixture(scope="module")
def session():
    """A rollout on a separate event loop, open to clients."""
    server, loop = OpenAIServer().start(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    scheduler = Scheduler({"default": Templated(lambda prompt: CALL)})
    yield server.open(recorder_for(scheduler), loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.stop()
    loop.close()


def answer_of(session, dialect: str, body: bytes) -> httpx.Response:
    headers = {"Authorization": f"Bearer {session.api_key}"}
    return httpx.post(f"{session.base_url}{DIALECTS[dialect].path}", content=body, headers=headers, timeout=HANG_S)


@pytest.mark.parametrize("dialect", sorted(BODIES))
def test_unchanged_body_is_answered(session, dialect):
    assert answer_of(session, dialect, json.dumps({"model": "writer", **BODIES[dialect]}).encode()).status_code == 200


@pytest.mark.parametrize("dialect", sorted(BODIES))
@examples(150)
@given(data=st.data())
def test_changed_body_ends_in_an_answer_or_a_refusal(session, dialect, data):
    answer = answer_of(session, dialect, data.draw(hostile(dialect)))
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text[:300]
    if answer.status_code == 200:
        return
    if dialect == "anthropic_messages":
        ErrorResponse.model_validate_json(answer.content, strict=True)
    else:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
