"""Rollouts of a team.

The client here answers by rule, so that expected values can be written down; tests/engines tests the contract with a
real model.
"""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Sequence

import pytest

from creditflow.data import Task, Trajectory
from creditflow.errors import AgentError, ConfigError, CreditflowError
from creditflow.rollout import AgentSpec, Generation, GenerationRequest, Scheduler, Team, Workflow, run_rollout
from creditflow.rollout.recorder import Sampling
from tests.builders import Replies, rollout_of, run_team, unlocated


class EchoClient(Replies):
    """Answers with its prompt's last word."""

    version = 3
    max_positions = 100

    def __init__(self) -> None:
        super().__init__(lambda prompt: prompt.split()[-1])


AGENTS = {"a": AgentSpec(system="you are a"), "b": AgentSpec(), "c": AgentSpec()}


def run(
    workflow: Workflow, n: int = 1, sampling: Sampling | None = None, client: EchoClient | None = None, **limits: int
) -> tuple[list[Trajectory], EchoClient]:
    client = client or EchoClient()
    return run_team(workflow, AGENTS, Scheduler({"default": client}, **limits), n, sampling), client


async def ask_one(task: Task, team: Team) -> str:
    return await team.a("say one")


def test_call_makes_one_step_with_the_previous_as_parent() -> None:
    async def solve(task: Task, team: Team) -> str:
        first = await team.a("say one")
        second = await team.b(f"say {first}-two")
        return await team.a(f"say {second}-three")

    (trajectory,), _ = run(solve)
    assert [(s.agent, s.turn, s.parents, s.response) for s in trajectory.steps] == [
        ("a", 0, (), "one"),
        ("b", 0, (0,), "one-two"),
        ("a", 1, (1,), "one-two-three"),
    ]
    assert trajectory.answer == "one-two-three"
    assert trajectory.answer_steps == (2,)
    assert trajectory.steps[0].prompt == "you are a\nsay one"
    assert {s.policy_version for s in trajectory.steps} == {3}
    assert [s.id for s in trajectory.steps] == ["t0/0", "t0/1", "t0/2"]


def test_calls_share_a_parent_join_by_name_or_start_a_branch() -> None:
    async def solve(task: Task, team: Team) -> str:
        plan = await team.a("say plan")
        parts = await asyncio.gather(*(team.b(f"say part{i}", parents=[plan]) for i in range(3)))
        last = await team.c("say " + "".join(parts), parents=parts)
        await team.a("say branch", parents=[])
        team.answer_from(parts[0], last)
        return last

    (trajectory,), _ = run(solve)
    assert [s.parents for s in trajectory.steps] == [(), (0,), (0,), (0,), (1, 2, 3), ()]
    assert [s.turn for s in trajectory.steps] == [0, 0, 1, 2, 0, 1]
    assert trajectory.answer_steps == (1, 4)


def test_waiting_rollout_does_not_block_the_others() -> None:
    async def solve(task: Task, team: Team) -> None:
        if task.extra_info["k"] == 0:
            await released.wait()
        await team.a("one")
        await team.a("two")
        released.set()

    released = asyncio.Event()
    _, client = run(solve, n=4)
    assert client.batches == [3, 3, 1, 1]


def test_max_num_seqs_bounds_a_batch() -> None:
    assert run(ask_one, n=10, max_num_seqs=4)[1].batches == [4, 4, 2]
    assert run(ask_one, n=10)[1].batches == [10]


def test_truncated_response_truncates_but_rollout_continues() -> None:
    async def solve(task: Task, team: Team) -> str:
        await team.b("say abcdefgh", max_tokens=4)
        return await team.b("say ok")

    (trajectory,), _ = run(solve)
    assert trajectory.status == "truncated"
    assert trajectory.info["truncated"] == "b was cut off at 4 tokens"
    assert trajectory.steps[0].info["finish_reason"] == "length"
    assert trajectory.answer == "ok"


class BrokenClient(EchoClient):
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        raise MemoryError("no memory for the cache")


class Forgetful(EchoClient):
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return super().generate(requests)[1:]


