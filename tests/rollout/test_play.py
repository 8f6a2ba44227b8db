"""How a team plays.

The client here answers by rule, so that what is expected can be written down; the real model's part of the contract is
tested in tests/engines.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence

import pytest

from creditflow.errors import AgentError, ConfigError, CreditflowError
from creditflow.rollout import (
    AgentSpec,
    ChatClient,
    ChatReply,
    Generation,
    GenerationRequest,
    Play,
    Scheduler,
    Team,
    Workflow,
    play_all,
    play_one,
)
from creditflow.rollout.recorder import Sampling
from creditflow.trajectory import Task, Trajectory
from tests.builders import Letters, unlocated


class EchoClient(Letters):
    """Answers with its prompt's last word; a token is a character."""

    version = 3
    max_positions = 100

    def __init__(self) -> None:
        self.batches: list[int] = []

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        self.batches.append(len(requests))
        answers = []
        for asked in requests:
            word = self.decode(asked.prompt_ids).split()[-1]
            ids = tuple(map(ord, word))[: asked.max_tokens]
            answers.append(Generation(ids, (-0.5,) * len(ids), "stop" if len(word) <= asked.max_tokens else "length"))
        return answers


AGENTS = {"a": AgentSpec(system="you are a"), "b": AgentSpec(), "c": AgentSpec()}


def run(workflow: Workflow, n: int = 1, sampling: Sampling | None = None) -> tuple[list[Trajectory], EchoClient]:
    client = EchoClient()
    plays = [
        Play(Task("test", ({"role": "user", "content": f"task {k}"},), None, {"k": k}), f"u{k}", f"t{k}", (k,))
        for k in range(n)
    ]
    played = asyncio.run(play_all(plays, workflow, AGENTS, Scheduler({"default": client}), sampling or Sampling()))
    return played, client


def test_each_call_makes_one_step_whose_parent_is_the_step_before() -> None:
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


def test_calls_made_together_share_their_parent_and_named_parents_join_them() -> None:
    async def solve(task: Task, team: Team) -> str:
        plan = await team.a("say plan")
        parts = await asyncio.gather(*(team.b(f"say part{i}", parents=[plan]) for i in range(3)))
        last = await team.c("say " + "".join(parts), parents=parts)
        team.answer_from(parts[0], last)
        return last

    (trajectory,), _ = run(solve)
    assert [s.parents for s in trajectory.steps] == [(), (0,), (0,), (0,), (1, 2, 3)]
    assert [s.turn for s in trajectory.steps] == [0, 0, 1, 2, 0]
    assert trajectory.answer_steps == (1, 4)


def test_a_call_without_parents_starts_a_branch_of_its_own() -> None:
    async def solve(task: Task, team: Team) -> None:
        await team.a("say one")
        await team.b("say two", parents=[])

    (trajectory,), _ = run(solve)
    assert trajectory.steps[1].parents == ()
    assert trajectory.answer is None


def test_all_live_trajectories_are_generated_for_together() -> None:
    async def solve(task: Task, team: Team) -> None:
        for turn in range(3):
            await team.a(f"turn {turn}")

    _, client = run(solve, n=20)
    assert client.batches == [20, 20, 20]


def test_a_trajectory_that_waits_for_the_world_does_not_hold_up_the_others() -> None:
    async def solve(task: Task, team: Team) -> None:
        if task.extra_info["k"] == 0:
            await released.wait()
        await team.a("one")
        await team.a("two")
        released.set()

    async def main() -> list[int]:
        client = EchoClient()
        plays = [Play(Task("t", (), None, {"k": k}), f"u{k}", f"t{k}", (k,)) for k in range(4)]
        await play_all(plays, solve, AGENTS, Scheduler({"default": client}), Sampling())
        return client.batches

    released = asyncio.Event()
    assert asyncio.run(main()) == [3, 3, 1, 1]


def test_no_more_calls_than_max_num_seqs_are_generated_together() -> None:
    async def solve(task: Task, team: Team) -> None:
        await team.a("one")

    async def main() -> list[int]:
        client = EchoClient()
        plays = [Play(Task("t", (), None), f"u{k}", f"t{k}", (k,)) for k in range(10)]
        await play_all(plays, solve, AGENTS, Scheduler({"default": client}, max_num_seqs=4), Sampling())
        return client.batches

    assert asyncio.run(main()) == [4, 4, 2]


