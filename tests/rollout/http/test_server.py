"""The server with well-behaved and faulty clients, and the steps that their calls make."""

import asyncio
import json
import logging
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from urllib.parse import quote, urlsplit

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from creditflow._utils.huggingface import load_tokenizer
from creditflow.data import Trajectory
from creditflow.engines.local.policy import Policy, pick_device
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.errors import CreditflowError, EndpointError, InputError
from creditflow.rollout import AgentSpec, Generation, Scheduler, run_rollout
from creditflow.rollout.chat import ChatTokenizer
from creditflow.rollout.client import ChatClient, ChatReply
from creditflow.rollout.http.server import OpenAIServer, ServerLimits
from creditflow.rollout.recorder import AgentCall, Recorder, Sampling
from tests.builders import Replies, rollout_of, run_team, unlocated
from tests.rewards.processes import HANG_S

HELLO = [{"role": "user", "content": "hello"}]
AGENTS = {"writer": AgentSpec("You write.", match="(?i)author"), "editor": AgentSpec("You edit.")}


class Answers(Replies):
    version = 7
    max_positions = 1000

    def __init__(self, answer=lambda prompt: "yes", reason="stop"):
        super().__init__(answer, reason)


class Templated(Answers):
    """A model that reads its prompts by a chat template."""

    def __init__(self, *args):
        super().__init__(*args)
        self.chat = ChatTokenizer(load_tokenizer(tiny_byte_model(), "test"))

    def encode(self, prompt, tools=()):
        text = self.chat.encode(prompt, tools)[0]
        return text, tuple(map(ord, text))


def user(text: str) -> list:
    return [{"role": "user", "content": text}]


def run_workflow(workflow, model=None, agents=AGENTS, n=1, sampling=None, scheduler=None) -> list[Trajectory]:
    return run_team(workflow, agents, scheduler or Scheduler({"default": model or Answers()}), n, sampling)


def recorder_for(scheduler) -> Recorder:
    return Recorder(AGENTS, Trajectory("t", "u", rollout_of().task), scheduler, Sampling(), (0,))


def client_of(team) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=team.base_url, api_key=team.api_key, max_retries=0)


def call_blocking(team, messages=HELLO, **more) -> str:
    """Call the writer with a client that blocks its thread, and return the response."""
    with openai.OpenAI(base_url=team.base_url, api_key=team.api_key, **more) as client:
        return client.chat.completions.create(model="writer", messages=messages).choices[0].message.content


def with_client(ask, client_of=client_of):
    """Return the workflow `await ask(client)`."""

    async def solve(task, team):
        async with client_of(team) as client:
            return await ask(client)

    return solve


def exchange(ask, client_of=client_of, **options) -> tuple:
    """Run one rollout whose workflow is `await ask(client)`. Return its result and the trajectory; raise its error."""
    results, errors = [], []

    async def solve(task, team):
        try:
            results.append(await with_client(ask, client_of)(task, team))
        except Exception as error:
            errors.append(error)
            raise

    (trajectory,) = run_workflow(solve, **options)
    if errors:
        raise errors[0]
    return results[0], trajectory


def once(ask, client_of=client_of, **options) -> Trajectory:
    return exchange(ask, client_of, **options)[1]


async def chat(client, agent="writer", messages=HELLO, **fields):
    return await client.chat.completions.create(model=agent, messages=messages, **fields)


def answered(model=None, agents=AGENTS, **fields):
    """Return the completion that answers one chat request, and the trajectory."""
    return exchange(lambda client: chat(client, **fields), model=model, agents=agents)


async def streamed_lines(client, **more) -> list[str]:
    request = {"model": "writer", "messages": HELLO, "stream": True, **more}
    async with client.chat.completions.with_streaming_response.create(**request) as response:
        return [line async for line in response.iter_lines() if line]


# Steps of a call


def test_openai_client_calls_make_the_same_steps_as_a_workflow():
    async def over_http(task, team):
        async with client_of(team) as client:
            said = (await chat(client, messages=user(task.text))).choices[0].message.content
            last = await chat(client, "default:editor", user(said), metadata={"draft": said})
            return last.choices[0].message.content

    async def in_process(task, team):
        return await team.editor(draft := await team.writer(task.text), info={"draft": draft.text})

    here, there = (
        run_workflow(workflow, Answers(lambda prompt: f"re {prompt[-6:]}"), n=3) for workflow in (in_process, over_http)
    )
    assert [rollout.steps for rollout in here] == [rollout.steps for rollout in there]
    assert [rollout.answer for rollout in here] == [rollout.answer for rollout in there]
    assert [step.parents for step in there[0].steps] == [(), (0,)]
    assert there[0].steps[1].policy_version == 7