@pytest.mark.parametrize(
    ("client", "error", "message"),
    [(BrokenClient, MemoryError, "no memory"), (Forgetful, CreditflowError, "3 requests, but 2 generations came")],
)
def test_model_error_stops_all_rollouts(client: type[EchoClient], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(ask_one, n=3, client=client())


def test_seeds_differ_between_calls_and_repeat_between_runs() -> None:
    async def solve(task: Task, team: Team) -> None:
        await team.a("one")
        await team.b("two")

    first, again = ([request.seed for request in run(solve, n=3)[1].requests] for _ in range(2))
    assert len(set(first)) == 6
    assert again == first


async def gathered(task: Task, team: Team) -> None:
    await asyncio.gather(team.b("x" * 30), team.a("say one"), team.a("say two"))


async def grouped(task: Task, team: Team) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(team.b("x" * 30))


@pytest.mark.parametrize("workflow", [gathered, grouped])
def test_long_prompt_ends_the_rollout_and_pending_branches(workflow: Workflow) -> None:
    (trajectory,), _ = run(workflow, sampling=Sampling(max_prompt_tokens=20))
    assert trajectory.status == "truncated"
    assert trajectory.info["truncated"] == "b's prompt has 30 tokens, at most 20 fit (data.max_prompt_length)"
    assert (
        trajectory.info["ended_early"]
        == "trajectory t0: b's prompt has 30 tokens, at most 20 fit (data.max_prompt_length)"
    )
    assert trajectory.steps == []


def test_team_cannot_be_called_after_the_rollout() -> None:
    kept: list[Team] = []

    async def solve(task: Task, team: Team) -> None:
        kept.append(team)
        await team.a("one")

    run(solve)
    with pytest.raises(CreditflowError, match="trajectory t0: a was called after the rollout had ended"):
        asyncio.run(kept[0].a("two"))


def test_step_keeps_its_temperature_and_greedy_masks_tokens() -> None:
    async def solve(task: Task, team: Team) -> None:
        await team.a("say one", temperature=0.3)
        await team.a("say two", temperature=0.0)
        await team.a("say two")

    (trajectory,), _ = run(solve, sampling=Sampling(temperature=0.7))
    assert trajectory.answer is None
    assert [s.temperature for s in trajectory.steps] == [0.3, 0.0, 0.7]
    assert [s.response_mask for s in trajectory.steps] == [(1, 1, 1), (0, 0, 0), (1, 1, 1)]


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"info": {"at": object()}}])
def test_invalid_call_fails_its_trajectory_with_the_reason(wrong: dict[str, object]) -> None:
    async def solve(task: Task, team: Team) -> None:
        await team.a("one", **wrong)  # type: ignore[arg-type]

    (trajectory,), _ = run(solve)
    assert trajectory.status == "failed"
    assert trajectory.info["error"].startswith(("ValueError", "TypeError"))


@pytest.mark.parametrize(
    ("raised", "status", "key", "reason"),
    [
        ([AgentError("no number")], "ok", "agent_error", "no number"),
        ([AgentError("no number"), AgentError("again")], "ok", "agent_error", "no number"),
        ([AgentError("no number"), KeyError("bug")], "failed", "error", "KeyError: 'bug'"),
    ],
)
def test_task_group_errors_count_like_single_errors(
    raised: list[Exception], status: str, key: str, reason: str
) -> None:
    async def branch(error: Exception) -> None:
        raise error

    async def solve(task: Task, team: Team) -> None:
        await team.a("one")
        if len(raised) == 1:
            raise raised[0]
        async with asyncio.TaskGroup() as group:
            for error in raised:
                group.create_task(branch(error))

    (trajectory,), _ = run(solve)
    assert (trajectory.status, trajectory.answer, len(trajectory.steps)) == (status, None, 1)
    assert unlocated(trajectory.info[key]) == reason


