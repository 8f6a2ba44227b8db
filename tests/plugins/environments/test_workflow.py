"""Environments as workflows, with agents that answer by rule."""

import asyncio
import json
import re
import sys

import gymnasium
import numpy as np
import pytest
from pettingzoo.classic import connect_four_v3, rps_v2, tictactoe_v3
from pettingzoo.utils import OrderEnforcingWrapper, parallel_to_aec
from pettingzoo.utils.env import AECEnv, ParallelEnv

from creditflow.data import Task
from creditflow.errors import AgentError, ConfigError, RewardError
from creditflow.plugins import environments
from creditflow.plugins.environments.adapters.gymnasium import GymnasiumEnvironment
from creditflow.plugins.environments.adapters.spaces import legal_actions
from creditflow.plugins.environments.base import View, plain
from creditflow.plugins.environments.rewards import Returns, StepReward
from creditflow.rollout import AgentSpec, Rollout, Scheduler, run_rollouts
from creditflow.rollout.recorder import Sampling
from tests.builders import Replies
from tests.cli.commands import creditflow
from tests.paths import ROOT
from tests.rewards.trajectories import load


def scripted(*answers: str) -> Replies:
    left = list(answers)
    return Replies(lambda prompt: left.pop(0))


def first_legal(prompt: str) -> str:
    return "I take " + re.findall(r"Legal actions: (\d+)", prompt)[0]


def run_workflow(workflow, client, seats=("player_1", "player_2"), n=1, **extra):
    agents = {seat: AgentSpec() for seat in seats}
    task = Task("game", ({"role": "user", "content": "trajectory"},), None, extra)
    rollouts = [Rollout(task, "u", f"0-1-0-{k}", (k,)) for k in range(n)]
    sampling = Sampling(max_tokens=100, max_prompt_tokens=50_000)
    made = asyncio.run(run_rollouts(rollouts, workflow, agents, Scheduler({"default": client}), sampling))
    return made[0] if n == 1 else made


def tictactoe(task):
    return tictactoe_v3.env()


def won(workflow=None, **options):
    """Run tic-tac-toe; the first player takes the cells 0, 1, 2, one column."""
    return run_workflow(workflow or environments.aec(tictactoe), scripted("0", "3", "1", "4", "2"), **options)


def test_turn_based_game_rewards_the_last_actions():
    made = won()
    assert [(s.agent, s.info["action"], s.parents) for s in made.steps] == [
        ("player_1", 0, ()),
        ("player_2", 3, ()),
        ("player_1", 1, (0,)),
        ("player_2", 4, (1,)),
        ("player_1", 2, (2,)),
    ]
    assert [s.info.get("reward", 0.0) for s in made.steps] == [0, 0, 0, -1, 1]
    assert json.loads(made.answer) == {"player_1": 1, "player_2": -1}
    assert made.answer_steps == (3, 4)
    score = StepReward(-1, 1)
    assert score.range == (-1.0, 1.0)
    assert [score(step, made) for step in made.steps] == [0, 0, 0, -1, 1]
    assert Returns(-1, 1)(made) == 0
    assert Returns(-1, 1, "player_1")(made) == 1
    with pytest.raises(ValueError, match="no seat 'player_3' in this trajectory; there is player_1, player_2"):
        Returns(-1, 1, "player_3")(made)


def test_returns_per_agent_name_each_side_and_the_common_outcome():
    made = won()
    assert Returns(-1, 1, per_agent=True)(made) == {"*": 0.0, "player_1": 1.0, "player_2": -1.0}
    assert Returns(-1, 1, "player_2", per_agent=True)(made) == {"*": -1.0, "player_1": 1.0, "player_2": -1.0}
    made.steps[1].info.pop("seat")
    with pytest.raises(ValueError, match="expected a seat of the environment in its info"):
        Returns(-1, 1, per_agent=True)(made)
    made = won(environments.aec(tictactoe, agents={"player_1": "both", "player_2": "both"}), seats=["both"])
    assert Returns(-1, 1, "player_1", per_agent=True)(made) == {"*": 1.0, "both": 0.0}


def test_prompt_has_observation_and_legal_actions():
    client = Replies(first_legal)
    run_workflow(environments.aec(tictactoe), client)
    assert "Legal actions: 0, 1, 2, 3, 4, 5, 6, 7, 8. Answer with one of them." in client.prompts[0]
    assert "Legal actions: 1, 2, 3, 4, 5, 6, 7, 8." in client.prompts[1]
    assert "action_mask" not in client.prompts[1]
    assert "[[[" in client.prompts[0]
    assert "..." not in plain(View(None, "go", np.zeros((19, 19, 17)), None, 0))