@pytest.mark.parametrize(
    ("asked", "agent"),
    [
        ({"model": "editor"}, "editor"),
        ({"model": "default:editor"}, "editor"),
        ({"model": "writer", "extra_headers": {"X-Creditflow-Agent": "editor"}}, "editor"),
        ({"model": "gpt-5", "messages": [{"role": "system", "content": "An AUTHOR."}, *HELLO]}, "writer"),
        ({"model": "gpt-5", "messages": [{"role": "developer", "content": "Mind: You edit."}, *HELLO]}, "editor"),
    ],
)
def test_agent_is_set_by_header_model_or_system_prompt(asked, agent):
    made = once(lambda client: client.chat.completions.create(**{"messages": HELLO, **asked}))
    assert [step.agent for step in made.steps] == [agent]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"model": "gpt-5"}, "no agent matches this call"),
        ({"model": "default:edotir"}, "did you mean 'default:editor'"),
        ({"model": "x", "extra_headers": {"X-Creditflow-Agent": "judge"}}, "no agent 'judge'; there is writer, editor"),
    ],
)
def test_call_without_an_agent_is_refused_with_known_names(asked, said):
    with pytest.raises(openai.APIStatusError, match=said):
        once(lambda client: client.chat.completions.create(messages=HELLO, **asked))


def test_single_agent_gets_every_call():
    assert once(lambda client: chat(client, "gpt-5"), agents={"a": AgentSpec()}).steps[0].agent == "a"


def test_client_system_prompt_replaces_the_agents():
    async def ask(client):
        await chat(client)
        for prompt in ("Sing.", ""):
            await chat(client, messages=[{"role": "system", "content": prompt}, *HELLO])

    assert [step.prompt for step in once(ask).steps] == ["You write.\nhello", "Sing.\nhello", "\nhello"]


def test_message_parts_join_to_text_refusals_included():
    parts = [{"type": "text", "text": "I had"}, {"type": "refusal", "refusal": " refused"}]
    _, trajectory = answered(Templated(), messages=[*HELLO, {"role": "assistant", "content": parts}, *HELLO])
    assert "I had refused" in trajectory.steps[0].prompt


def test_parents_are_found_in_the_prompt():
    async def ask(client):
        async def say(agent, *texts):
            messages = [one for text in texts for one in user(text)]
            return (await chat(client, agent, messages)).choices[0].message.content

        one, two, three = [await say("writer", f"part {k}") for k in range(3)]
        await say("editor", f"Which is better?\n1. {one}\n2. {three}")
        await say("editor", "and now", two)
        await say("editor", "nothing of theirs")

    made = once(ask, model=Answers(lambda prompt: f"An answer to {prompt[-6:]}"))
    assert [step.parents for step in made.steps] == [(), (0,), (1,), (0, 2), (1,), (4,)]


def test_parent_of_a_tool_result_is_the_calling_step():
    async def ask(client):
        async def say(messages):
            return (await chat(client, messages=messages, tools=[TOOL])).choices[0].message

        first, second = await say(user("one")), await say(user("two"))
        for message, text in ((second, "two"), (first, "one")):
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
            await say([*user(text), message.model_dump(exclude_none=True), result])

    made = once(ask, model=Templated(lambda prompt: "done" if "tool_response" in prompt else CALL))
    assert [step.parents for step in made.steps] == [(), (0,), (1,), (0,)]


