"""The protocol of text environments, and the adapters that open addresses."""

import asyncio
import contextlib
import importlib.util
import json
import random
import re
from collections.abc import Callable

import pytest
from websockets.asyncio.server import serve

from creditflow.data import Task
from creditflow.errors import ConfigError
from creditflow.plugins.environments import (
    ENVIRONMENTS,
    IllegalActionError,
    TextEnvironment,
    Turn,
    run_address,
    text_environment,
)
from creditflow.plugins.environments.base import View, last_number
from creditflow.plugins.environments.rewards import Returns
from creditflow.plugins.environments.tasks import environment_tasks, parse_environment_address
from creditflow.rollout import AgentSpec, Rollout, Sampling, Scheduler, run_rollout
from tests.builders import Replies
from tests.plugins.environments.test_workflow import first_legal, run_workflow, scripted

NEEDS_TEXTARENA = pytest.mark.skipif(
    importlib.util.find_spec("textarena") is None, reason="pip install 'creditflow[textarena]'"
)


async def rolled(text: str, client, seats=("agent",), split="train"):
    task = environment_tasks(text, "data.train_files", split)[0]
    rollout = Rollout(task, "u", "0-1-0-0", (0,))
    sampling = Sampling(max_tokens=10_000, max_prompt_tokens=50_000)
    agents = {seat: AgentSpec() for seat in seats}
    return await run_rollout(rollout, run_address, agents, Scheduler({"default": client}), sampling)


def run_addressed(*arguments):
    return asyncio.run(rolled(*arguments))


class Countdown(TextEnvironment):
    """One seat counts down from three; the environment itself refuses 2, once."""

    seats = ("counter",)
    refuses = True

    async def reset(self, seed):
        self.left = 3
        return Turn({"counter": "Count down."}, {"counter": (self.left,)})

    async def step(self, actions):
        if self.left == 2 and self.refuses:
            self.refuses = False
            raise IllegalActionError("not yet")
        self.left -= 1
        if not self.left:
            return Turn(rewards={"counter": 1.0})
        return Turn({"counter": "Go on."}, {"counter": (self.left,)}, faults={"counter": "too slow"})


def test_own_environment_runs_as_a_workflow():
    made = run_workflow(
        text_environment(lambda task: Countdown(), illegal="random"), scripted("3", "2", "1"), ["counter"]
    )
    assert [step.info.get("action") for step in made.steps] == [3, 2, 1]
    assert [step.info.get("illegal") for step in made.steps] == ["too slow", "not yet", None]
    assert json.loads(made.answer) == {"counter": 1.0}
    assert made.info["seats"] == {"counter": "counter"}


def test_refused_action_ends_the_rollout():
    made = run_workflow(text_environment(lambda task: Countdown()), scripted("3", "2"), ["counter"])
    assert made.info["agent_error"] == "seat counter, agent counter, turn 1: not yet"


def test_single_agent_takes_all_seats():
    made = run_addressed("pettingzoo://classic/tictactoe_v3", Replies(first_legal), ["both"])
    assert {step.agent for step in made.steps} == {"both"}
    assert made.info["seats"] == {"player_1": "both", "player_2": "both"}


def test_parallel_address_lets_seats_act_at_once():
    text = "pettingzoo://classic/rps_v2?parallel=true&num_actions=3&max_cycles=2"
    made = run_addressed(text, scripted("0", "1", "2", "2"), ["player"])
    assert json.loads(made.answer) == {"player_0": -1.0, "player_1": 1.0}  # paper beats rock; then a draw
    assert [(s.turn, s.parents) for s in made.steps] == [(0, ()), (1, ()), (2, (0,)), (3, (1,))]
    assert made.info["truncated"] == "cut short by the environment"


