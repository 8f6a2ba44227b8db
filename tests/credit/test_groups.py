"""Groups: keys, versions, and back-off."""

import numpy as np
import pytest

from creditflow.credit.groups import LEVEL_NAMES, compact
from creditflow.data import TrajectoryBatch
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
    assert a.groups.group_size_S.tolist() == sizes
    levels = [LEVEL_NAMES[level] for level in a.groups.level_S]
    assert levels[:6] == [group_by] * 6
    assert levels[6:] == [group_by if group_by.startswith("agent") else "agent_turn"] * 3


def test_versions_within_the_lag_share_groups():
    rewards = {5: 0.0, 4: 0.5, 3: 1.0}
    steps = [make_trajectory(f"t{v}", [own(r, policy_version=v)]) for v, r in rewards.items()]
    other = make_trajectory("other", [own(0.75, policy="other", policy_version=3)])
    for lag, means in ((0, [0.0, 0.5, 1.0]), (1, [0.25, 0.25, 1.0]), (2, [0.5, 0.5, 0.5])):
        made = credited(*steps, other, group_by="agent", max_version_lag=lag, **PLAIN)
        alone = made.groups.level_S < 0
        assert [mean for mean, none in zip(made.advantage.baseline_S, alone, strict=True) if not none] == [
            mean for mean in means if means.count(mean) > 1
        ]
    assert made.group_name(0) == "agent=a policy=default version=3..5"


def test_group_of_one_trajectory_with_many_steps_is_alone():
    a = credited(make_trajectory("t0", [own(0.0), own(1.0)]), group_by="agent", **PLAIN)
    assert a.groups.group_S.tolist() == [-1, -1]
    assert a.advantage.advantage_S.tolist() == [0.0, 0.0]
    assert np.isnan(a.advantage.baseline_S).all()
    assert (a.group_name(0), a.groups.singletons) == (None, 1)


def test_back_off_follows_its_order_of_levels():
    late = own(1.0, turn=5)
    to_task_agent = credited(make_trajectory("t0", [late]), make_trajectory("t1", [own(0.0, turn=1)]), **PLAIN)
    assert LEVEL_NAMES[to_task_agent.groups.level_S[0]] == "task_agent"
    same_turn = [
        make_trajectory("t0", [late]),
        make_trajectory("t1", [own(0.0, turn=5)], task="q1"),
        make_trajectory("t2", [own(0.0, turn=1)], task="q2"),
    ]
    to_agent_turn = credited(*same_turn, group_by="task_agent", **PLAIN)
    assert LEVEL_NAMES[to_agent_turn.groups.level_S[0]] == "agent_turn"
    assert to_agent_turn.advantage.baseline_S[0] == 0.5
    assert LEVEL_NAMES[to_agent_turn.groups.level_S[2]] == "agent"
    assert to_agent_turn.groups.group_size_S[2] == 3


def test_back_off_group_includes_all_steps_of_its_key():
    trajectories = [
        make_trajectory("t0", [own(1.0, turn=5)]),
        *(make_trajectory(f"t{n}", [own(0.0)]) for n in (1, 2, 3)),
    ]
    a = credited(*trajectories, **PLAIN)
    assert a.groups.group_size_S.tolist() == [4, 3, 3, 3]
    assert a.advantage.baseline_S.tolist() == [0.25, 0.0, 0.0, 0.0]


def test_group_name_lists_the_parts_of_the_key():
    a = credited(
        *(
            make_trajectory(f"t{n}", [own(n / 4, agent="write", stratum="hard", policy="p", policy_version=3)])
            for n in range(2)
        ),
        **PLAIN,
    )
    assert a.group_name(0) == "agent=write turn=0 policy=p version=3 stratum=hard"


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
    computed, derived = [], TrajectoryBatch.derived
    monkeypatch.setattr(
        TrajectoryBatch,
        "derived",
        lambda batch, name, compute: derived(batch, name, lambda: computed.append(name) or compute()),
    )
    trajectories = [make_trajectory(f"t{n}", [step("a", 0.1 * n, tokens=2)], float(n)) for n in range(3)]
    credited(*trajectories, decomp_granularity="token_level", adv_estimator=estimator)
    assert len(computed) == len(set(computed))
    assert "codes agent_turn 0 False" in computed
