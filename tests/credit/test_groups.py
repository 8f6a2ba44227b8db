"""Groups: versions, names and codes. `test_against_oracle.py` has the keys and the back-off."""

import numpy as np
import pytest

from creditflow.credit.groups import compact
from creditflow.data import TrajectoryBatch
from tests.builders import credited, make_trajectory, step


def own(r, **more):
    """A step of credit r: only its own reward, measured from 0."""
    return step(more.pop("agent", "a"), r, (), **more)


PLAIN = {"propagation": "none", "sub_reward_origin": 0.0}


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


def test_group_name_lists_the_parts_of_the_key():
    a = credited(
        *(
            make_trajectory(f"t{n}", [own(n / 4, agent="write", stratum="hard", policy="p", policy_version=3)])
            for n in range(2)
        ),
        **PLAIN,
    )
    assert a.group_name(0) == "agent=write turn=0 policy=p version=3 stratum=hard"
    assert credited(make_trajectory("t0", [own(0.0), own(1.0)]), **PLAIN).group_name(0) is None  # alone


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