def test_choices_share_parents_and_the_next_call_uses_all():
    async def ask(client):
        await chat(client)
        answer = await chat(client, n=3)
        await chat(client, "editor")
        return answer

    answer, trajectory = exchange(ask, model=(model := Answers()))
    assert [step.parents for step in trajectory.steps] == [(), (0,), (0,), (0,), (1, 2, 3)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({request.seed for request in model.requests}) == 5


@pytest.mark.parametrize("id", ["math/12-0", "Größe 1?#%2F", "Aufgabe 1, größte%20", "..", "x" * 300, ""])
def test_any_trajectory_id_gets_a_usable_url(id):
    async def ask(client):
        first = (await chat(client)).id
        await chat(client)
        await chat(client, extra_headers={"X-Creditflow-Parents": quote(first)})

    rollout, scheduler = replace(rollout_of(), id=id), Scheduler({"default": Answers()})
    trajectory = asyncio.run(run_rollout(rollout, with_client(ask), AGENTS, scheduler, Sampling()))
    assert (trajectory.status, trajectory.steps[0].id, trajectory.steps[2].parents) == ("ok", f"{id}/0", (0,))


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\nb", "\ufffd", "x" * 201])
def test_name_that_is_not_one_url_segment_is_refused(limited, name):
    async def main():
        with pytest.raises(InputError, match="a rollout's name has 1 to 200 printable characters, none a slash"):
            limited().open(recorder_for(Scheduler({})), name=name)

    asyncio.run(main())


def test_name_of_an_open_rollout_is_refused(limited):
    async def main():
        recorder = recorder_for(Scheduler({}))
        session = limited().open(recorder, name="x", api_key="k")
        with pytest.raises(InputError, match="'x' is open"):
            session.server.open(recorder, name="x", api_key="k")
        session.close()
        session.server.open(recorder, name="x").close()

    asyncio.run(main())


def test_choice_has_its_step_id_for_the_parents_header():
    async def ask(client):
        drafts = (await chat(client, n=3)).choices
        header = {"X-Creditflow-Parents": f"{drafts[2].step_id}, {drafts[0].step_id}"}
        stream = await chat(client, "editor", stream=True, extra_headers=header)
        last = [chunk async for chunk in stream][-1]
        return [choice.step_id for choice in (*drafts, *last.choices)]

    ids, trajectory = exchange(ask)
    assert ids == [step.id for step in trajectory.steps]
    assert trajectory.steps[3].parents == (0, 2)


def test_answer_from_accepts_step_ids_of_choices():
    async def solve(task, team):
        async with client_of(team) as client:
            first = await chat(client)
            drafts = await chat(client, n=3)
            await chat(client, "editor")  # a comment on the drafts
            team.answer_from(drafts.choices[1].step_id, first.id)
            for wrong in ("t0/5", drafts.choices[1]):
                with pytest.raises(CreditflowError, match="trajectory t0: answer_from: expected replies or their ids"):
                    team.answer_from(wrong)

    (trajectory,) = run_workflow(solve)
    assert (trajectory.status, trajectory.answer_steps) == ("ok", (0, 2))


def test_seed_repeats_a_response_within_a_rollout_only():
    async def ask(client):
        for seed in (5, 5, 6, openai.omit):
            await chat(client, max_tokens=8, seed=seed)

    first, second = run_workflow(with_client(ask), Policy.load(tiny_byte_model(), pick_device("cpu")), n=2)
    a, b, c, d = [step.response_ids for step in first.steps]
    assert a == b
    assert len({a, c, d}) == 3
    assert second.steps[0].response_ids != a


@pytest.mark.parametrize(
    ("response", "stop", "text", "sampled"),
    [
        ("so it is##more END", ["##", "END"], "so it is", "so it is##"),
        ("abcdefgh", ["abcdef", "cd"], "ab", "abcd"),  # the first that is complete
    ],
)
def test_stop_text_ends_a_response_and_its_tokens_are_trained(response, stop, text, sampled):
    answer, trajectory = answered(Answers(lambda prompt: response, reason="length"), stop=stop)
    (step,) = trajectory.steps
    assert answer.choices[0].message.content == step.response == text
    assert answer.choices[0].finish_reason == "stop"
    assert step.response_ids == tuple(map(ord, sampled))
    assert len(step.logprobs) == len(step.response_mask) == len(sampled)
    assert trajectory.status == "ok"


def test_length_limit_is_reported_to_client_and_trajectory():
    answer, trajectory = answered(Answers(reason="length"), max_tokens=3)
    assert (answer.choices[0].finish_reason, trajectory.status) == ("length", "truncated")


def test_max_tokens_is_capped_at_the_runs_limit():
    model = Answers()
    once(lambda client: chat(client, max_tokens=10**6), model=model, sampling=Sampling(max_tokens=33))
    assert model.requests[0].max_tokens == 33


def test_stream_joins_to_the_response():
    async def ask(client):
        stream = await chat(client, stream=True, stream_options={"include_usage": True}, n=2)
        return [chunk async for chunk in stream]

    chunks, trajectory = exchange(ask)
    assert len(trajectory.steps) == 2
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == "yes"
        assert (choices[0].delta.role, choices[-1].finish_reason) == ("assistant", "stop")
    assert chunks[-1].usage.completion_tokens == 6


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_stream_sends_token_ids_once():
    async def ask(client):
        stream = await chat(client, extra_body={"return_token_ids": True}, logprobs=True, stream=True)
        return [chunk async for chunk in stream]

    chunks, trajectory = exchange(ask)
    (step,) = trajectory.steps
    prompts = [chunk.prompt_token_ids for chunk in chunks if hasattr(chunk, "prompt_token_ids")]
    choices = [chunk.choices[0] for chunk in chunks]
    ids = [choice.token_ids for choice in choices if hasattr(choice, "token_ids")]
    logprobs = [token.logprob for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert (prompts, ids) == ([list(step.prompt_ids)], [list(step.response_ids)])
    assert tuple(logprobs) == step.logprobs


def test_response_has_text_and_calls():
    answer, trajectory = answered(Templated(lambda prompt: f"Let me see. {CALL}"), tools=[TOOL])
    (choice,), (step,) = answer.choices, trajectory.steps
    function = choice.message.tool_calls[0].function
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    assert (function.name, function.arguments) == ("add", '{"a": 1}')
    assert '"name": "add"' in step.prompt
    assert CALL in step.response


@pytest.mark.parametrize(
    ("response", "fields"),
    [(CALL, {"tool_choice": "none"}), (CALL, {"tools": openai.omit}), ('<tool_call>{"name": ', {})],
    ids=["tool_choice none", "no tools", "incomplete"],
)
def test_tool_call_stays_text_without_tools(response, fields):
    answer, _ = answered(Answers(lambda prompt: response), **{"tools": [TOOL], **fields})
    assert answer.choices[0].message.content == response
    assert answer.choices[0].finish_reason == "stop"


def test_recorded_tokens_equal_sampled_tokens_with_a_real_model():
    async def ask(client):
        fields = {"extra_body": {"return_token_ids": True}, "logprobs": True, "max_tokens": 12}
        return [await chat(client, **fields) for _ in range(3)]

    policy = Policy.load(tiny_byte_model(), pick_device("cpu"))
    answers, trajectory = exchange(ask, model=policy)
    spelled_anew = 0
    for step, answer in zip(trajectory.steps, answers, strict=True):
        choice = answer.choices[0]
        assert tuple(choice.token_ids) == step.response_ids
        assert tuple(answer.prompt_token_ids) == step.prompt_ids
        assert tuple(one.logprob for one in choice.logprobs.content) == step.logprobs
        for told in choice.logprobs.content:  # the bytes of a part of a character are unknown
            assert told.bytes is None if "\ufffd" in told.token else bytes(told.bytes).decode() == told.token
        anew = policy.tokenizer(choice.message.content, add_special_tokens=False)["input_ids"]
        spelled_anew += tuple(anew) == step.response_ids
    assert spelled_anew < 3  # random bytes are not text: encoding it again would not give the sampled tokens


def test_models_endpoint_lists_the_agents():
    async def ask(client):
        with pytest.raises(openai.NotFoundError, match=r"no 'gpt-5'; there is default:writer, default:editor"):
            await client.models.retrieve("gpt-5")
        listed = [model.id async for model in client.models.list()]
        return [*listed, *[(await client.models.retrieve(name)).id for name in ("default:editor", "editor")]]

    assert exchange(ask)[0] == ["default:writer", "default:editor", "default:editor", "editor"]


def test_answers_and_chunks_fit_the_official_types():
    async def ask(client):
        raw, lines = [], []
        for more in ({}, {"tools": [TOOL]}, {"logprobs": True}, {"n": 2}):
            request = {"model": "writer", "messages": HELLO, **more}
            raw.append((ChatCompletion, await client.chat.completions.with_raw_response.create(**request)))
            lines.append(await streamed_lines(client, **more, stream_options={"include_usage": "n" in more}))
        return raw, lines

    raw, streams = exchange(ask, model=Answers(lambda prompt: CALL))[0]
    for kind, answer in raw:
        parsed = kind.model_validate_json(answer.content, strict=True)
        assert not parsed.model_extra
        assert all(set(choice.model_extra) == {"step_id"} for choice in parsed.choices)
    for lines in streams:  # the raw lines: the client builds its chunks without validation
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            chunk = ChatCompletionChunk.model_validate_json(line.removeprefix("data: "), strict=True)
            assert not chunk.model_extra
            for choice in chunk.choices:
                assert set(choice.model_extra) == ({"step_id"} if choice.finish_reason else set())
                assert not choice.delta.model_extra


def test_stream_escapes_unicode_line_separators():
    """Python's `splitlines`, which httpx uses, ends a line at U+2028 and similar characters."""
    said = "one\u2028two\x85three"
    lines, _ = exchange(streamed_lines, model=Answers(lambda prompt: said))
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == said


# Refused requests


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"messages": user([{"type": "text", "text": None}])}, "expected its text as a text"),
        ({"messages": user([{"type": ["text"], "text": "x"}])}, "a part of type"),
        ({"n": 1000}, "n: "),
        ({"temperature": -1}, "temperature: "),
        ({"temperature": 1e-40}, "temperature: expected 0"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": user([{"type": "image_url", "image_url": {"url": "x"}}])}, "expected text"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"metadata": {"ignored": "1", "tool_calls": "3"}}, "info ignored, tool_calls: what a step keeps"),
        ({"extra_headers": {"X-Creditflow-Parents": "t0/9"}}, "no answer of this trajectory"),
    ],
)
def test_unsupported_request_fields_are_refused(more, said):
    with pytest.raises(openai.BadRequestError, match=said):
        answered(**more)