@pytest.mark.parametrize("in_a_group", [False, True])
def test_config_error_names_the_agents_and_the_line(in_a_group: bool) -> None:
    async def solve(task: Task, team: Team) -> None:
        await team.planner("one")

    async def grouped(task: Task, team: Team) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
            team["planner"]

    workflow, line = (grouped, 3) if in_a_group else (solve, 1)
    with pytest.raises(ConfigError, match=r"the workflow calls agent 'planner'; team\.agents has a, b, c") as raised:
        run(workflow)
    assert str(raised.value).endswith(f"({line_of(workflow, line)})")


# ---- another generator than the scheduler


class OneByOne:
    """A generator that answers each call separately, like the servers of a cluster."""

    fault = None

    def __init__(self, version: int | None = 7) -> None:
        self.clients = {"default": EchoClient()}
        self.version = version
        self.in_flight = self.most = 0

    async def generate(self, policy: str, request: GenerationRequest) -> Generation:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await asyncio.sleep(0.01)
            (generation,) = self.clients[policy].generate([request])
        finally:
            self.in_flight -= 1
        if "broken" in EchoClient().decode(request.prompt_ids):
            raise ConnectionError("the server is gone")
        return Generation(generation.response_ids, generation.logprobs, generation.finish_reason, self.version)

    async def idle(self) -> None:
        assert not self.in_flight


def test_generator_error_fails_one_trajectory() -> None:
    async def solve(task: Task, team: Team) -> str:
        return await team.a("say broken" if task.extra_info["k"] == 1 else "say fine")

    generator = OneByOne()
    trajectories = run_team(solve, AGENTS, generator, n=3)
    assert [t.status for t in trajectories] == ["ok", "failed", "ok"]
    assert unlocated(trajectories[1].info["error"]) == "ConnectionError: the server is gone"
    assert generator.most == 3


@pytest.mark.parametrize(("told", "kept"), [(7, 7), (None, 3)])
def test_policy_version_comes_from_the_generation_if_set(told: int | None, kept: int) -> None:
    trajectory = asyncio.run(run_rollout(rollout_of(), ask_one, AGENTS, OneByOne(told), Sampling()))
    assert trajectory.steps[0].policy_version == kept


@pytest.mark.parametrize(
    "raised", [SystemExit(2), asyncio.CancelledError(), BaseExceptionGroup("", [SystemExit(2), AgentError("no")])]
)
def test_base_exception_fails_one_trajectory(raised: BaseException) -> None:
    async def solve(task: Task, team: Team) -> str:
        await team.a(f"say {task.text}")
        if task.extra_info["k"] == 0:
            raise raised
        return await team.b("say on")

    trajectories, _ = run(solve, n=2)
    assert [rollout.status for rollout in trajectories] == ["failed", "ok"]
    assert trajectories[0].info["error"].startswith("RuntimeError: raised ")


def test_cancelled_rollout_leaves_no_pending_call() -> None:
    async def solve(task: Task, team: Team) -> None:
        await asyncio.gather(*(team.a(f"say {i}") for i in range(3)))

    async def main() -> int:
        generator = OneByOne()
        running = asyncio.create_task(run_rollout(rollout_of(), solve, AGENTS, generator, Sampling()))
        while generator.in_flight < 3:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return generator.in_flight

    assert asyncio.run(main()) == 0


def refusal(workflow: Workflow) -> str:
    """Return the message of the ConfigError that ends a workflow."""
    message = ""
    try:
        run(workflow)
    except ConfigError as error:
        message = str(error)
    gc.collect(1)  # an unawaited coroutine warns when it is freed; it is young, and a full collection takes seconds
    return message


def line_of(function, offset: int) -> str:
    return f"test_runner.py:{function.__code__.co_firstlineno + offset} in {function.__name__}"


def test_workflow_error_names_its_lines() -> None:
    def parse(text: str) -> int:
        return int(text)

    async def solve(task: Task, team: Team) -> int:
        return parse(await team.a("one"))

    def stop(task: Task, team: Team) -> None:
        raise StopIteration

    (trajectory,), _ = run(solve)
    where = f"({line_of(solve, 1)}, {line_of(parse, 1)})"
    assert trajectory.info["error"] == f"ValueError: invalid literal for int() with base 10: 'one' {where}"
    traceback = trajectory.info["tracebacks"]["workflow"]
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert "rollout/runner.py" in traceback
    assert run(stop)[0][0].info["error"].endswith(f"({line_of(stop, 1)})")


