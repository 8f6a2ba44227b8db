"""Requests for branches and their records, with workers that repeat the record."""

from dataclasses import replace

import pytest

pytest.importorskip("verl_cpu")

from creditflow.credit.trees import KEY
from creditflow.data import TrajectoryBatch
from creditflow.engines.common.branches import PlannedBranch
from creditflow.engines.verl.branches import BranchRequest, BranchRun
from creditflow.engines.verl.rollouts import RolloutRecord, RolloutRecords
from creditflow.errors import ConfigError
from creditflow.rewards import ScoringReport
from creditflow.rewards.manager import FunctionReport
from tests.builders import make_trajectory, step

ROLLOUTS = [
    make_trajectory(f"0-1-{task}-{n}", [step("a", 1.0, tokens=2), step("b", 1.0, tokens=3)], 1.0, f"0-1-{task}")
    for task in range(2)
    for n in range(2)
]
REPORT = ScoringReport((FunctionReport("f", "step", 2, 1, 1.0, 0.5, ("f: broken",)),), 0.5)


def rollouts() -> RolloutRecords:
    return RolloutRecords(
        TrajectoryBatch.from_trajectories(ROLLOUTS),
        ("u0_0", "u0_1", "u1_0", "u1_1"),
        ScoringReport((), 0.0),
        4,
        places=((7, 0), (7, 1), (3, 0), (3, 1)),
    )


def planned(place: int, alternative: int, number: int = 0) -> PlannedBranch:
    root = ROLLOUTS[place]
    return PlannedBranch(place, root, root, 1, alternative, number, (0, 5, 1))


def repeats(asked: list[BranchRequest]):
    def run(requests, training_step):
        assert training_step == 1
        asked.extend(requests)
        made = [replace(one.recorded(), id=one.id) for one in requests]
        for one in made:
            one.steps = [replace(own, id=f"{one.id}/{own.index}", trajectory_id=one.id) for own in one.steps]
            one.steps[1].branch_of = "x"
        return [RolloutRecord.from_trajectory(one, REPORT, (0, 0), {"endpoint/m/requests": 2.0}) for one in made]

    return run


def test_branch_requests_have_unique_keys_in_their_group():
    asked: list[BranchRequest] = []
    running = BranchRun(repeats(asked), rollouts(), 1)
    running.run([planned(0, 1), planned(3, 1), planned(0, 2)])
    running.run([planned(0, 1, 1)])
    assert [one.uid for one in asked] == ["u0", "u1", "u0", "u0"]
    assert [one.index for one in asked] == [7, 3, 7, 7]
    assert [one.session for one in asked] == [2, 3, 4, 5]
    assert [one.key for one in asked] == [(0, 5, 1, 1, 0), (0, 5, 1, 1, 0), (0, 5, 1, 2, 0), (0, 5, 1, 1, 1)]
    assert running.keys == {"u0_2", "u1_3", "u0_4", "u0_5"}


def test_finished_branches_follow_rollouts_tree_by_tree():
    running = BranchRun(repeats([]), rollouts(), 1)
    running.run([planned(0, 1), planned(3, 1), planned(0, 2)])
    running.run([planned(0, 1, 1)])
    assert running.tokens == 4 * 3
    assert running.counted == {"endpoint/m/requests": 8.0}
    assert (running.report.functions[0].matched, running.report.functions[0].failed) == (8, 4)
    merged = running.with_branches(ROLLOUTS)
    ids = ["0-1-0-0~1.0", "0-1-0-0~1.1", "0-1-0-0~2.0", "0-1-1-1~1.0"]
    assert list(merged.batch.trajectory_ids[4:]) == ids
    assert merged.keys[4:] == ("u0_2", "u0_5", "u0_4", "u1_3")
    assert merged.batch.trajectory_info[5][KEY] == {"of": "0-1-0-0", "alternative": 1, "continuation": 1}


def test_mistake_of_a_recipe_in_a_branch_ends_the_run():
    running = BranchRun(lambda requests, step: [RolloutRecord("mistake", "the tool has no name")], rollouts(), 1)
    with pytest.raises(ConfigError, match="the tool has no name"):
        running.run([planned(0, 1)])