def test_long_prompt_truncates_whatever_the_client_raises():
    def ask(client):
        return asyncio.gather(chat(client, messages=user("x" * 2000)), chat(client, "editor"))

    with pytest.raises(openai.BadRequestError) as raised:
        once(ask)
    assert raised.value.code == "context_length_exceeded"
    (trajectory,) = run_workflow(with_client(ask))
    assert trajectory.status == "truncated"
    assert (
        trajectory.info["ended_early"]
        == "trajectory t0: writer's prompt has 2011 tokens, at most 999 fit (the model's positions)"
    )


def test_error_after_a_shortened_prompt_fails_the_trajectory():
    async def ask(client):
        with pytest.raises(openai.BadRequestError):
            await chat(client, messages=user("x" * 2000))
        await chat(client)
        raise KeyError("mine")

    (trajectory,) = run_workflow(with_client(ask))
    assert (trajectory.status, unlocated(trajectory.info["error"])) == ("failed", "KeyError: 'mine'")


def test_failed_choice_records_no_step_of_its_request():
    class Fails(ChatClient):
        asked = 0

        async def chat(self, messages, **given):
            self.asked += 1
            if self.asked == 2:
                raise EndpointError("no reply")
            return ChatReply("yes", "stop")

    async def ask(client):
        with pytest.raises(openai.InternalServerError, match="no reply"):
            await chat(client, n=2)
        await chat(client, "editor")

    assert [(step.agent, step.parents) for step in once(ask, model=Fails()).steps] == [("editor", ())]