def test_seats_may_share_an_agent_and_a_custom_prompt():
    def show(view):
        return f"{view.seat} {view.turn} {len(view.legal)}"

    workflow = environments.aec(
        lambda task: connect_four_v3.env(), agents={"player_0": "a", "player_1": "a"}, show=show, max_turns=4
    )
    client = Replies(lambda prompt: "3")
    made = run_workflow(workflow, client, seats=["a"])
    assert client.prompts == ["player_0 0 7", "player_1 0 7", "player_0 1 7", "player_1 1 7"]
    assert [s.agent for s in made.steps] == ["a"] * 4


@pytest.mark.parametrize(("said", "why"), [("no idea", "no number"), ("9", "not legal"), ("0", "not legal")])
def test_illegal_action_ends_the_rollout_with_an_agent_error(said, why):
    seats = {"player_1": "cross", "player_2": "nought"}
    made = run_workflow(environments.aec(tictactoe, agents=seats), scripted("0", said), seats=seats.values())
    assert made.status == "ok"
    assert made.info["agent_error"].startswith("seat player_2, agent nought, turn 0: ")
    assert why in made.info["agent_error"]
    assert made.answer is None
    assert why in made.steps[1].info["illegal"]


def test_illegal_random_draws_the_same_legal_actions_each_run():
    workflow = environments.aec(tictactoe, illegal="random")
    games = [run_workflow(workflow, Replies(lambda prompt: "none")) for _ in range(2)]
    for made in games:
        assert sum(json.loads(made.answer).values()) == 0
        assert all("illegal" in step.info for step in made.steps)
    first, second = ([step.info["action"] for step in made.steps] for made in games)
    assert first == second
    assert len(set(first)) == len(first)


@pytest.mark.parametrize("illegal", ["error", "random"])
def test_mistake_in_read_fails_the_trajectory(illegal):
    made = run_workflow(environments.aec(tictactoe, read=lambda text, view: {}[text], illegal=illegal), scripted("up"))
    assert made.status == "failed"
    assert made.info["error"].startswith("RuntimeError: read raised KeyError: 'up'; expected an action, or ValueError")
    assert "illegal" not in made.steps[0].info


def no_action(text, view):
    raise AgentError("no action in it")


def test_read_may_raise_agent_error_for_an_illegal_action():
    ended = run_workflow(environments.aec(tictactoe, read=no_action), scripted("up"))
    assert ended.info["agent_error"] == "seat player_1, agent player_1, turn 0: no action in it"
    made = run_workflow(
        environments.aec(tictactoe, read=no_action, illegal="random", max_turns=2), scripted("up", "up")
    )
    assert [step.info["illegal"] for step in made.steps] == ["no action in it"] * 2


def test_show_returns_a_text_or_messages():
    shown = environments.aec(tictactoe, show=lambda view: [{"role": "user", "content": "hello"}], max_turns=1)
    assert run_workflow(shown, scripted("0")).steps[0].prompt == "hello"
    with pytest.raises(ConfigError, match=r"show: expected a text or a list of chat messages, got 5 \(int\)"):
        run_workflow(environments.aec(tictactoe, show=lambda view: 5), scripted())


def test_value_outside_its_range_raises_unless_by_rounding():
    made = won()
    for place, value in ((4, "1; the arguments low and high"), (3, "-1; ")):
        with pytest.raises(ValueError, match=rf"in \[0, 0.5\], got {value}"):
            StepReward(0, 0.5)(made.steps[place], made)
    with pytest.raises(ValueError, match=r"expected a value in \[0, 1\], got -1; the arguments low and high"):
        Returns(seat="player_2")(made)
    made.steps[0].info["reward"] = float(np.float32(0.1))
    made.answer = json.dumps({"a": 0.1 + 0.2})
    assert StepReward(0, 0.1)(made.steps[0], made) == 0.1
    assert Returns(0, 0.3)(made) == 0.3


def test_step_without_reward_scores_zero_clipped_to_the_range():
    made = run_workflow(environments.aec(tictactoe), scripted("0", "9"))
    assert "reward" not in made.steps[1].info
    assert [StepReward(*allowed)(made.steps[1], made) for allowed in [(-1, 1), (1, 2), (-2, -1)]] == [0, 1, -1]


