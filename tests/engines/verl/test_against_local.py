"""Compare the advantages of both engines on the same recorded trajectories."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("verl_cpu")

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from creditflow.credit import assign, make_threshold
from creditflow.data import Score, Trajectory, TrajectoryBatch
from creditflow.data.table import pack
from creditflow.engines.verl.agent_loop import step_output
from creditflow.engines.verl.buffer import RolloutBuffer
from creditflow.engines.verl.rollouts import RolloutRecord, take
from creditflow.engines.verl.rows import VerlRows, delete_rows, delete_unfinished, select
from creditflow.engines.verl.runner import sampled_steps
from tests.builders import credit_options, make_trajectory, step

WHERE = "creditflow_train"


def recorded(seed: int) -> list[Trajectory]:
    """Trajectories of a team with different lengths, graphs, step and token scores; some failed or truncated.

    In every third one, two agents have their own outcomes.
    """
    rng = np.random.default_rng(seed)
    trajectories = []
    for n in range(24):
        steps = []
        for s in range(int(rng.integers(1, 7))):
            tokens = int(rng.integers(1, 5))
            agent = "planner" if s == 0 else str(rng.choice(["executor", "verifier"]))
            scores: dict[str, object] = {"right": float(rng.integers(0, 5) / 4)} if agent != "planner" else {}
            if agent == "verifier" and rng.random() < 0.7:
                scores["by_token"] = Score(tuple(rng.random(tokens).tolist()))
            if rng.random() < 0.05:
                scores["right"] = "failed"
            parents = rng.choice(s, size=min(s, int(rng.integers(1, 3))), replace=False).tolist() if s else []
            greedy = {"temperature": 0.0, "response_mask": (0,) * tokens} if rng.random() < 0.1 else {}
            steps.append(step(agent, scores, sorted(parents), tokens=tokens, prompt_ids=(1,) * 3, **greedy))
        status = "failed" if n == 5 else "truncated" if n == 7 else "ok"
        outcome, task = float(rng.integers(0, 2)), f"0-1-{n // 4}"
        of_agents = {"planner": float(rng.integers(0, 2)), "executor": "failed" if n == 9 else 0.25}
        trajectory = make_trajectory(
            f"{task}-{n % 4}", steps, outcome, task, status=status, answer_steps=(len(steps) - 1,),
            outcomes=of_agents if n % 3 == 0 else {},
        )  # fmt: skip
        trajectories.append(trajectory)
    return trajectories


def send(trajectories: list[Trajectory]) -> KVBatchMeta:
    """Write records and rows out of order, like agent-loop workers; returns the rows like verl's replay buffer."""
    keys: list[str] = []

    async def put() -> None:
        for n in np.random.default_rng(0).permutation(len(trajectories)).tolist():
            place, key = (n // 4, n % 4), f"u{n // 4}_{n % 4}"
            await RolloutRecord(place, pack(trajectories[n])).put(key, WHERE)
            keys.extend(await put_rows(trajectories[n], key))

    asyncio.run(put())
    return KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id="train")