def test_usage_of_an_endpoint_policy_is_the_servers():
    class Counts(ChatClient):
        async def chat(self, messages, **options):
            return ChatReply("yes", "stop", 11, 3)

    usage = answered(Counts(), n=2)[0].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (11, 6)


def test_concurrent_threads_get_the_same_url():
    async def solve(task, team):
        found = await asyncio.gather(*(asyncio.to_thread(lambda: (team.base_url, team.api_key)) for _ in range(4)))
        return str(len(set(found)))

    assert {rollout.answer for rollout in run_workflow(solve, n=20)} == {"1"}


def test_model_error_ends_the_run_but_not_the_server():
    def broken(prompt):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        once(chat, model=Answers(broken))
    assert once(chat).status == "ok"


# Access, and clients that must not affect others


def raw(url: str, request: bytes, wait: float = 10.0) -> bytes:
    """Send raw bytes and return the response."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=wait) as connection:
        with suppress(OSError):
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
        parts = []
        with suppress(OSError):
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts)


def head_of(
    team, method: str = "POST", path: str = "/chat/completions", *headers: str, key: str | None = None
) -> bytes:
    """Return the head of a request to a rollout's URL."""
    place = urlsplit(team.base_url)
    lines = [f"{method} {place.path}{path} HTTP/1.1", f"Authorization: Bearer {key or team.api_key}", *headers]
    if not any(header.startswith("Host:") for header in headers):
        lines.append(f"Host: {place.netloc}")
    return "\r\n".join([*lines, "", ""]).encode()


def among_others(trouble):
    """Run rollouts that keep calling while `trouble(team)` runs in a thread, and return its result."""
    results = []

    async def solve(task, team):
        async with client_of(team) as client:
            await chat(client)
            if task.text == "task 0":
                results.append(await asyncio.to_thread(trouble, team))
            return (await chat(client, "editor", user(task.text))).choices[0].message.content

    trajectories = run_workflow(solve, Answers(lambda prompt: prompt[::-1]), n=4)
    assert [trajectory.status for trajectory in trajectories] == ["ok"] * 4
    assert [t.answer for t in trajectories] == [f"You edit.\n{t.task.text}"[::-1] for t in trajectories]
    assert [len(trajectory.steps) for trajectory in trajectories] == [2, 2, 2, 2]
    return results[0]


def post(team, body: bytes, key: str | None = None, path="/chat/completions") -> bytes:
    head = head_of(team, "POST", path, f"Content-Length: {len(body)}", "Connection: close", key=key)
    return raw(team.base_url, head + body)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


GOOD = json.dumps({"model": "writer", "messages": HELLO}).encode()


BODIES = {
    b"": 400,
    b"\xff\xfe garbage": 400,
    b"[" * 100_000: 400,
    b'{"model": "writer", "messages": [{"role": "user", "content": "\\ud800"}]}': 400,
    b'{"model": "writer", "messages": ' + b"[" * 300 + b"]" * 300 + b"}": 400,
    b"x" * (9 << 20): 413,
}
HOSTS = ["evil.example", "evil.example@{own}", "{own}@evil.example", "[", ""]
CHUNKS = b"".join(b"100000\r\n%b\r\n" % (b"x" * (1 << 20)) for _ in range(9))