def test_check_reports_replaced_illegal_actions():
    address = "gymnasium://FrozenLake-v1?size=4&max_turns=2&illegal=random"
    recipe = ROOT / "examples/environments/gymnasium.yaml"
    result = creditflow("check", recipe, f"data.train_files={address}", "trainer.device=cpu")
    assert result.exit_code == 0, result.output
    told = r"warning: in (\d+) of 32 steps of environments the action was illegal, and another was drawn in its place; "
    (replaced,) = re.findall(told + r"the first: step \S+, agent: the reply has no number", result.output)
    assert 16 < int(replaced) <= 32


class Together(ParallelEnv):
    """Two seats choose numbers; both are paid if they agree."""

    metadata = {"name": "together"}  # noqa: RUF012

    def __init__(self):
        self.possible_agents, self.closed = ["left", "right"], False

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(5)

    def observation_space(self, agent):
        return gymnasium.spaces.Discrete(100)

    def reset(self, seed=None, options=None):
        self.agents, self.round, self.seed = list(self.possible_agents), 0, seed
        return dict.fromkeys(self.agents, self.seed), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.round += 1
        agreed = float(len(set(actions.values())) == 1)
        seen = {agent: f"{agent} saw {actions}" for agent in self.agents}
        paid = dict.fromkeys(self.agents, agreed)
        over = dict.fromkeys(self.agents, self.round == 2)
        infos = {agent: {"action_mask": np.array([1, 1, 0, 0, 0])} for agent in self.agents}
        if self.round == 2:
            self.agents = []
        return seen, paid, over, dict.fromkeys(over, False), infos

    def close(self):
        self.closed = True


class Paying(AECEnv):
    """Seats act in turn, and every action pays every seat a different amount. It ends after `length` actions."""

    metadata = {"name": "paying"}  # noqa: RUF012

    def __init__(self, seats, length=1000):
        super().__init__()
        self.possible_agents, self.length = [f"seat_{k}" for k in range(seats)], length

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(2)

    def observation_space(self, agent):
        return gymnasium.spaces.Discrete(2)

    def observe(self, agent):
        return 0

    def reset(self, seed=None, options=None):
        self.agents, self.acted = list(self.possible_agents), 0
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]

    def step(self, action):
        if self.terminations[self.agent_selection]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[self.agent_selection] = 0.0
        self.rewards = {agent: pays(self.acted, k) for k, agent in enumerate(self.possible_agents)}
        self.acted += 1
        self.terminations = dict.fromkeys(self.agents, self.acted == self.length)
        self.agent_selection = self.possible_agents[self.acted % len(self.possible_agents)]
        self._accumulate_rewards()
        self._deads_step_first()


def pays(action, k):
    """Return the reward of the `k`-th seat for the `action`-th action."""
    return float(action + 1) * 100**k


@pytest.mark.parametrize("max_turns", range(1, 8))
@pytest.mark.parametrize("seats", [1, 2, 3])
def test_cut_short_rollout_pays_each_seat_once(seats, max_turns):
    workflow = environments.aec(lambda task: OrderEnforcingWrapper(Paying(seats)), max_turns=max_turns)
    made = run_workflow(workflow, Replies(first_legal), seats=[f"seat_{k}" for k in range(seats)])
    assert len(made.steps) == max_turns
    earned = {f"seat_{k}": sum(pays(action, k) for action in range(max_turns)) for k in range(seats)}
    assert json.loads(made.answer) == earned
    for action, step in enumerate(made.steps):
        until = min(action + seats, max_turns)
        assert step.info["reward"] == sum(pays(later, action % seats) for later in range(action, until))


TWO_SEATS = ("seat_0", "seat_1")


@pytest.mark.parametrize(("length", "status"), [(4, "ok"), (5, "ok"), (6, "truncated")])
def test_game_that_ends_on_its_last_turn_is_not_truncated(length, status):
    workflow = environments.aec(lambda task: Paying(2, length), max_turns=5)
    made = run_workflow(workflow, Replies(first_legal), TWO_SEATS)
    assert made.status == status
    assert json.loads(made.answer) == {f"seat_{k}": sum(pays(a, k) for a in range(min(length, 5))) for k in range(2)}


def test_environment_that_keeps_ended_seats_fails():
    class NeverOver(Paying):
        def _was_dead_step(self, action):
            pass

    made = run_workflow(environments.aec(lambda task: NeverOver(2, 3)), Replies(first_legal), TWO_SEATS)
    assert made.status == "failed"
    assert "seat_0 has ended, and is not taken from the environment's agents" in made.info["error"]


