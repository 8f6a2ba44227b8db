"""Groups: keys, back-off, and the weight of a trajectory in its group."""

import math

import numpy as np
import pytest

from creditflow.credit import groups as groups_module
from creditflow.credit import kernels
from creditflow.credit.groups import LEVEL_NAMES, LEVELS, compact
from creditflow.data import Score
from tests.builders import credited, make_trajectory, step


def own(r, **more):
    """A step of credit r: only its own reward, measured from 0."""
    return step(more.pop("agent", "a"), r, (), **more)


PLAIN = {"propagation": "none", "sub_reward_origin": 0.0}


@pytest.mark.parametrize(
    ("group_by", "sizes"),
    [
        # Trajectories t0, t1 of q0 and t2 of q1; agents a, b, a in each; prompts of t0 and t2 are equal.
        ("task", [2, 2, 2, 2, 2, 2, 3, 3, 3]),
        ("task_agent", [2, 2, 2, 2, 2, 2, 3, 3, 3]),
        ("task_agent_turn", [2, 2, 2, 2, 2, 2, 3, 3, 3]),
        ("agent", [3] * 9),
        ("agent_turn", [3] * 9),
    ],
)
def test_group_by_sets_the_key_and_lone_trajectories_back_off(group_by, sizes):
    def three(id, task):
        return make_trajectory(id, [own(0.5, agent=agent) for agent in "aba"], task=task)

    a = credited(three("t0", "q0"), three("t1", "q0"), three("t2", "q1"), group_by=group_by, **PLAIN)
    assert a.group_size_S.tolist() == sizes
    levels = [LEVEL_NAMES[level] for level in a.level_S]
    assert levels[:6] == [group_by] * 6
    assert levels[6:] == [group_by if group_by.startswith("agent") else "agent_turn"] * 3


def test_task_groups_mix_agents_and_agent_groups_mix_tasks():
    trajectories = [
        make_trajectory("t0", [own(0.0, agent="a"), own(1.0, agent="b")]),
        make_trajectory("t1", [own(0.5, agent="a")]),
    ]
    assert credited(*trajectories, group_by="task", **PLAIN).baseline_S.tolist() == [0.5, 0.5, 0.5]
    assert credited(*trajectories, group_by="agent", **PLAIN).baseline_S.tolist()[0] == 0.25


def test_task_agent_state_groups_by_prompt():
    trajectories = [make_trajectory(f"t{n}", [own(n / 4, prompt=prompt)]) for n, prompt in enumerate("xyxy")]
    assert credited(*trajectories, group_by="task_agent_state", **PLAIN).baseline_S.tolist() == [0.25, 0.5, 0.25, 0.5]


@pytest.mark.parametrize("differs", [{"policy": "other"}, {"policy_version": 1}, {"stratum": "s"}])
@pytest.mark.parametrize("group_by", LEVELS)
def test_policy_version_and_stratum_separate_groups(group_by, differs):
    trajectories = [make_trajectory(f"t{n}", [own(n / 4, prompt="x", **(differs if n % 2 else {}))]) for n in range(4)]
    assert credited(*trajectories, group_by=group_by, **PLAIN).baseline_S.tolist() == [0.25, 0.5, 0.25, 0.5]


def test_versions_within_the_lag_share_groups():
    rewards = {5: 0.0, 4: 0.5, 3: 1.0}
    steps = [make_trajectory(f"t{v}", [own(r, policy_version=v)]) for v, r in rewards.items()]
    other = make_trajectory("other", [own(0.75, policy="other", policy_version=3)])
    for lag, means in ((0, [0.0, 0.5, 1.0]), (1, [0.25, 0.25, 1.0]), (2, [0.5, 0.5, 0.5])):
        made = credited(*steps, other, group_by="agent", max_version_lag=lag, **PLAIN)
        alone = made.level_S < 0
        assert [mean for mean, none in zip(made.baseline_S, alone, strict=True) if not none] == [
            mean for mean in means if means.count(mean) > 1
        ]
    assert made.group_name(0) == "agent=a policy=default version=3..5"


def test_trajectories_weigh_equally_in_the_baseline():
    many, one = make_trajectory("t0", [own(1.0) for _ in range(9)]), make_trajectory("t1", [own(0.0)])
    a = credited(many, one, group_by="agent", **PLAIN)
    assert set(a.baseline_S.tolist()) == {0.5}
    # variance: 2/1 times the mean over two trajectories of their mean square deviation of 1/4
    assert a.spread_S.tolist() == pytest.approx([math.sqrt(0.5)] * 10)