def test_invalid_requests_do_not_affect_other_rollouts():
    def trouble(team):
        for body, status in BODIES.items():
            assert status_of(post(team, body)) == status, body[:50]
        for request in (b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST"):
            raw(team.base_url, request, wait=2.0)
        for host in HOSTS:
            header = f"Host: {host.format(own=urlsplit(team.base_url).netloc)}"
            answer = raw(team.base_url, head_of(team, "GET", "/models", header, "Connection: close"))
            assert status_of(answer) == 421, host
        assert status_of(post(team, GOOD, key="wrong", path="/chat/completions/")) == 404  # no redirect
        chunked = raw(team.base_url, head_of(team, "POST", "/chat/completions", "Transfer-Encoding: chunked") + CHUNKS)
        assert not chunked or status_of(chunked) == 413  # nothing arrives if the upload is cut off before
        return True

    assert among_others(trouble)


def test_wrong_or_foreign_key_is_refused():
    keys, seen = {}, []

    async def solve(task, team):
        keys[task.text] = (team.base_url, team.api_key)
        while len(keys) < 2:
            await asyncio.sleep(0.001)
        other = keys["task 1" if task.text == "task 0" else "task 0"]
        for url, key in ((team.base_url, "wrong"), (team.base_url, other[1]), (other[0], team.api_key)):
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                with pytest.raises(openai.AuthenticationError):
                    await chat(client)
                seen.append(1)

    made = run_workflow(solve, n=2)
    assert (len(seen), [len(rollout.steps) for rollout in made]) == (6, [0, 0])


class Waits:
    """A generator whose calls wait for `answer`. Created in an event loop."""

    def __init__(self):
        self.clients = {"default": Answers()}
        self.asked, self.answer, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def expect(self, rollouts):
        pass

    async def generate(self, policy, request):
        self.asked.set()
        try:
            await self.answer.wait()
        finally:
            self.gone.set()
        return Generation((65,), (-0.5,), "stop")


def test_stopping_server_ends_pending_calls_without_warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])

    async def main():
        server, generator = OpenAIServer().start(), Waits()
        async with client_of(server.open(recorder_for(generator))) as client:
            call = asyncio.create_task(chat(client))
            await generator.asked.wait()
            await asyncio.to_thread(server.stop)
            with pytest.raises(openai.APIConnectionError):
                await call
        await generator.gone.wait()

    asyncio.run(main())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_stop_works_before_start_and_twice():
    OpenAIServer().stop()
    server = OpenAIServer().start()
    server.stop()
    server.stop()