def test_a_workflow_that_raises_fails_its_own_trajectory_and_no_other() -> None:
    async def solve(task: Task, team: Team) -> str:
        await team.a("one")
        if task.extra_info["k"] == 1:
            raise ZeroDivisionError("by zero")
        return "done"

    trajectories, _ = run(solve, n=3)
    assert [t.status for t in trajectories] == ["ok", "failed", "ok"]
    assert unlocated(trajectories[1].info["error"]) == "ZeroDivisionError: by zero"
    assert len(trajectories[1].steps) == 1


def test_an_agents_own_error_keeps_the_trajectory_and_its_reason() -> None:
    async def solve(task: Task, team: Team) -> str:
        await team.a("one")
        raise AgentError("not a number")

    (trajectory,), _ = run(solve)
    assert trajectory.status == "ok"
    assert trajectory.info["agent_error"] == "not a number"
    assert trajectory.answer is None


def test_too_long_a_prompt_ends_the_trajectory_as_truncated_and_says_so() -> None:
    async def solve(task: Task, team: Team) -> str:
        await team.b("short")
        await team.b("x" * 30)
        raise AssertionError("the workflow goes no further")

    (trajectory,), _ = run(solve, sampling=Sampling(max_prompt_tokens=20))
    assert trajectory.status == "truncated"
    assert trajectory.info["truncated"] == "b's prompt has 30 tokens, at most 20 fit"
    assert len(trajectory.steps) == 1


def test_a_response_cut_at_its_limit_marks_the_trajectory_truncated_and_the_play_goes_on() -> None:
    async def solve(task: Task, team: Team) -> str:
        await team.b("say abcdefgh", max_tokens=4)
        return await team.b("say ok")

    (trajectory,), _ = run(solve)
    assert trajectory.status == "truncated"
    assert trajectory.info["truncated"] == "b was cut off at 4 tokens"
    assert trajectory.steps[0].info["finish_reason"] == "length"
    assert trajectory.answer == "ok"


def test_a_call_of_an_agent_that_the_team_does_not_have_names_those_it_has() -> None:
    async def solve(task: Task, team: Team) -> str:
        return await team.planner("one")

    with pytest.raises(ConfigError, match=r"'planner'; team\.agents has a, b, c"):
        run(solve)


def test_an_error_of_the_model_itself_stops_everything() -> None:
    class BrokenClient(EchoClient):
        def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
            raise MemoryError("no memory for the cache")

    async def solve(task: Task, team: Team) -> None:
        await team.a("one")

    plays = [Play(Task("t", (), None), "u", "t", (0,))]
    with pytest.raises(MemoryError, match="no memory"):
        asyncio.run(play_all(plays, solve, AGENTS, Scheduler({"default": BrokenClient()}), Sampling()))


def test_random_keys_differ_between_calls_and_repeat_between_runs() -> None:
    seeds: list[tuple[int, ...]] = []

    class Recorder(EchoClient):
        def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
            seeds.extend(asked.seed for asked in requests)
            return super().generate(requests)

    async def solve(task: Task, team: Team) -> None:
        await team.a("one")
        await team.b("two")

    def play() -> None:
        plays = [Play(Task("t", (), None), f"u{k}", f"t{k}", (7, k)) for k in range(3)]
        asyncio.run(play_all(plays, solve, AGENTS, Scheduler({"default": Recorder()}), Sampling()))

    play()
    first = list(seeds)
    assert len(set(first)) == 6
    seeds.clear()
    play()
    assert seeds == first


def test_branches_that_outlive_a_play_are_ended_with_it() -> None:
    async def solve(task: Task, team: Team) -> None:
        await asyncio.gather(team.b("x" * 30), team.a("say one"), team.a("say two"))

    (trajectory,), _ = run(solve, sampling=Sampling(max_prompt_tokens=20))
    assert trajectory.status == "truncated"
    assert trajectory.info["ended_early"] == "trajectory t0: b's prompt has 30 tokens, at most 20 fit"
    assert trajectory.steps == []