def test_parallel_seats_act_together_and_are_paid_each_round():
    tables = []

    def make(task):
        tables.append(Together())
        return tables[-1]

    client = Replies(lambda prompt: "4" if "7" in prompt else "1" if "left" in prompt.split()[0] else "0")
    made = run_workflow(environments.parallel(make), client, seats=["left", "right"], seed=7)
    assert [(s.agent, s.turn, s.parents, s.info["reward"]) for s in made.steps] == [
        ("left", 0, (), 1.0),
        ("right", 0, (), 1.0),
        ("left", 1, (0,), 0.0),
        ("right", 1, (1,), 0.0),
    ]
    assert json.loads(made.answer) == {"left": 1.0, "right": 1.0}
    assert client.prompts[0] == "7\nLegal actions: 0, 1, 2, 3, 4. Answer with one of them."
    assert "Legal actions: 0, 1." in client.prompts[2]
    assert Returns(0, 2)(made) == 1.0
    assert tables[0].closed


def test_cut_short_round_does_not_repeat_rewards():
    # The converted environment keeps the rewards of a round until the next round is over.
    workflow = environments.aec(lambda task: parallel_to_aec(Together()), max_turns=3)
    made = run_workflow(workflow, Replies(lambda prompt: "1"), seats=["left", "right"], seed=7)
    assert json.loads(made.answer) == {"left": 1.0, "right": 1.0}
    assert [(s.agent, s.info.get("reward")) for s in made.steps] == [("left", 1.0), ("right", 1.0), ("left", 0.0)]


def lake(task):
    return gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=2)


def hands(make):
    return lambda task: make(num_actions=3, max_cycles=2)


THROWN, TOLD = {"player_0": "player", "player_1": "player"}, "cut short after max_turns=1"


@pytest.mark.parametrize(
    ("workflow", "seats", "answer", "status", "why"),
    [
        (environments.aec(tictactoe, max_turns=1), ["player_1", "player_2"], "0", "truncated", TOLD),
        (environments.aec(hands(rps_v2.env), agents=THROWN), ["player"], "0", "truncated", "by the environment"),
        (environments.parallel(lambda task: Together(), max_turns=1), ["left", "right"], "0", "truncated", TOLD),
        (environments.parallel(lambda task: Together(), max_turns=2), ["left", "right"], "0", "ok", None),
        (environments.parallel(hands(rps_v2.parallel_env), agents=THROWN), ["player"], "0", "truncated", "by the env"),
        (environments.gymnasium(lake, max_turns=1), ["agent"], "0", "truncated", TOLD),
        (environments.gymnasium(lake, max_turns=2), ["agent"], "0", "truncated", "by the environment"),
    ],
)
def test_cut_short_rollout_is_truncated_and_answered(workflow, seats, answer, status, why):
    made = run_workflow(workflow, Replies(lambda prompt: answer), seats=seats, seed=0)
    assert made.status == status
    assert json.loads(made.answer)
    assert why in made.info["truncated"] if why else "truncated" not in made.info


class Numbered(gymnasium.Env):
    """Actions are 1, 2 and 3, and 2 is illegal; pays the action's number, and ends."""

    action_space, observation_space = gymnasium.spaces.Discrete(3, start=1), gymnasium.spaces.Discrete(1)

    def reset(self, *, seed=None, options=None):
        return 0, {"action_mask": np.array([1, 0, 1], dtype=np.int8)}

    def step(self, action):
        return 0, float(action), True, False, {}


@pytest.mark.parametrize(("said", "earned"), [("1", 1.0), ("3", 3.0), ("2", None), ("0", None)])
def test_mask_follows_the_action_spaces_start(said, earned):
    client = Replies(lambda prompt: said)
    made = run_workflow(environments.gymnasium(lambda task: Numbered()), client, seats=["agent"])
    assert "Legal actions: 1, 3. Answer" in client.prompts[0]
    assert made.answer == (None if earned is None else json.dumps({"agent": earned}))