def test_server_does_not_change_process_logging(monkeypatch, caplog):
    loggers = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.error", "uvicorn.access")]
    for logger in loggers:
        monkeypatch.setattr(logger, "handlers", [caplog.handler])
        caplog.set_level(logging.INFO, logger.name)
    server = OpenAIServer().start()
    assert b" 401 " in raw(server.url, b"GET /t/x/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    server.stop()
    assert [(logger.handlers, logger.level) for logger in loggers] == [([caplog.handler], logging.INFO)] * 3
    assert [record for record in caplog.records if record.name == "uvicorn.access"] == []


def test_ended_rollout_refuses_calls():
    teams = []

    async def solve(task, team):
        teams.append(team)
        team.open()

    run_workflow(solve)
    assert status_of(post(teams[0], GOOD)) == 401


def test_disconnected_client_leaves_no_step():
    started, go_on = threading.Event(), threading.Event()

    def slow(prompt):
        started.set()
        assert go_on.wait(HANG_S)
        return "late"

    async def solve(task, team):
        place = urlsplit(team.base_url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(head_of(team, "POST", "/chat/completions", f"Content-Length: {len(GOOD)}") + GOOD)
        await asyncio.to_thread(started.wait)
        writer.close()
        session = team.open()
        while session.waiting:
            await asyncio.sleep(0.001)
        go_on.set()
        reader.feed_eof()
        async with client_of(team) as client:
            await chat(client, "editor")

    (trajectory,) = run_workflow(solve, Answers(slow))
    assert [step.agent for step in trajectory.steps] == ["editor"]


@pytest.fixture
def limited(monkeypatch):
    """Start the server for rollouts with the limits of a test."""
    started = []

    def start(**limits) -> OpenAIServer:
        started.append(OpenAIServer(limits=ServerLimits(**limits)).start())
        monkeypatch.setattr("creditflow.rollout.http.server._PROCESS_SERVER", [started[-1]])
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.mark.parametrize("ticks", range(6))
def test_closed_recorder_records_nothing(ticks):
    async def run():
        recorder = recorder_for(generator := Waits())
        asked = asyncio.create_task(recorder.ask_all([AgentCall("writer", HELLO)]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        generator.answer.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        await recorder.close()
        then = len(recorder.trajectory.steps)
        (reply,) = await asyncio.gather(asked, return_exceptions=True)
        assert len(recorder.trajectory.steps) == then == isinstance(reply, list)
        return then

    assert asyncio.run(run()) in (0, 1)


def test_steps_limit_refuses_further_and_pending_calls(limited):
    limited(steps=2)
    answers = []

    async def ask(client):
        answers.extend(await asyncio.gather(*(chat(client) for _ in range(5)), return_exceptions=True))
        await chat(client)

    with pytest.raises(openai.RateLimitError, match="at most 2 steps") as refused:
        once(ask)
    assert sorted(type(answer).__name__ for answer in answers) == ["ChatCompletion"] * 2 + ["RateLimitError"] * 3
    assert refused.value.response.headers["x-should-retry"] == "false"


def test_waiting_limit_gives_400_or_429(limited):
    limited(waiting=4)
    refused, released = {}, threading.Event()

    def slow(prompt):
        assert released.wait(HANG_S)
        return "yes"

    async def ask(client):
        async def choices(n):
            try:
                await chat(client, n=n)
            except openai.APIStatusError as error:
                refused[error.status_code] = error
                if error.status_code == 429:
                    released.set()

        await asyncio.gather(*map(choices, (3, 3, 5)))

    assert len(once(ask, model=Answers(slow)).steps) == 3
    assert (refused[429].code, "x-should-retry" in refused[429].response.headers) == ("too_many_calls", False)
    assert "at most 4 choices" in str(refused[400])


def opened(server: OpenAIServer) -> socket.socket:
    place = urlsplit(server.url)
    return socket.create_connection((place.hostname, place.port), timeout=HANG_S)


def ended(connection: socket.socket) -> bool:
    """Wait for the server to close the connection, and return whether it did."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("begun", [b"", b"POST /t/x HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "half a head"])
def test_connection_without_a_complete_head_is_closed(limited, begun):
    server = limited(connection_seconds=0.2)
    with opened(server) as connection:
        connection.sendall(begun)
        assert ended(connection)


def test_incomplete_second_head_closes_the_connection(limited):
    server = limited(connection_seconds=0.2)

    async def solve(task, team):
        head = head_of(team, "GET", "/models")
        with opened(server) as connection:
            connection.sendall(head)
            answer = b""
            while b'"last_id"' not in answer or not answer.endswith(b"}"):
                answer += await asyncio.to_thread(connection.recv, 4096)
            connection.sendall(head[:20])
            return str(await asyncio.to_thread(ended, connection))

    assert [trajectory.answer for trajectory in run_workflow(solve)] == ["True"]


def test_client_that_does_not_read_is_disconnected(limited):
    server = limited(connection_seconds=0.2)
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # for its connections, so that they fill soon

    def goes_on(connection, request):
        while True:
            connection.sendall(request)

    async def solve(task, team):
        request = head_of(team, "POST", "/chat/completions", f"Content-Length: {len(GOOD)}") + GOOD
        with opened(server) as connection, pytest.raises((ConnectionResetError, BrokenPipeError)):
            await asyncio.to_thread(goes_on, connection, request)
        async with client_of(team) as client:
            await client.models.list()

    (trajectory,) = run_workflow(solve, Answers(lambda prompt: "x" * 100_000))
    assert trajectory.status == "ok", trajectory.info


@pytest.fixture
def connect():
    """Open idle connections to a server, which are closed at the end of the test."""
    connections = []

    def start(server, number):
        connections.extend(opened(server) for _ in range(number))
        return connections

    yield start
    for connection in connections:
        connection.close()


def test_idle_connections_make_room_for_a_request(limited, connect):
    idle = connect(limited(connections=4, connection_seconds=600), 8)
    assert len(once(chat).steps) == 1
    assert all(ended(connection) for connection in idle[:5])


def test_busy_connection_is_not_closed_for_another(limited, connect):
    server = limited(connections=2, connection_seconds=600)

    def slow(prompt):
        assert all(ended(connection) for connection in connect(server, 8)[:7])
        return "late"

    assert answered(Answers(slow))[0].choices[0].message.content == "late"


def test_call_on_a_blocked_loop_is_refused_with_the_remedy(limited):
    limited(blocked_seconds=0.2)

    async def solve(task, team):
        with pytest.raises(openai.InternalServerError, match=r"within 0\.2 s: .*asyncio.to_thread"):
            call_blocking(team, max_retries=0)
        async with client_of(team) as client:
            await chat(client)

    (made,) = run_workflow(solve)
    assert (made.status, len(made.steps)) == ("ok", 1)


def test_call_during_a_blocked_loop_succeeds_on_retry(limited):
    limited(blocked_seconds=1.0)
    blocked, refused = threading.Event(), threading.Event()

    def note(response):
        if response.status_code == 503:
            refused.set()

    def ask(team):
        blocked.wait()
        call_blocking(team, http_client=openai.DefaultHttpxClient(event_hooks={"response": [note]}))

    async def solve(task, team):
        if task.text == "task 3":  # the last to begin
            blocked.set()
            assert refused.wait(HANG_S)  # any long blocking call
        else:
            await asyncio.to_thread(ask, team)

    made = run_workflow(solve, n=4)
    assert [(rollout.status, len(rollout.steps)) for rollout in made] == [*[("ok", 1)] * 3, ("ok", 0)]


def test_refused_call_makes_no_step(limited):
    async def main():
        recorder, refused = recorder_for(Scheduler({"default": Answers()})), Future()
        session = limited().open(recorder)
        refused.cancel()
        await session.ask([AgentCall("writer", HELLO)], refused)
        assert recorder.trajectory.steps == []
        await session.ask([AgentCall("writer", HELLO)], Future())
        assert len(recorder.trajectory.steps) == 1

    asyncio.run(main())


# Workflows that are plain functions


def test_plain_workflow_works_with_a_blocking_client():
    def solve(task, team):
        return call_blocking(team, user(task.text), max_retries=0)

    made = run_workflow(solve, Answers(lambda prompt: prompt[-1]), n=40)
    assert [rollout.answer for rollout in made] == [str(k % 10) for k in range(40)]


def test_full_thread_pool_still_gets_responses():
    async def solve(task, team):
        return await asyncio.to_thread(call_blocking, team, max_retries=0)

    assert {rollout.answer for rollout in run_workflow(solve, n=40)} == {"yes"}


def test_calls_over_http_are_batched():
    async def ask(client):
        for _ in range(3):
            await chat(client)

    scheduler = Scheduler({"default": Answers()})
    run_workflow(with_client(ask), n=32, scheduler=scheduler)
    assert sum(scheduler.batch_sizes) == 96
    assert len(scheduler.batch_sizes) <= 12  # one per round on a quiet machine, never close to one per call


class Frozen(ChatClient):
    async def chat(self, messages, **given):
        await asyncio.sleep(0.03)  # meanwhile its caller is not about to call another model
        return ChatReply("yes", "stop")


async def call_until(answered, ask):
    """Keep calling until another rollout has its response, which these calls must not delay."""
    for _ in range(100):
        await ask()
        if await asyncio.to_thread(answered.wait, 0.1):  # time outside the event loop between two calls
            return
    raise AssertionError("called a hundred times")


def run_beside(ask) -> list[Trajectory]:
    """Run a rollout with one call, one that repeats `ask(client)`, and one outside the event loop until the first ends.

    Batches wait for the last one, as it might call.
    """
    answered = threading.Event()

    async def solve(task, team):
        async with client_of(team) as client:
            match task.text:
                case "task 0":
                    await chat(client)
                    answered.set()
                case "task 1" if ask:
                    await call_until(answered, lambda: ask(client))
                case _:
                    assert await asyncio.to_thread(answered.wait, 60)

    agents = {"writer": AgentSpec(), "customer": AgentSpec(policy="frozen")}
    scheduler = Scheduler({"default": Answers(), "frozen": Frozen()})
    return run_workflow(solve, agents=agents, n=3, scheduler=scheduler)


async def call_frozen(client):
    await chat(client, "customer")


async def give_up(client):
    with suppress(openai.APITimeoutError):
        await chat(client, timeout=0.1)


@pytest.mark.parametrize("ask", [call_frozen, give_up])
def test_other_calls_do_not_delay_a_response(ask):
    assert [rollout.status for rollout in run_beside(ask)] == ["ok"] * 3


def test_longest_wait_bounds_the_wait_for_further_calls(monkeypatch):
    monkeypatch.setattr("creditflow.rollout.scheduler._PATIENCE", 600.0)
    monkeypatch.setattr("creditflow.rollout.scheduler._LONGEST_WAIT", 0.1)
    assert [rollout.status for rollout in run_beside(None)] == ["ok"] * 3


class Noting(Scheduler):
    """Records the threads that call `expect`, and the final number of rollouts that are about to call."""

    def __init__(self, clients):
        super().__init__(clients)
        self.threads, self.about_to_call = set(), 0

    def expect(self, rollouts):
        self.threads.add(threading.get_ident())
        self.about_to_call += rollouts
        super().expect(rollouts)


def test_scheduler_is_notified_on_its_event_loop():
    async def solve(task, team):
        async with await asyncio.to_thread(client_of, team) as client:
            await asyncio.gather(*(chat(client) for _ in range(3)))

    scheduler = Noting({"default": Answers()})
    made = run_workflow(solve, n=4, scheduler=scheduler)
    assert [len(rollout.steps) for rollout in made] == [3] * 4
    assert (scheduler.threads, scheduler.about_to_call) == ({threading.get_ident()}, 0)


def test_url_of_an_ended_rollout_is_refused():
    left, scheduler = [], Noting({"default": Answers()})

    async def solve(task, team):
        left.append(team)

    async def main():
        await run_rollout(rollout_of(), solve, AGENTS, scheduler, Sampling())
        with pytest.raises(CreditflowError, match="trajectory t0: its URL was asked for after the rollout had ended"):
            await asyncio.to_thread(lambda: left[0].base_url)

    asyncio.run(main())
    assert scheduler.about_to_call == 0