def test_a_team_cannot_be_called_after_its_play() -> None:
    kept: list[Team] = []

    async def solve(task: Task, team: Team) -> None:
        kept.append(team)
        await team.a("one")

    run(solve)
    with pytest.raises(CreditflowError, match="trajectory t0: a was called after the play had ended"):
        asyncio.run(kept[0].a("two"))


def test_a_client_that_loses_a_request_is_told_instead_of_waited_for() -> None:
    class Forgetful(EchoClient):
        def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
            return super().generate(requests)[1:]

    async def solve(task: Task, team: Team) -> None:
        await team.a("one")

    plays = [Play(Task("t", (), None), f"u{k}", f"t{k}", (k,)) for k in range(3)]
    with pytest.raises(CreditflowError, match="3 requests, but 2 generations came"):
        asyncio.run(play_all(plays, solve, AGENTS, Scheduler({"default": Forgetful()}), Sampling()))


def test_a_step_remembers_its_temperature_and_a_greedy_one_has_nothing_to_train() -> None:
    async def solve(task: Task, team: Team) -> None:
        await team.a("say one", temperature=0.3)
        await team.a("say two", temperature=0.0)
        await team.a("say two")

    (trajectory,), _ = run(solve, sampling=Sampling(temperature=0.7))
    assert [s.temperature for s in trajectory.steps] == [0.3, 0.0, 0.7]
    assert [s.response_mask for s in trajectory.steps] == [(1, 1, 1), (0, 0, 0), (1, 1, 1)]


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"info": {"at": object()}}])
def test_a_call_that_cannot_be_made_or_recorded_fails_its_play_with_the_reason(wrong: dict[str, object]) -> None:
    async def solve(task: Task, team: Team) -> None:
        await team.a("one", **wrong)  # type: ignore[arg-type]

    (trajectory,), _ = run(solve)
    assert trajectory.status == "failed"
    assert trajectory.info["error"].startswith(("ValueError", "TypeError"))


@pytest.mark.parametrize(
    ("raised", "status", "key", "reason"),
    [
        ([AgentError("no number")], "ok", "agent_error", "no number"),
        ([AgentError("no number"), KeyError("bug")], "failed", "error", "KeyError: 'bug'"),
    ],
)
def test_errors_of_a_task_group_mean_what_they_mean_alone(
    raised: list[Exception], status: str, key: str, reason: str
) -> None:
    async def branch(error: Exception) -> None:
        raise error

    async def solve(task: Task, team: Team) -> None:
        await team.a("one")
        async with asyncio.TaskGroup() as group:
            for error in raised:
                group.create_task(branch(error))

    (trajectory,), _ = run(solve)
    assert trajectory.status == status
    assert unlocated(trajectory.info[key]) == reason


def test_a_long_prompt_or_an_unknown_agent_in_a_task_group_is_told_as_such() -> None:
    async def long(task: Task, team: Team) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(team.b("x" * 30))

    (trajectory,), _ = run(long, sampling=Sampling(max_prompt_tokens=20))
    assert trajectory.status == "truncated"
    assert "ended_early" in trajectory.info

    async def unknown(task: Task, team: Team) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
            team["planner"]

    with pytest.raises(ConfigError, match="'planner'"):
        run(unknown)


# ---- another generator than the scheduler


class OneByOne:
    """A generator that answers each call by itself, as servers of a cluster do."""

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


def play_of(k: int = 0) -> Play:
    return Play(Task("t", ({"role": "user", "content": "x"},), None, {"k": k}), f"u{k}", f"t{k}", (k,))


def test_any_generator_serves_and_an_error_of_one_call_fails_that_play_alone() -> None:
    async def solve(task: Task, team: Team) -> str:
        return await team.a("say broken" if task.extra_info["k"] == 1 else "say fine")

    generator = OneByOne()
    trajectories = asyncio.run(play_all([play_of(k) for k in range(3)], solve, AGENTS, generator, Sampling()))
    assert [t.status for t in trajectories] == ["ok", "failed", "ok"]
    assert unlocated(trajectories[1].info["error"]) == "ConnectionError: the server is gone"
    assert generator.most == 3