async def answers(team: Team) -> AsyncIterator[str]:
    yield await team.a("one")


async def caught(team: Team) -> None:
    try:
        await team.b(team.a("one"))
    except Exception:
        await team.b("two")


USES = {
    "method": lambda team: team.a("one").lower(),
    "task": lambda team: asyncio.ensure_future(team.a("one")).lower(),
    "operator": lambda team: "one" + team.a("one"),
    "item": lambda team: asyncio.gather(team.a("one"))[0],
    "key": lambda team: {}[team.a("one")],
    "loop": lambda team: [*team.a("one")],
    "library": lambda team: json.dumps({"reply": team.a("one")}),
}
FORGOTTEN = USES | {
    "itself": lambda team: team.b(team.a("one")),
    "in_messages": lambda team: team.b([{"role": "user", "content": team.a("one")}]),
    "in_parts": lambda team: team.b([{"role": "user", "content": [{"type": "text", "text": team.a("one")}]}]),
    "a_task": lambda team: team.b([{"role": "user", "content": asyncio.ensure_future(team.a("one"))}]),
    "gathered": lambda team: team.b(asyncio.gather(team.a("one"))),
    "a_parent": lambda team: team.b("two", parents=[team.a("one")]),
    "a_generator": lambda team: team.b(answers(team)),
    "caught": caught,
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("name", FORGOTTEN)
def test_forgotten_await_is_refused(name: str) -> None:
    body = FORGOTTEN[name]

    async def solve(task: Task, team: Team) -> None:
        await body(team)

    message = refusal(solve)
    beginnings = {
        "a_parent": "b's list of parents holds <",
        **dict.fromkeys(USES, ("TypeError", "KeyErr", "Attribute")),
    }
    assert message.startswith(beginnings.get(name, "b's prompt holds <"))
    where = f"({line_of(caught, 2) if name == 'caught' else line_of(solve, 1)}"
    assert f"expected its result; add `await` to the call {where}" in message


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_unawaited_answer_is_refused() -> None:
    async def solve(task: Task, team: Team) -> object:
        return team.a("one")

    message = refusal(solve)
    assert message.startswith("the workflow's answer holds <coroutine object Agent.__call__ at 0x")
    assert message.endswith(f"({line_of(solve, 0)})")


def raise_type_error(text: str) -> None:
    raise TypeError(text)


OTHERS = {  # a response, and its use
    "'coroutine' object is not iterable": raise_type_error,
    "a' and 'coroutine": lambda text: raise_type_error(**{text: 1}),
    "'coroutine' object has no attribute": lambda text: getattr(object(), text),
    "coroutine": asyncio.create_task,
    "coroutine?": lambda text: asyncio.ensure_future(asyncio.sleep(0, "coroutine")).reslut(),
}


@pytest.mark.parametrize("text", OTHERS)
def test_other_error_about_a_coroutine_fails_its_rollout(text: str) -> None:
    async def solve(task: Task, team: Team) -> None:
        await team.a("one")
        OTHERS[text](text)

    (trajectory,), _ = run(solve)
    assert trajectory.status == "failed"


def test_parents_other_than_replies_are_refused() -> None:
    async def solve(task: Task, team: Team) -> str:
        return await team.b("two", parents=[(await team.a("one")).strip()])

    message = refusal(solve)
    assert message.startswith("parents: expected replies, as calls of agents return them, got 'one' (")
    assert line_of(solve, 1) in message


def test_text_about_coroutines_is_accepted() -> None:
    shown = "<coroutine object fetch at 0x7f3a2c1d>"  # as a program of a model may print it

    async def solve(task: Task, team: Team) -> str:
        await team.a(f"Explain {shown}")
        return shown

    (trajectory,), _ = run(solve)
    assert (trajectory.status, trajectory.answer) == ("ok", shown)
