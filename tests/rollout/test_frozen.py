"""A frozen model behind an endpoint, called over real HTTP on the loopback.

tests/rewards/test_judge.py tests what every endpoint does: retries, limits of an answer, keys, counts.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from creditflow.config import load_recipe, trained_agents, trained_policies
from creditflow.data import Task, Trajectory
from creditflow.errors import EndpointError, PromptTooLong
from creditflow.rollout import AgentSpec, ChatReply, FrozenModel, Scheduler, Team, Workflow, run_rollouts
from creditflow.rollout.endpoint import Endpoint
from creditflow.rollout.frozen import CHARACTERS_PER_TOKEN
from creditflow.rollout.recorder import Sampling
from tests.builders import rollout_of, unlocated
from tests.rewards.judge_server import Answer, Answers, JudgeServer, Request
from tests.rollout.test_runner import EchoClient

HELLO = [{"role": "user", "content": "hello"}]


def model(url: str, **more: Any) -> FrozenModel:
    options: dict[str, Any] = {
        "model": "big", "api_key_env": None, "body": {}, "max_concurrency": 256, "request_timeout": 5.0, "retries": 2,
        "backoff": 0.001, "give_up_after": 30.0, "patient": True,
    }  # fmt: skip
    return FrozenModel(Endpoint(url=url, **{**options, **more}))


async def said(client: FrozenModel, messages: Sequence[dict[str, Any]] = HELLO, max_tokens: int = 8) -> ChatReply:
    try:
        return await client.chat(messages, max_tokens=max_tokens, temperature=0.7, seed=(1, 2))
    finally:
        await client.aclose()


def ask(answers: Answers, **more: Any) -> tuple[ChatReply, JudgeServer]:
    with JudgeServer(answers) as server:
        return asyncio.run(said(model(server.url, **more))), server


def refused(answers: Answers, **more: Any) -> tuple[EndpointError, JudgeServer]:
    with JudgeServer(answers) as server:
        with pytest.raises(EndpointError) as caught:
            asyncio.run(said(model(server.url, **more)))
        return caught.value, server


def completion(**more: Any) -> Answer:
    """Return a chat completion in JSON with a given choice."""
    choice = {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop", **more}
    return Answer(body=json.dumps({"choices": [choice]}).encode())


# ---- one call


def test_call_sends_messages_and_returns_text_and_counts() -> None:
    reply, server = ask(Answer("Yes.", usage=(21, 3)))
    assert reply == ChatReply("Yes.", "stop", 21, 3)
    (request,) = server.requests
    assert request.path == "/v1/chat/completions"
    assert request.headers["authorization"] == "Bearer none"
    assert request.body.pop("seed") in range(1 << 31)
    assert request.body == {"model": "big", "messages": HELLO, "max_tokens": 8, "temperature": 0.7}


def run_calls(answers: Answers, calls: Callable[[FrozenModel], Awaitable[object]], **more: Any) -> JudgeServer:
    """Run `calls(client)` against a server, and return the server."""

    async def main(url: str) -> None:
        client = model(url, **more)
        await calls(client)
        await client.aclose()

    with JudgeServer(answers) as server:
        asyncio.run(main(server.url))
    return server


def test_calls_take_turns_and_each_sends_its_seed() -> None:
    async def three(client: FrozenModel, name: str) -> None:
        for seed in ((1, 2), (1, 2), (1, 3)):
            await client.chat([{"role": "user", "content": name}], max_tokens=8, temperature=0.7, seed=seed)

    server = run_calls(
        [Answer("Yes.")], lambda c: asyncio.gather(*(three(c, name) for name in "abc")), max_concurrency=1
    )
    assert "".join(request.body["messages"][0]["content"] for request in server.requests) == "abcabcabc"
    seeds = [request.body["seed"] for request in server.requests]
    assert len(set(seeds[:6])) == len(set(seeds[6:])) == 1
    assert seeds[0] != seeds[6]


def test_max_concurrency_bounds_requests_in_flight() -> None:
    async def many(client: FrozenModel) -> None:
        await asyncio.gather(*(client.chat(HELLO, max_tokens=4, temperature=1.0, seed=(k,)) for k in range(60)))

    server = run_calls(Answer(company=7), many, max_concurrency=7)
    assert (server.most_in_flight, len(server.requests)) == (7, 60)


@pytest.mark.parametrize("key", ["a-very-secret-key\n", "a very-secret-key", "a-very-secret-\u2026key", None])
def test_invalid_key_is_neither_sent_nor_shown(monkeypatch: pytest.MonkeyPatch, key: str | None) -> None:
    if key is not None:
        monkeypatch.setenv("MY_KEY", key)
    error, server = refused(Answer(), api_key_env="MY_KEY")
    assert ("MY_KEY is not set" if key is None else "MY_KEY holds what no key has") in str(error)
    assert not server.requests
    cause: BaseException | None = error
    while cause is not None:
        assert "secret" not in str(cause)
        cause = cause.__cause__ or cause.__context__


@pytest.mark.parametrize("charset", ["hex", "no-such", "utf-16"])
def test_answer_is_utf8_whatever_charset_the_server_names(charset: str) -> None:
    reply, _ = ask(Answer("Yes.", headers={"Content-Type": f"application/json; charset={charset}"}))
    assert reply.text == "Yes."
    text, headers = "bad\x1b[31m request\n" + "x" * 5000, {"Content-Type": f"text/plain; charset={charset}"}
    error, _ = refused(Answer(text, status=400, headers=headers))
    assert "status 400" in str(error)
    assert str(error).isprintable()
    assert len(str(error)) < 300


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        (Answer("and then", finish_reason="length", usage=None), ChatReply("and then", "length")),
        (completion(message={"content": None}, finish_reason="length"), ChatReply("", "length")),
        (completion(message={"content": "a\ud800b"}), ChatReply("a?b", "stop")),
        (Answer("x" * 100_000, usage=None), ChatReply("x" * 8 * CHARACTERS_PER_TOKEN, "length")),
    ],
    ids=["truncated", "truncated thought", "half a surrogate pair", "beyond max_tokens"],
)
def test_reply_has_its_text_and_finish_reason(answer: Answer, reply: ChatReply) -> None:
    assert ask(answer)[0] == reply


# ---- behaviour of servers


def test_rate_limits_are_waited_out_without_using_retries() -> None:
    limited = Answer(status=429, headers={"Retry-After": "0.05"})
    reply, server = ask([*[limited] * 8, Answer("at last")], retries=0)
    assert reply.text == "at last"
    assert len(server.requests) == 9


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (completion(message={"content": None}), "without text"),
        (completion(message={"content": ["hi"]}), "without text"),
        (completion(finish_reason="content_filter"), "content filter"),
    ],
)
def test_invalid_reply_raises_without_retry(answer: Answer, why: str) -> None:
    error, server = refused(answer)
    assert why in str(error)
    assert len(server.requests) == 1


TOO_LONG = [
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4900 in the messages).",
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "the request exceeds the available context size, try increasing it",
    "Input validation error: `inputs` must have less than 4095 tokens. Given: 5000",
    "prompt is too long: 5000 tokens > 4096 maximum",
    '{"error": {"message": "no", "code": "context_length_exceeded"}}',
]


@pytest.mark.parametrize("words", TOO_LONG)
def test_refusal_of_a_long_prompt_raises_prompt_too_long(words: str) -> None:
    answer = Answer(body=words.encode(), status=400) if words.startswith("{") else Answer(words, status=400)
    with JudgeServer(answer) as server, pytest.raises(PromptTooLong, match="does not fit: http://"):
        asyncio.run(said(model(server.url)))
    assert len(server.requests) == 1


# ---- in a rollout


AGENTS = {"writer": AgentSpec(system="Write."), "critic": AgentSpec(system="Judge.", policy="big")}


async def solve(task: Task, team: Team) -> str:
    draft = await team.writer(f"say {task.text}")
    verdict = await team.critic(f"Is {draft} good?", max_tokens=16, temperature=0.0, info={"about": draft.text})
    return await team.writer(f"say {verdict}-then")


def run_workflow(
    answers: Answers, n: int = 1, workflow: Workflow = solve, **more: Any
) -> tuple[list[Trajectory], JudgeServer]:
    async def main(url: str) -> list[Trajectory]:
        client = model(url, **more)
        rollouts = [rollout_of(k, f"word{k}") for k in range(n)]
        try:
            scheduler = Scheduler({"default": EchoClient(), "big": client})
            return await run_rollouts(rollouts, workflow, AGENTS, scheduler, Sampling())
        finally:
            await client.aclose()

    with JudgeServer(answers) as server:
        return asyncio.run(main(server.url)), server


def test_frozen_step_has_text_and_parents_without_tokens() -> None:
    (trajectory,), server = run_workflow(Answer("Yes", usage=(9, 1)))
    assert [(step.agent, step.response) for step in trajectory.steps] == [
        ("writer", "word0"), ("critic", "Yes"), ("writer", "Yes-then"),
    ]  # fmt: skip
    step = trajectory.steps[1]
    assert (step.policy, step.policy_version, step.parents, step.temperature) == ("big", 0, (0,), 0.0)
    assert step.prompt == "[system]\nJudge.\n\n[user]\nIs word0 good?"
    assert step.prompt_ids == step.response_ids == step.response_mask == step.logprobs == ()
    assert step.info == {"prompt_tokens": 9, "completion_tokens": 1, "about": "word0"}
    assert server.requests[0].body["messages"] == [
        {"role": "system", "content": "Judge."}, {"role": "user", "content": "Is word0 good?"},
    ]  # fmt: skip
    assert (server.requests[0].body["max_tokens"], server.requests[0].body["temperature"]) == (16, 0.0)
    assert trajectory.steps[2].response_ids


def test_failed_endpoint_call_fails_one_trajectory() -> None:
    def answer(request: Request) -> Answer:
        return Answer(status=500) if "word1" in request.text else Answer("Yes")

    trajectories, _ = run_workflow(answer, n=3, retries=1)
    assert [trajectory.status for trajectory in trajectories] == ["ok", "failed", "ok"]
    assert trajectories[1].info["error"].startswith("EndpointError: http://127.0.0.1")
    assert unlocated(trajectories[1].info["error"]).endswith("status 500 (2 tries)")
    assert len(trajectories[1].steps) == 1


def test_refused_long_prompt_truncates_the_trajectory() -> None:
    (trajectory,), _ = run_workflow(Answer(TOO_LONG[0], status=400))
    assert trajectory.status == "truncated"
    assert trajectory.info["truncated"].startswith("critic's prompt does not fit: http://127.0.0.1")
    assert trajectory.info["ended_early"].startswith("trajectory t0: critic's prompt does not fit")
    assert len(trajectory.steps) == 1


def test_pending_frozen_call_ends_with_its_rollout() -> None:
    async def abandoned(task: Task, team: Team) -> str:
        asyncio.get_running_loop().create_task(team.critic("slow?"))
        await asyncio.sleep(0.1)
        raise ZeroDivisionError("first")

    started = time.monotonic()
    (trajectory,), _ = run_workflow(Answer(delay=float("inf")), workflow=abandoned, request_timeout=60.0)
    assert unlocated(trajectory.info["error"]) == "ZeroDivisionError: first"
    assert trajectory.steps == []
    assert time.monotonic() - started < 30


# ---- in a recipe


def test_recipe_configures_the_endpoint(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from creditflow.engines.common.components import build_components

    monkeypatch.setenv("MY_KEY", "abc")
    (tmp_path / "toy.py").write_text(TRAJECTORY)
    (tmp_path / "toy.yaml").write_text(RECIPE)
    with JudgeServer(Answer("hi")) as server:
        options = [f"base_url={server.url}/", "extra_body={top_p: 0.5, seed: null}", "headers={X-Title: mine}"]
        overrides = [f"policies.big.endpoint.{option}" for option in options]
        components = build_components(load_recipe(tmp_path / "toy.yaml", overrides))
        assert asyncio.run(said(components.chat_clients["big"])).text == "hi"
    assert components.agents["critic"] == AgentSpec("Judge.", "big")
    assert trained_policies(components.recipe.config) == ("default",)
    assert trained_agents(components.recipe.config) == ["writer"]
    (request,) = server.requests
    assert (request.headers["authorization"], request.headers["x-title"]) == ("Bearer abc", "mine")
    fields = {"model": "org/big-model", "messages": HELLO, "max_tokens": 8, "temperature": 0.7, "top_p": 0.5}
    assert request.body == fields
    assert [components.endpoint_metrics()["endpoint/big/requests"] for _ in range(2)] == [1, 0]


TRAJECTORY = """
from creditflow import Task, outcome

def tasks(split, recipe):
    return [Task("toy", ({"role": "user", "content": str(k)},), k) for k in range(4)]

async def solve(task, team):
    return await team.writer(task.text)

@outcome
def right(trajectory):
    return 1.0
"""

RECIPE = """
data: {train_files: "toy.py:tasks", train_batch_size: 2}
actor_rollout_ref: {model: {path: tiny}, actor: {ppo_mini_batch_size: 2}}
policies:
  default: {}
  big: {model: {path: org/big-model}, endpoint: {base_url: "http://127.0.0.1:9/v1", api_key_env: MY_KEY}}
team:
  workflow: toy.py:solve
  agents: {writer: {}, critic: {system: Judge., policy: big}}
reward: {functions: [{fn: "toy.py:right"}]}
"""