@pytest.mark.parametrize(("told", "kept"), [(7, 7), (None, 3)])
def test_the_version_is_that_of_the_generation_where_it_has_one(told: int | None, kept: int) -> None:
    async def solve(task: Task, team: Team) -> str:
        return await team.a("say one")

    trajectory = asyncio.run(play_one(play_of(), solve, AGENTS, OneByOne(told), Sampling()))
    assert trajectory.steps[0].policy_version == kept


def test_one_play_alone_raises_a_mistake_in_the_recipe_and_returns_all_else() -> None:
    async def mistaken(task: Task, team: Team) -> str:
        return await team.nobody("one")

    async def broken(task: Task, team: Team) -> str:
        raise ZeroDivisionError("by zero")

    with pytest.raises(ConfigError, match="'nobody'"):
        asyncio.run(play_one(play_of(), mistaken, AGENTS, OneByOne(), Sampling()))
    trajectory = asyncio.run(play_one(play_of(), broken, AGENTS, OneByOne(), Sampling()))
    assert (trajectory.status, unlocated(trajectory.info["error"])) == ("failed", "ZeroDivisionError: by zero")


@pytest.mark.parametrize(
    "raised", [SystemExit(2), asyncio.CancelledError(), BaseExceptionGroup("", [SystemExit(2), AgentError("no")])]
)
def test_whatever_a_workflow_raises_ends_its_own_play_alone(raised: BaseException) -> None:
    async def solve(task: Task, team: Team) -> str:
        await team.a(f"say {task.text}")
        if task.extra_info["k"] == 0:
            raise raised
        return await team.b("say on")

    played, _ = run(solve, n=2)
    assert [play.status for play in played] == ["failed", "ok"]
    assert played[0].info["error"].startswith("RuntimeError: raised ")


def test_a_play_that_is_cancelled_leaves_no_call_behind() -> None:
    async def solve(task: Task, team: Team) -> None:
        await asyncio.gather(*(team.a(f"say {i}") for i in range(3)))

    async def main() -> int:
        generator = OneByOne()
        playing = asyncio.create_task(play_one(play_of(), solve, AGENTS, generator, Sampling()))
        while generator.in_flight < 3:
            await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        return generator.in_flight

    assert asyncio.run(main()) == 0


def test_an_agent_may_act_through_another_than_the_team_s_model_and_is_never_batched_with_it() -> None:
    class Remote(ChatClient):
        def __init__(self) -> None:
            self.asked: list[tuple[list[dict[str, str]], int, float, tuple[int, ...]]] = []

        async def chat(self, messages, *, max_tokens, temperature, seed):  # type: ignore[no-untyped-def]
            self.asked.append((list(messages), max_tokens, temperature, seed))
            return ChatReply("two", "stop")

    async def solve(task: Task, team: Team) -> str:
        first = await team.a("say one")
        return await team.far([{"role": "assistant", "content": first.text}], temperature=0.0, max_tokens=5)

    async def main() -> list[Trajectory]:
        scheduler = Scheduler({"default": client, "far": remote})
        return await play_all([play_of()], solve, {**AGENTS, "far": AgentSpec(policy="far")}, scheduler, Sampling())

    client, remote = EchoClient(), Remote()
    (trajectory,) = asyncio.run(main())
    assert client.batches == [1]
    assert remote.asked == [([{"role": "assistant", "content": "one"}], 5, 0.0, (0, 1))]
    assert trajectory.steps[1].prompt == "[assistant]\none"
    assert trajectory.steps[1].info == {}
    assert trajectory.answer == "two"


def refusal(workflow: Workflow) -> str:
    """The message of the mistake that a workflow ends with."""
    message = ""
    try:
        run(workflow)
    except ConfigError as error:
        message = str(error)
    gc.collect()  # a coroutine that was not awaited warns when it is freed
    return message


def line_of(function, offset: int) -> str:
    return f"test_play.py:{function.__code__.co_firstlineno + offset} in {function.__name__}"


def test_a_workflow_that_raises_is_located() -> None:
    def parse(text: str) -> int:
        return int(text)

    async def solve(task: Task, team: Team) -> int:
        return parse(await team.a("one"))

    (trajectory,), _ = run(solve)
    where = f"({line_of(solve, 1)}, {line_of(parse, 1)})"
    assert trajectory.info["error"] == f"ValueError: invalid literal for int() with base 10: 'one' {where}"
    traceback = trajectory.info["tracebacks"]["workflow"]
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert "rollout/play.py" in traceback