def test_group_of_one_trajectory_with_many_steps_is_alone():
    a = credited(make_trajectory("t0", [own(0.0), own(1.0)]), group_by="agent", **PLAIN)
    assert a.group_S.tolist() == [-1, -1]
    assert a.advantage_S.tolist() == [0.0, 0.0]
    assert np.isnan(a.baseline_S).all()
    assert (a.group_name(0), a.singletons) == (None, 1)


def test_back_off_follows_its_order_of_levels():
    late = own(1.0, turn=5)
    to_task_agent = credited(make_trajectory("t0", [late]), make_trajectory("t1", [own(0.0, turn=1)]), **PLAIN)
    assert LEVEL_NAMES[to_task_agent.level_S[0]] == "task_agent"
    same_turn = [
        make_trajectory("t0", [late]),
        make_trajectory("t1", [own(0.0, turn=5)], task="q1"),
        make_trajectory("t2", [own(0.0, turn=1)], task="q2"),
    ]
    to_agent_turn = credited(*same_turn, group_by="task_agent", **PLAIN)
    assert LEVEL_NAMES[to_agent_turn.level_S[0]] == "agent_turn"
    assert to_agent_turn.baseline_S[0] == 0.5
    assert LEVEL_NAMES[to_agent_turn.level_S[2]] == "agent"
    assert to_agent_turn.group_size_S[2] == 3


def test_back_off_group_includes_all_steps_of_its_key():
    trajectories = [
        make_trajectory("t0", [own(1.0, turn=5)]),
        *(make_trajectory(f"t{n}", [own(0.0)]) for n in (1, 2, 3)),
    ]
    a = credited(*trajectories, **PLAIN)
    assert a.group_size_S.tolist() == [4, 3, 3, 3]
    assert a.baseline_S.tolist() == [0.25, 0.0, 0.0, 0.0]


def test_group_name_lists_the_parts_of_the_key():
    a = credited(
        *(
            make_trajectory(f"t{n}", [own(n / 4, agent="write", stratum="hard", policy="p", policy_version=3)])
            for n in range(2)
        ),
        **PLAIN,
    )
    assert a.group_name(0) == "agent=write turn=0 policy=p version=3 stratum=hard"


def test_masked_steps_are_excluded_from_baselines():
    trajectories = [
        make_trajectory("t0", [own(Score(0.0, status="failed"))]),
        make_trajectory("t1", [own(1.0)]),
        make_trajectory("t2", [own(0.5)]),
        make_trajectory("t3", [own(0.0)], status="failed"),
    ]
    a = credited(*trajectories, **PLAIN)
    assert a.baseline_S[[1, 2]].tolist() == [0.75, 0.75]
    assert np.isnan(a.baseline_S[[0, 3]]).all()


def test_compact_numbers_combinations_without_gaps():
    rng = np.random.default_rng(0)
    for columns in (
        [rng.integers(0, 5, 200), rng.integers(-1, 3, 200)],
        [rng.integers(0, 10**9, 200), rng.integers(-(10**9), 10**9, 200), rng.integers(0, 2, 200)],
        [np.zeros(3, dtype=np.int64)],
        [np.array([7]), np.array([-(10**12)])],
    ):
        codes, n = compact(*columns)
        keys = list(zip(*(column.tolist() for column in columns), strict=True))
        assert sorted(set(codes.tolist())) == list(range(n))
        assert len(set(zip(codes.tolist(), keys, strict=True))) == n == len(set(keys))


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus_baseline"])
def test_assign_computes_each_column_once(monkeypatch, estimator):
    computed = []

    def count(module, name):
        function = getattr(module, name)

        def counted(*given):
            computed.append(name)
            return function(*given)

        monkeypatch.setattr(module, name, counted)

    count(kernels, "sampled_tokens")
    count(groups_module, "codes_of_level")
    trajectories = [make_trajectory(f"t{n}", [step("a", 0.1 * n, tokens=2)], float(n)) for n in range(3)]
    credited(*trajectories, decomp_granularity="token_level", adv_estimator=estimator)
    assert sorted(computed) == ["codes_of_level", "sampled_tokens"]