def test_mask_lists_actions_of_discrete_spaces_only():
    discrete, pairs = gymnasium.spaces.Discrete(300, start=1), gymnasium.spaces.MultiDiscrete([2, 2])
    masks = [np.arange(300) % 100 == 7, np.zeros(300), None]
    assert [legal_actions(discrete, mask) for mask in masks] == [(8, 108, 208), (), None]
    assert legal_actions(pairs, (np.array([1, 0]), np.array([1, 1]))) is None
    with pytest.raises(NotImplementedError):
        GymnasiumEnvironment(None).draw(View(None, "agent", 0, (), 0), chance=None)


def test_gymnasium_agent_crosses_the_frozen_lake():
    def make(task):
        return gymnasium.make("FrozenLake-v1", is_slippery=False)

    crossed = run_workflow(
        environments.gymnasium(make), scripted("1", "1", "2", "2", "1", "2"), seats=["agent"], seed=0
    )
    assert json.loads(crossed.answer) == {"agent": 1.0}
    assert [s.info["reward"] for s in crossed.steps] == [0, 0, 0, 0, 0, 1]
    assert [s.parents for s in crossed.steps] == [(), (0,), (1,), (2,), (3,), (4,)]
    drowned = run_workflow(environments.gymnasium(lake, "walker"), scripted("1", "2"), seats=["walker"], seed=0)
    assert json.loads(drowned.answer) == {"walker": 0.0}
    assert drowned.status == "ok"  # it ended on its last turn


WHOLE = "max_turns: expected a whole number, 1 or more"


@pytest.mark.parametrize(
    ("make", "arguments", "options", "message"),
    [
        (environments.aec, [tictactoe], {"illegal": "skip"}, "illegal: expected error or random, got 'skip'"),
        (environments.parallel, [tictactoe], {"max_turns": 0}, WHOLE),
        (environments.gymnasium, [lake], {"max_turns": "9"}, f"gymnasium: {WHOLE}, got "),
        (environments.gymnasium, [lake], {"max_turns": True}, WHOLE),
        (environments.gymnasium, [lake(None)], {}, "make: .* a function, got .*created for each rollout: `lambda task"),
        (environments.gymnasium, ["FrozenLake-v1"], {}, r"make: expected a function, got 'FrozenLake-v1' \(str\)"),
        (environments.gymnasium, [lake, 5], {}, r"gymnasium: agent: expected an agent's name, got 5 \(int\)"),
        (environments.gymnasium, [lake], {"show": "x"}, r"show: expected a function, got 'x' \(str\)$"),
        (environments.aec, [tictactoe], {"agents": ["a"]}, r"expected \{seat: agent\}, .* got \['a'\] \(list\)"),
        (environments.aec, [tictactoe], {"agents": {"player_1": 5}}, r"by their names, got \{'player_1': 5\}"),
    ],
)
def test_invalid_arguments_are_refused_when_the_workflow_is_made(make, arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        make(*arguments, **options)


def test_unknown_seat_and_empty_range_are_refused():
    with pytest.raises(ConfigError, match="the environment has no seat 'x'; there is player_1, player_2"):
        run_workflow(environments.aec(tictactoe, agents={"x": "player_1"}), scripted())
    with pytest.raises(RewardError, match="finite numbers with low < high"):
        load("creditflow.plugins.environments.rewards:StepReward", args={"low": 1, "high": 1})


@pytest.mark.parametrize(
    ("function", "make", "message"),
    [
        ("gymnasium", tictactoe, "gymnasium: make: expected Gymnasium's Env, .* creditflow.plugins.environments.aec"),
        ("gymnasium", hands(rps_v2.parallel_env), "use creditflow.plugins.environments.parallel"),
        ("parallel", tictactoe, "parallel: make: .*PettingZoo's AECEnv, .* use creditflow.plugins.environments.aec"),
        ("aec", lake, "aec: make: .*got Gymnasium's Env, .* use creditflow.plugins.environments.gymnasium"),
        ("aec", hands(rps_v2.parallel_env), "use creditflow.plugins.environments.parallel"),
        ("aec", lambda task: None, r"aec: make: expected PettingZoo's AECEnv, .*got None \(NoneType\)"),
    ],
)
def test_wrong_kind_of_environment_names_the_right_function(function, make, message):
    with pytest.raises(ConfigError, match=message):
        run_workflow(getattr(environments, function)(make), scripted())


def test_gymnasium_works_without_pettingzoo(monkeypatch):
    monkeypatch.setitem(sys.modules, "pettingzoo.utils.env", None)  # importing it raises ModuleNotFoundError
    made = run_workflow(environments.gymnasium(lake, max_turns=1), scripted("1"), seats=["agent"])
    assert made.status == "truncated"