def test_gymnasium_address_has_options_and_limits():
    made = run_addressed("gymnasium://FrozenLake-v1?is_slippery=false&max_turns=2", scripted("1", "1"))
    assert made.info["truncated"] == "cut short after max_turns=2"
    assert "Legal actions: 0, 1, 2, 3." in made.steps[0].prompt


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gymnasium://Nowhere-v1", "gymnasium://Nowhere-v1: "),
        ("gymnasium://os:FrozenLake-v1", "expected a name without a module"),
        ("gymnasium://FrozenLake-v1?slip=1", "slip"),
        ("gymnasium://FrozenLake-v1?map_name=9x9", "KeyError: '9x9'"),
        ("gymnasium://Pendulum-v1", "expected actions that are numbers or texts, got Box"),
        ("pettingzoo://classic/nowhere_v1", "PettingZoo has no module pettingzoo.classic.nowhere_v1"),
        ("pettingzoo://test/api_test", "expected a family of atari, .*, got test"),
        ("pettingzoo://classic.tictactoe_v3", "expected family/name"),
        ("pettingzoo://classic/tictactoe_v3?parallel=true", "leave out parallel=true"),
        ("pettingzoo://classic/rlcard_envs", "rlcard_envs' has no attribute 'env'$"),
        ("openenv://127.0.0.1:1?kind=txt", r"kind: expected text, number, json, got 'txt'.*did you mean 'text'"),
        ("openenv://127.0.0.1:1?sessions=0", "sessions: expected a whole number of 1 or more, got 0"),
        pytest.param("textarena://Nimm-v0", "did you mean", marks=NEEDS_TEXTARENA),
        pytest.param("textarena://Nim-v0?players=3", "players: ", marks=NEEDS_TEXTARENA),
        pytest.param("textarena://Nim-v0?illegal=random", "judge moves themselves", marks=NEEDS_TEXTARENA),
    ],
)
def test_unusable_address_names_its_mistake(text, message):
    with pytest.raises(ConfigError, match=message):
        run_addressed(text, scripted(), ["player"])


@pytest.mark.parametrize(
    ("reply", "number"),
    [("I move to 3.", 3), ("between 3-5", 5), ("at -2", -2), ("3.5", None), ("1,000", None), ("x7", None)],
)
def test_last_number_is_whole_or_refused(reply, number):
    view = View(None, "seat", "", None, 0)
    with pytest.raises(ValueError, match="number") if number is None else contextlib.nullcontext():
        assert last_number(reply, view) == number


def test_task_without_an_address_is_refused():
    with pytest.raises(ConfigError, match="run_address runs tasks of an address"):
        run_workflow(run_address, scripted(), ["player"])


@NEEDS_TEXTARENA
def test_textarena_game_pays_both_players():
    moves = ["[0]", "[3]", "[1]", "[4]", "no move", "[2]"]
    made = run_addressed("textarena://TicTacToe-v0", scripted(*moves), ["player_0", "player_1"])
    assert [step.agent[-1] for step in made.steps] == list("010100")
    assert json.loads(made.answer) == {"player_0": 1.0, "player_1": -1.0}
    assert [k for k, step in enumerate(made.steps) if "illegal" in step.info] == [4]
    assert Returns(-1, 1, agent="player_1", per_agent=True)(made) == {"*": -1.0, "player_0": 1.0, "player_1": -1.0}


@NEEDS_TEXTARENA
def test_textarena_game_ends_by_its_own_penalty():
    made = run_addressed("textarena://TicTacToe-v0", scripted("?", "\ud800" * 5000), ["player_0", "player_1"])
    assert json.loads(made.answer) == {"player_0": -1.0, "player_1": 1.0}
    assert made.status == "ok"
    assert all("illegal" in step.info for step in made.steps)
    assert all(len(step.info["action"]) <= 4000 for step in made.steps)
    assert Returns(-1, 1, agent="player_1")(made) == 1.0  # it has not acted


@NEEDS_TEXTARENA
def test_textarena_rollouts_share_no_random_numbers():
    random.seed(1)
    before = random.getstate()
    texts = []
    for _ in range(2):
        env = ENVIRONMENTS["textarena"](parse_environment_address("textarena://Blackjack-v0?players=1", "key"))
        turn = asyncio.run(env.reset(5))
        random.random()  # another rollout
        texts.append((turn.observations, asyncio.run(env.step({"player_0": "[Hit]"})).observations))
    assert texts[0] == texts[1]
    random.setstate(before)