def test_a_plain_workflow_that_raises_is_located() -> None:
    def stop(task: Task, team: Team) -> None:
        raise StopIteration

    def leave(task: Task, team: Team) -> None:
        raise SystemExit(3)

    for workflow in (stop, leave):
        (trajectory,), _ = run(workflow)
        assert trajectory.info["error"].endswith(f"({line_of(workflow, 1)})")


def test_a_mistake_in_the_recipe_is_located() -> None:
    async def solve(task: Task, team: Team) -> None:
        await team.d("one")

    with pytest.raises(ConfigError, match="the workflow calls agent 'd'") as raised:
        run(solve)
    assert str(raised.value).endswith(f"({line_of(solve, 1)})")


async def in_a_text(team: Team) -> None:
    await team.b(f"say {team.a('one')}")


async def itself(team: Team) -> None:
    await team.b(team.a("one"))


async def in_messages(team: Team) -> None:
    await team.b([{"role": "user", "content": team.a("one")}])


async def in_parts(team: Team) -> None:
    await team.b([{"role": "user", "content": [{"type": "text", "text": team.a("one")}]}])


async def a_task(team: Team) -> None:
    await team.b([{"role": "user", "content": f"{asyncio.ensure_future(team.a('one'))}"}])


async def gathered(team: Team) -> None:
    await team.b(f"{asyncio.gather(team.a('one'))}")


async def a_generator(team: Team) -> None:
    async def answers() -> AsyncIterator[str]:
        yield await team.a("one")

    await team.b(f"{answers()}")


async def a_parent(team: Team) -> None:
    await team.b("two", parents=[team.a("one")])


async def caught(team: Team) -> None:
    try:
        await team.b(f"say {team.a('one')}")
    except Exception:
        await team.b("two")


FORGOTTEN = [in_a_text, itself, in_messages, in_parts, a_task, gathered, a_generator, a_parent, caught]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("body", FORGOTTEN, ids=[body.__name__ for body in FORGOTTEN])
def test_a_forgotten_await_is_refused(body) -> None:
    async def solve(task: Task, team: Team) -> None:
        await body(team)

    message = refusal(solve)
    where = (
        f"({line_of(body, 2)})"
        if body is caught
        else f"({line_of(solve, 1)}, {line_of(body, 4 if body is a_generator else 1)})"
    )
    assert message.startswith("b's list of parents holds <" if body is a_parent else "b's prompt holds <")
    assert message.endswith(f"expected its result; add `await` to the call that made it {where}")


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("answer", [lambda team: team.a("one"), lambda team: f"{team.a('one')}"], ids=["it", "text"])
def test_an_answer_that_is_not_awaited_is_refused(answer) -> None:
    async def solve(task: Task, team: Team) -> object:
        return answer(team)

    message = refusal(solve)
    assert message.startswith("the workflow's answer holds <coroutine object Agent.__call__ at 0x")
    assert message.endswith(f"({line_of(solve, 0)})")


SHOWN = "<coroutine object fetch at 0x7f3a2c1d>"


@pytest.mark.parametrize("source", ["task", "response", "system"])
def test_a_text_about_coroutines_is_no_forgotten_await(source: str) -> None:
    class Explains(EchoClient):
        def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
            return [Generation(ids := tuple(map(ord, SHOWN)), (-0.5,) * len(ids), "stop") for _ in requests]

    async def solve(task: Task, team: Team) -> str:
        said = await team.a("why?")
        return await team.b(f"Explain {SHOWN}, after {said if source == 'response' else ''}")

    text = SHOWN if source == "task" else "why?"
    task = Task("test", ({"role": "user", "content": "?"},), None, {"trace": [{"line": f"It prints {text}."}]})
    agents = {"a": AgentSpec(), "b": AgentSpec(system=SHOWN if source == "system" else "")}
    client = Explains() if source == "response" else EchoClient()
    play = Play(task, "u", "t", (0,))
    (made,) = asyncio.run(play_all([play], solve, agents, Scheduler({"default": client}), Sampling()))
    assert (made.status, len(made.steps)) == ("ok", 2)
