"""OpenAI's wire format: the fields of a request, refused and ignored fields, and the ids in an answer."""

import json

import pytest

from creditflow.config import load_recipe
from creditflow.engines.common.components import build_components
from creditflow.errors import ConfigError
from creditflow.rollout import AgentSpec
from creditflow.rollout.http.dialects.openai_chat import ChatRequest
from creditflow.rollout.http.requests import parsed
from creditflow.rollout.tools import Tool
from tests.rollout.http.test_server import (
    CALL,
    HELLO,
    TOOL,
    Answers,
    Templated,
    answered,
    chat,
    once,
    run_workflow,
    user,
    with_client,
)
from tests.rollout.test_chat_tokenizer import CLIENTS, PARQUET
from tests.test_examples import FOLDER


def asked(**fields) -> ChatRequest:
    return parsed(ChatRequest, json.dumps({"model": "writer", "messages": HELLO, **fields}).encode())


# Messages


@pytest.mark.parametrize("nulls", [CLIENTS, PARQUET, {"tool_calls": []}])
def test_null_keys_of_clients_are_accepted(nulls):
    reply = {"role": "assistant", "content": "x", **nulls}
    assert asked(messages=[*HELLO, reply]).asked().messages == [*HELLO, {"role": "assistant", "content": "x"}]


def test_ignored_fields_are_recorded_with_the_step():
    async def ask(client):
        more = {"messages": HELLO, "extra_body": {"never_heard_of": 1, "user": "me", "top_k": 3, "min_p": 0.0}}
        await client.chat.completions.create(model="writer", **more, metadata={"mine": "1"})
        await chat(client)

    made = once(ask, agents={"writer": AgentSpec(ignored_fields=frozenset(["top_k"]))})
    infos = [step.info for step in made.steps]
    assert infos == [{"mine": "1", "ignored": ["never_heard_of", "top_k", "user"]}, {}]


def test_disabled_parallel_tool_calls_are_noted_as_ignored():
    answer, trajectory = answered(Answers(lambda prompt: CALL * 2), tools=[TOOL], parallel_tool_calls=False)
    (step,) = trajectory.steps
    assert len(answer.choices[0].message.tool_calls) == 1
    assert (step.response, step.info["ignored"]) == (CALL * 2, ["parallel_tool_calls"])


def test_recipe_sets_ignored_fields():
    recipe = load_recipe(FOLDER / "recipe.yaml", ["team.ignored_fields=[response_format,tool_choice]"])
    agents = build_components(recipe).agents
    assert {spec.ignored_fields for spec in agents.values()} == {frozenset(["response_format", "tool_choice"])}
    for wrong, meant in (("reponse_format", r" \(did you mean 'response_format'\?\)"), ("temperature", "")):
        with pytest.raises(ConfigError, match=f"^team.ignored_fields: '{wrong}' is no field that is refused{meant}"):
            load_recipe(FOLDER / "recipe.yaml", [f"team.ignored_fields=[{wrong}]"])


# Tools


def test_tool_choice_none_hides_the_agents_tools():
    def add(a: int) -> str:
        raise AssertionError("it was called")

    agents = {"writer": AgentSpec(tools=(Tool.from_function(add),))}
    _, trajectory = answered(Templated(lambda prompt: CALL), agents, tool_choice="none")
    assert "add" not in trajectory.steps[0].prompt
    assert "tool_calls" not in trajectory.steps[0].info


def test_tool_call_of_another_rollout_is_not_a_parent():
    ids = []

    async def ask(client):
        for text in ("one", "two"):
            answer = await chat(client, messages=user(text), tools=[TOOL])
            ids.append(answer.choices[0].message.tool_calls[0].id)
        result = {"role": "tool", "tool_call_id": ids[0], "content": "3"}
        call = {"id": ids[0], "type": "function", "function": {"name": "add", "arguments": "{}"}}
        messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
        await chat(client, messages=messages, tools=[TOOL])

    model, agents = Templated(lambda prompt: CALL), {"writer": AgentSpec()}
    made = run_workflow(with_client(ask), model, agents, n=2)
    assert len(set(ids)) == 4
    assert sorted(trajectory.steps[2].parents for trajectory in made) == [(0,), (1,)]


# Log-probs


@pytest.mark.parametrize("temperature", [1, 0])
def test_log_probs_exclude_tool_results(temperature):
    def add(a: int) -> str:
        return "forty two"

    model = Templated(lambda prompt: "done" if "forty" in prompt else CALL)
    agents = {"writer": AgentSpec(tools=(Tool.from_function(add),))}
    answer, trajectory = answered(model, agents, logprobs=True, temperature=temperature)
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == f"{CALL}done"
    assert "forty two" in trajectory.steps[0].response
    assert all(token.logprob < 0 for token in tokens)
