from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("verl")

from ray.exceptions import ActorDiedError
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from creditflow.engines.verl.trainer import CreditflowTrainer, PolicyTrainer
from creditflow.errors import CreditflowError


def trainer(cls: type, ranks: int, updates: int) -> SimpleNamespace:
    """A stand-in for a trainer with the attributes that `_balance_batch` of `cls` uses."""

    def required_multiple(dp_size: int) -> int:
        stand_in._n_ranks, stand_in._n_updates = dp_size, updates
        return dp_size * updates

    stand_in = SimpleNamespace(
        actor_rollout_wg=SimpleNamespace(_dispatch_info={}, _query_dispatch_info=lambda role: list(range(ranks))),
        tokenizer=SimpleNamespace(eos_token_id=0),
        _get_required_batch_multiple=required_multiple,
    )
    stand_in.balance = lambda batch, metrics: cls._balance_batch(stand_in, batch, metrics)
    return stand_in


def rows(count: int) -> KVBatchMeta:
    lengths = np.random.default_rng(0).integers(20, 300, count).tolist()
    tags = [{"seq_len": length} for length in lengths]
    return KVBatchMeta(keys=[f"row {i}" for i in range(count)], tags=tags, partition_id="train")


@pytest.mark.parametrize(("ranks", "updates"), [(1, 1), (2, 3), (8, 4)])
def test_rows_are_balanced_as_in_verl(ranks, updates):
    ours, theirs = {}, {}
    dealt = trainer(PolicyTrainer, ranks, updates).balance(rows(480), ours)
    verls = trainer(PPOTrainer, ranks, updates).balance(rows(480), theirs)
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

    monkeypatch.setattr("creditflow.engines.verl.trainer.upsample_batch_to_divisible_size", padded)
    count = ranks * updates * 3 - n_padding
    dealt = trainer(PolicyTrainer, ranks, updates).balance(rows(count), {}).keys
    size = len(dealt) // (ranks * updates)
    for first in range(0, len(dealt), size):  # a rank's rows are cut into mini-batches from the front
        assert any(key.startswith("row") for key in dealt[first : first + size])


def test_dead_servers_end_the_run_with_advice():
    def died(version):
        raise ActorDiedError()

    run = SimpleNamespace(trainers=[SimpleNamespace(checkpoint_manager=SimpleNamespace(update_weights=died))])
    with pytest.raises(CreditflowError, match=r"do not come back: .*run the same command again"):
        CreditflowTrainer._sync_weights(run, 3)