async def put_rows(trajectory: Trajectory, key: str) -> list[str]:
    """Write the rows of a trajectory's steps; returns their keys."""
    steps = [trajectory.steps[i] for i in sampled_steps(trajectory, ["default"])]
    rows = [step_output(trajectory, one, 0.0).as_dict() for one in steps]
    for row in rows:
        row["loss_mask"] = row["response_mask"]  # as verl's workers do
    names = [f"{key}_{i}" for i in range(len(rows))]
    if rows:
        await tq.async_kv_batch_put(
            keys=names, fields=list_of_dict_to_tensordict(rows), tags=[{}] * len(rows), partition_id="train"
        )
    return names


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"propagation": "identical", "adv_estimator": "rloo", "group_by": "task"},
        {"propagation": "threshold", "on_closed_gate": "freeze", "group_by": "agent"},
        {"propagation": "threshold", "outcome_to": "answer"},
        {"propagation": "threshold", "decomp_granularity": "token_level", "group_by": "task_agent"},
        {"adv_estimator": "reinforce_plus_plus"},
        {"propagation": "calibrated"},
        {"propagation": "threshold", "adv_estimator": "gae", "gamma": 0.9, "lam_token": 0.9, "gamma_token": 0.99},
    ],
    ids=lambda options: ",".join(map(str, options.values())) or "default",
)
def test_rows_get_the_advantages_that_the_local_engine_trains_on(queue, options):
    chosen = credit_options(**options)
    trajectories = recorded(seed=len(options))
    batch = TrajectoryBatch.from_trajectories(trajectories)
    values_T = np.random.default_rng(1).normal(size=int(batch.token_offsets[-1])).astype(np.float32).astype(np.float64)
    critic = values_T if chosen.adv_estimator == "gae" else None
    earlier = TrajectoryBatch.from_trajectories(recorded(seed=100))
    history = assign(earlier, replace(chosen, adv_estimator="grpo")).history_after
    threshold = make_threshold(0.5, batch.agent_names)
    local = assign(batch, chosen, values_T=critic, threshold=threshold, history=history)
    advantages_T = local.token_advantages()

    rows = send(trajectories)
    taken = take(WHERE, expected=len(trajectories))
    columns = VerlRows(taken.steps_of_rows(["default"]), taken.batch.token_offsets)
    step_of = columns.step_of_key
    step_R = columns.expect_all(rows)
    if critic is not None:
        spans = {key: slice(*batch.token_offsets[[s, s + 1]]) for key, s in step_of.items()}
        tq.kv_batch_put(
            keys=rows.keys,
            partition_id="train",
            fields=list_of_dict_to_tensordict(
                [{"values": torch.tensor(values_T[spans[key]], dtype=torch.float32)} for key in rows.keys]
            ),
        )
        critic = np.zeros_like(values_T)
        columns.values(rows, critic)
    threshold = make_threshold(0.5, batch.agent_names)
    ours = assign(taken.batch, chosen, values_T=critic, threshold=threshold, history=history)
    trained = select(rows, (ours.groups.trained_S & ours.batch.sampled_by("default"))[step_R])
    trained = columns.put(trained, ours)
    got = tq.kv_batch_get(keys=trained.keys, partition_id="train", select_fields=["advantages", "response_mask"])

    sampled = {
        s
        for s in range(batch.n_steps)
        if batch.response_mask[batch.token_offsets[s] : batch.token_offsets[s + 1]].any()
    }
    assert {step_of[key] for key in trained.keys} == {s for s in sampled if local.groups.trained_S[s]}
    for key, row in zip(trained.keys, got["advantages"].unbind(), strict=True):
        start, end = batch.token_offsets[step_of[key]], batch.token_offsets[step_of[key] + 1]
        np.testing.assert_allclose(row.numpy(), advantages_T[start:end], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(ours.credit.total_S, local.credit.total_S)
    assert ours.history_after.to_json() == local.history_after.to_json()
    assert np.abs(advantages_T).max() > 0
    delete_rows(rows, keep=())


def add_groups(status: str, *uids: str) -> None:
    tags = [{"is_prompt": True, "status": status, "global_steps": 1}] * len(uids)
    tq.kv_batch_put(keys=list(uids), partition_id="train", tags=tags)


def test_groups_are_taken_once_in_the_order_of_the_data(queue):
    trajectories = recorded(seed=9)
    rows = send(trajectories)
    taken = take(WHERE, expected=24, uids={"u1", "u3"}, unfinished={"u2"})
    again = take(WHERE, expected=8, uids={"u2"})
    assert taken.batch.to_trajectories() == [one for one in trajectories if one.uid in ("0-1-1", "0-1-3")]
    assert again.batch.to_trajectories() == [one for one in trajectories if one.uid == "0-1-2"]
    assert (again.expected, again.lost) == (8, 4)
    assert not take(WHERE, expected=0).batch.n_trajectories
    delete_rows(rows, keep=())


def test_restored_queue_forgets_records_of_unfinished_groups(queue):
    rows = send(recorded(seed=9))
    add_groups("finished", "u1")  # the other groups were trained on
    add_groups("running", "u2")
    delete_unfinished(WHERE)
    groups = {where: {key.split("_")[0] for key in tq.kv_list(partition_id=where)[where]} for where in (WHERE, "train")}
    assert groups == {WHERE: {"u1"}, "train": {"u1", "u2"}}
    take(WHERE, expected=24)
    tq.kv_clear(keys=["u1", "u2"], partition_id="train")
    delete_rows(rows, keep=())


def buffer_of(
    mode: str, min_complete_frac: float = 1.0, on_poll: Callable[[], None] = lambda: None, **options: object
) -> RolloutBuffer:
    section, buffer = OmegaConf.create({}), ReplayBuffer if mode == "sync" else ReplayBufferAsync
    whole = buffer(mode, section, None, "drop", section, **options)
    return RolloutBuffer.from_replay_buffer(whole, on_poll, min_complete_frac, rollouts=0)


def test_late_groups_alone_exceed_a_batch(queue):
    """A batch takes no more groups than its own and those that earlier batches went without."""
    buffer, sizes = buffer_of("colocate_async", 0.5), []
    add_groups("finished", *"abcde")
    for more in ("", "", "", "fghi"):
        if more:
            add_groups("finished", *more)
        buffer.sample(1, "train", 2)
        sizes.append(len(buffer.selected))
    assert sizes == [2, 2, 1, 3]
    tq.kv_clear(keys=list(buffer.unfinished), partition_id="train")


def test_filter_of_groups_does_not_replace_failed_ones(queue):
    """Otherwise a team that always fails would be sampled for ever, without an error."""
    refilled: list[int] = []
    buffer = buffer_of("colocate_async", filter_groups_metric="acc", refill_fn=refilled.append)
    add_groups("failure", "a", "b")
    buffer.sample(1, "train", 2)
    assert (buffer.selected, refilled) == ({"a", "b"}, [])


def test_buffer_passes_errors_of_a_poll_on(queue):
    def lose_the_queue() -> None:
        raise RuntimeError("storage unit timed out")

    buffer = buffer_of("sync", on_poll=lose_the_queue)
    buffer.selected = {"u0"}  # of the training step before
    add_groups("running", "u1")
    with pytest.raises(RuntimeError, match="storage unit timed out"):
        buffer.sample(1, "train", 1)
    tq.kv_clear(keys=["u1"], partition_id="train")
