import json
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from creditflow.engines.models.tiny import tiny_byte_model
from tests.rewards.processes import HANG_S, until

verl_cpu = pytest.importorskip("verl_cpu", reason="it is not installed: uv pip install -e tests/verl_cpu --no-deps")

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(map(solution_str.count, "aeiou")) / max(1, len(solution_str))
"""


def train(folder: Path, *overrides: str, n_ranks: int = 1) -> list[dict[str, float]]:
    """Run unmodified verl on 16 prompts with a model of 0.1 M parameters; returns the metrics of each step."""
    from hydra import compose, initialize_config_module
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl_cpu.cluster import clear

    clear()

    prompts = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"write {letter}"}],
            "reward_model": {"style": "rule", "ground_truth": letter},
            "extra_info": {"index": i},
        }
        for i, letter in enumerate("abcdefghijklmnop")
    ]
    pq.write_table(pa.Table.from_pylist(prompts), folder / "prompts.parquet")
    (folder / "reward.py").write_text(REWARD)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    given = [
        f"actor_rollout_ref.model.path={tiny_byte_model()}",
        f"data.train_files={folder}/prompts.parquet",
        f"data.val_files={folder}/prompts.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "algorithm.adv_estimator=grpo",
        f"{rollout}.n=2",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=4",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=4",
        f"{actor}.optim.lr=1e-3",
        "trainer.total_training_steps=3",
        "trainer.val_before_train=false",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/checkpoints",
        "trainer.logger=[file]",
        f"trainer.project_name={folder}",  # the file logger writes to a folder of this name
        "trainer.experiment_name=metrics",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*verl_cpu.options(n_ranks), *given, *overrides])
    validate_config(config, need_reference_policy(config), need_critic(config))
    run_ppo(config, TaskRunnerV1)
    return [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_training_on_a_cpu_syncs_the_weights(verl_ray, tmp_path):
    steps = train(tmp_path)
    assert [step["training/global_step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert step["training/off_policy/trajectory_staleness/max"] == 0
        assert step["actor/grad_norm"] > 0
        assert 1 <= step["response_length/mean"] <= 16


@pytest.mark.slow
def test_disabled_weight_sync_lets_probabilities_diverge(verl_ray, tmp_path):
    steps = train(tmp_path, "++actor_rollout_ref.rollout.custom.weight_sync=false")
    first, *later = [step["training/rollout_probs_diff_max"] for step in steps]
    assert first < 1e-5  # the folder's weights are the trainer's initial ones
    assert min(later) > 1e-3


@pytest.mark.slow
def test_two_ranks_train_with_critic_and_reference(verl_ray, tmp_path):
    steps = train(
        tmp_path,
        "algorithm.adv_estimator=gae",
        f"critic.model.path={tiny_byte_model()}",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "trainer.val_before_train=true",
        n_ranks=2,
    )
    validation, *steps = steps
    assert any(key.startswith("val-core/letters/") for key in validation)
    for step in steps:
        assert step["training/rollout_probs_diff_max"] < 1e-5
        assert step["actor/grad_norm"] > 0
        assert step["critic/grad_norm"] > 0
    assert steps[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["actor/kl_loss"] > 1e-6


def a_server(**options):
    from verl_cpu.server import ServerOptions

    defaults = {
        "folder": str(tiny_byte_model()),
        "dtype": "float32",
        "prompt_length": 64,
        "response_length": 8,
        "max_model_len": None,
        "max_num_seqs": 64,
        "seed": (1,),
    }
    return ServerOptions(**{**defaults, **options})


async def ask(server, prompt_ids=(5, 6, 7), **sampling):
    return (await server.generate("r", prompt_ids, {"logprobs": True, **sampling})).fields


def test_server_batches_concurrent_requests():
    import asyncio

    from verl_cpu.server import Server

    server = Server(a_server())
    sizes = []
    generate = server._generate
    server._generate = lambda batch: sizes.append(len(batch)) or generate(batch)

    async def together():
        return await asyncio.gather(
            ask(server, max_tokens=3),
            ask(server, max_new_tokens=5),
            ask(server),
            ask(server, temperature=0),
            ask(server, temperature=0),
            ask(server, top_k=1),
        )

    three, five, default, greedy, again, top = asyncio.run(together())
    assert sizes == [5, 1]  # requests with top-k or top-p are sampled separately
    assert [len(fields["token_ids"]) for fields in (three, five, default)] == [3, 5, 8]
    assert greedy == again
    assert top["token_ids"] == greedy["token_ids"]
    assert top["log_probs"] == [0.0] * 8
    assert three["extra_fields"] == {"global_steps": 0}
    assert three["stop_reason"] == "completed"


def test_server_rejects_unsupported_requests():
    import asyncio

    from verl_cpu.server import Server

    server = Server(a_server(max_model_len=4))
    assert len(asyncio.run(ask(server))["token_ids"]) == 1  # the remaining positions
    for prompt, sampling, message in [
        ((5, 6, 7, 8), {}, "a prompt of 4 tokens leaves no room in 4 positions"),
        ((5,), {"best_of": 2}, "does not know: best_of"),
        ((5,), {"repetition_penalty": 1.2}, "knows no repetition_penalty"),
    ]:
        with pytest.raises(ValueError, match=message):
            asyncio.run(ask(server, prompt, **sampling))


def test_abort_answers_requests_and_pauses_later_ones():
    import asyncio

    from verl_cpu.server import Server

    async def abort():
        server = Server(a_server())
        first = asyncio.create_task(ask(server))
        await asyncio.sleep(0)
        aborted = await server.abort_all_requests()
        second = asyncio.create_task(ask(server))
        await asyncio.sleep(0.05)
        waits = not second.done()
        await server.resume_generation()
        return aborted, await first, waits, await second

    aborted, first, waits, second = asyncio.run(abort())
    assert aborted == {"aborted_count": 1, "request_ids": ["r"]}
    assert first["stop_reason"] == "aborted"
    assert first["token_ids"] == []
    assert waits
    assert len(second["token_ids"]) == 8


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 3), (0.6, -1), (0.6, 3), (0.01, -1)])
def test_top_k_and_top_p_keep_the_most_likely_tokens(top_p, top_k):
    from verl_cpu.server import keep_top

    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 9)).astype(np.float32))
    kept = keep_top(logits.clone(), 0.7, top_p, top_k)
    for row, kept_row in zip(logits.tolist(), kept.tolist(), strict=True):
        order = sorted(range(9), key=lambda token: -row[token])[: top_k if top_k > 0 else 9]
        weights = np.exp([row[token] / 0.7 for token in order])
        total, expected = 0.0, set()
        for token, weight in zip(order, weights / weights.sum(), strict=True):
            if total < top_p:
                expected.add(token)
            total += weight
        assert {token for token in range(9) if kept_row[token] > -np.inf} == expected
        assert all(kept_row[token] == row[token] for token in expected)


@pytest.mark.slow
def test_killed_server_restarts_with_its_folders_weights(verl_ray):
    import ray
    from verl_cpu.server import Server

    server = ray.remote(Server).options(num_cpus=0, max_restarts=-1, max_task_retries=0).remote(a_server())

    def greedy():
        return ray.get(server.generate.remote("r", [5, 6, 7], {"temperature": 0, "logprobs": True}))

    before = greedy()
    assert type(before).__name__ == "TokenOutput"
    weights = {"lm_head.weight": torch.randn(260, 64, generator=torch.Generator().manual_seed(0))}
    ray.get([server.update_weights.remote(weights), server.set_global_steps.remote(7)])
    synced = greedy()
    assert synced.extra_fields["global_steps"] == 7
    assert synced.token_ids != before.token_ids

    long = server.generate.remote("r", [5], {"max_tokens": 4000, "temperature": 0})
    pid = ray.get(server.pid.remote())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(long)

    def is_back():
        try:
            return ray.get(server.pid.remote()) != pid
        except ray.exceptions.RayActorError:
            return False

    until(is_back)
    assert greedy() == before
    ray.kill(server)


def test_preimported_modules_are_installed():
    import importlib

    from verl_cpu.forks import MODULES

    for module in MODULES:
        importlib.import_module(module)


def test_worker_starts_without_its_fork_server(tmp_path):
    import socket
    import subprocess
    import sys

    import verl_cpu.forks

    launcher = Path(verl_cpu.forks.__file__).with_name("fork_worker.py")
    worker = tmp_path / "worker.py"
    worker.write_text("print('it works')")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "forks"))
        listening.listen()
        launched = subprocess.Popen(
            [sys.executable, "-I", "-S", launcher, tmp_path / "forks", worker], stdout=subprocess.PIPE, text=True
        )
        connection, _ = listening.accept()
        connection.close()
    assert launched.communicate(timeout=HANG_S) == ("it works\n", None)


def test_platform_is_never_selected_automatically():
    from verl_cpu.platform import PlatformCPU

    assert not PlatformCPU().is_platform_available()


def test_import_hook_runs_now_or_on_import(tmp_path, monkeypatch):
    import importlib

    from verl_cpu.imports import after_import

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hooked_module.py").write_text("value = 1")
    seen = []
    for _ in range(2):
        after_import("hooked_module", lambda module: seen.append(module.value))
    assert seen == []
    importlib.import_module("hooked_module")
    assert seen == [1, 1]
    after_import("hooked_module", lambda module: seen.append(module.__name__))
    assert seen == [1, 1, "hooked_module"]