def test_returns_of_an_agent_need_its_seat():
    made = run_addressed("gymnasium://FrozenLake-v1?is_slippery=false", scripted("1", "2"))
    assert Returns(agent="agent")(made) == 0.0
    with pytest.raises(ValueError, match="no agent 'other' has a seat in this trajectory; there is agent"):
        Returns(agent="other")(made)
    with pytest.raises(ValueError, match="expected seat or agent, got both"):
        Returns(seat="agent", agent="agent")


FIRST = {"type": "observation", "data": {"observation": {"text": "Begin."}, "reward": None, "done": False}}
LAST = {"type": "observation", "data": {"observation": {}, "reward": 2, "done": True}}


def run_served(answers: list, client: Callable, query: str = ""):
    """Run a rollout against a WebSocket server that answers in this order."""
    received: list[dict] = []

    async def answer(socket):
        with contextlib.suppress(Exception):
            for reply in answers:
                received.append(json.loads(await socket.recv()))
                await socket.send(reply if isinstance(reply, str) else json.dumps(reply))
            await socket.recv()

    async def run():
        async with serve(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await rolled(f"openenv://127.0.0.1:{port}?{query}", client, ["solver"])

    return asyncio.run(run()), received


def test_openenv_session_sends_seed_options_and_actions():
    made, received = run_served([FIRST, LAST], scripted("hello"), "action=say&level=3")
    assert received[0] == {"type": "reset", "data": {"level": 3, "seed": 1}}
    assert received[1] == {"type": "step", "data": {"say": "hello"}}
    assert made.steps[0].prompt == "text: Begin."
    assert json.loads(made.answer) == {"agent": 2.0}


@pytest.mark.parametrize("listed", [[0, 1], ["up", "down"]], ids=["numbers", "texts"])
@pytest.mark.parametrize("kind", ["number", "text", "json"])
def test_openenv_reads_legal_actions_as_numbers(kind, listed):
    first = {"type": "observation", "data": {"observation": {"legal_actions": listed}, "done": False}}
    made, _ = run_served([first, LAST], scripted('{"n": 7}'), f"kind={kind}")
    read = (kind, listed) == ("number", [0, 1])
    assert ("7 is not legal" in made.info.get("agent_error", "")) == read
    assert made.steps[0].prompt.strip().startswith("Legal actions: 0, 1." if read else f"legal_actions: {listed}")


def test_openenv_action_against_the_schema_is_the_agents_fault():
    refused = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "Invalid message"}}
    made, _ = run_served([FIRST, refused], scripted('{"x": 1}'), "kind=json")
    assert made.status == "ok"
    assert made.info["agent_error"].endswith("VALIDATION_ERROR: Invalid message")


@pytest.mark.parametrize("reply", ["no json", "[1]", "[" * 100_000], ids=["text", "list", "deep"])
def test_openenv_json_action_must_be_an_object(reply):
    made, _ = run_served([FIRST], Replies(lambda prompt: reply, "stop"), "kind=json")
    assert made.status == "ok"
    assert "agent_error" in made.info


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("no json", "JSONDecodeError"),
        ([1], "expected a message of OpenEnv"),
        ({"type": "observation", "data": {"observation": "text"}}, "expected observation, reward and done"),
        ('{"type": "observation", "data": {"observation": {}, "reward": NaN}}', "observation, reward and done"),
        ({"type": "observation", "data": {"observation": {}, "done": "no"}}, "observation, reward and done"),
        ({"type": "error", "data": {"code": "CAPACITY_REACHED"}}, "lower `sessions` of the address"),
        ("x" * (1 << 21), "ConnectionClosed"),
    ],
)
def test_openenv_servers_fault_fails_the_trajectory(answer, why):
    made, _ = run_served([answer], scripted("hello"))
    assert made.status == "failed"
    assert why in made.info["error"]


def test_openenv_without_a_server_fails_the_trajectory():
    made = run_addressed("openenv://127.0.0.1:9?timeout=5", scripted(), ["solver"])
    assert made.status == "failed"
    assert re.search("ws://127.0.0.1:9/ws: no connection", made.info["error"])
    assert isinstance(made.task, Task)
