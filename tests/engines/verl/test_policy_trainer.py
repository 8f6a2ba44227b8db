from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl")

import zmq
from ray.exceptions import ActorDiedError
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from creditflow.engines.verl.policy_trainer import PolicyTrainer
from creditflow.engines.verl.trainer import expect_live_servers
from creditflow.errors import CreditflowError


def balanced(batch: KVBatchMeta, ranks: int, updates: int, metrics: dict[str, float]) -> KVBatchMeta:
    """The rows as `PolicyTrainer` orders them for so many ranks and mini-batches."""
    stand_in = SimpleNamespace(
        **_workers(ranks),
        config=SimpleNamespace(data=SimpleNamespace(train_batch_size=updates)),
        mini_batch_size=1,
    )
    return PolicyTrainer._balanced(stand_in, batch, metrics)


def balanced_by_verl(batch: KVBatchMeta, ranks: int, updates: int, metrics: dict[str, float]) -> KVBatchMeta:
    stand_in = SimpleNamespace(**_workers(ranks), _get_required_batch_multiple=lambda dp_size: dp_size * updates)
    return PPOTrainer._balance_batch(stand_in, batch, metrics)


def _workers(ranks: int) -> dict[str, SimpleNamespace]:
    workers = SimpleNamespace(_dispatch_info={}, _query_dispatch_info=lambda role: list(range(ranks)))
    return {"actor_rollout_wg": workers, "tokenizer": SimpleNamespace(eos_token_id=0)}


def rows(count: int) -> KVBatchMeta:
    lengths = np.random.default_rng(0).integers(20, 300, count).tolist()
    tags = [{"seq_len": length} for length in lengths]
    return KVBatchMeta(keys=[f"row {i}" for i in range(count)], tags=tags, partition_id="train")


@pytest.mark.parametrize(("ranks", "updates"), [(1, 1), (2, 3), (8, 4)])
def test_rows_are_balanced_as_in_verl(ranks, updates):
    ours, theirs = {}, {}
    dealt = balanced(rows(480), ranks, updates, ours)
    verls = balanced_by_verl(rows(480), ranks, updates, theirs)
    assert ours == theirs
    of_rank = 480 // ranks
    for rank in range(ranks):
        own = slice(rank * of_rank, (rank + 1) * of_rank)
        assert sorted(dealt.keys[own]) == sorted(verls.keys[own])
    before = rows(480)
    assert dict(zip(dealt.keys, map(str, dealt.tags), strict=True)) == dict(
        zip(before.keys, map(str, before.tags), strict=True)
    )


@pytest.mark.parametrize(("ranks", "updates"), [(2, 3), (4, 2)])
def test_every_mini_batch_has_real_rows(ranks, updates, monkeypatch):
    n_padding = ranks * updates - 1
    padding = [f"padding {i}" for i in range(n_padding)]

    def padded(batch: KVBatchMeta, multiple: int, eos: int) -> KVBatchMeta:
        tags = [*batch.tags, *({"seq_len": 1} for _ in padding)]
        return KVBatchMeta(keys=[*batch.keys, *padding], tags=tags, partition_id="train")

    monkeypatch.setattr("creditflow.engines.verl.policy_trainer.upsample_batch_to_divisible_size", padded)
    count = ranks * updates * 3 - n_padding
    dealt = balanced(rows(count), ranks, updates, {}).keys
    size = len(dealt) // (ranks * updates)
    for first in range(0, len(dealt), size):  # a rank's rows are cut into mini-batches from the front
        assert any(key.startswith("row") for key in dealt[first : first + size])


@pytest.mark.parametrize("error", [ActorDiedError(), zmq.Again()], ids=["died", "late"])
def test_dead_servers_end_the_run_with_advice(error):
    message = r"^a rollout server died or stopped responding: .+; run the same command again"
    with pytest.raises(CreditflowError, match=message), expect_live_servers():
        raise error
