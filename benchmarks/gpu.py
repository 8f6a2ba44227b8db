"""The embedded engine on one device: `python -m benchmarks.gpu [FOLDER] [--device cpu] [--quick]`.

For a model's folder, by default SmolLM2-135M: agreement of the sampler's log-probs with the update's, tokens per second
of sampling and of the update, peak memory, and one training step with all weights and with LoRA. Every part runs even
if another one fails. Prints a table and a line of JSON, and writes `docs/results/gpu.json`; the exit code is 1 if a
part failed. About two minutes on a GPU. `--quick`: 2 prompts on the processor, nothing is written.
"""

from __future__ import annotations

import json
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.record import Figure, exit_with, quick_parser, show, write
from benchmarks.single_turn import questions, sampled_batch, smollm2_folder
from benchmarks.sources import hashes
from creditflow._utils.progress import Reporter
from creditflow.config import ActorConfig, load_recipe
from creditflow.engines.local.actor import Actor, token_logprobs
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.trainer import train
from creditflow.rollout import GenerationRequest
from creditflow.runs.run_folder import read_metrics

MEASURES = ("src/creditflow/credit", "src/creditflow/engines/local", "src/creditflow/rollout/scheduler.py")
TOKENS, SAMPLES = 64, 8


def main() -> int:
    """Run every part and print its figures."""
    parser = quick_parser(__doc__, "2 prompts on the processor: shows that it runs")
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--prompts", type=int, nargs="*", default=[8, 64])
    given = parser.parse_args()
    model = given.model or smollm2_folder()
    device, prompts = (torch.device("cpu"), [2]) if given.quick else (torch.device(given.device), given.prompts)
    measured = hashes(MEASURES)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    figures: list[Figure] = []
    failed: list[str] = []

    def part(title: str, measure: Callable[[], list[Figure]]) -> None:
        try:
            figures.extend(measure())
        except Exception:
            failed.append(title)
            traceback.print_exc()

    for n in prompts:
        part(f"{n} prompts", partial(_sample_and_update, model, device, n))
    for lora in (0, 16):
        part(f"training, LoRA rank {lora}", partial(_train, model, device, lora))
    print(f"{name}, torch {torch.__version__}")
    show(figures)
    print(json.dumps({"device": name, "failed": failed, "figures": {one.what: one.value for one in figures}}))
    if not given.quick:
        write("gpu", figures, ("creditflow", "torch", "transformers"), measured, {"device": name, "failed": failed})
    return int(bool(failed))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else float("nan")


def _sample_and_update(model: Path, device: torch.device, n: int) -> list[Figure]:
    """Sample 8 responses of each of `n` prompts, compare the log-probs, and update."""
    policy, of = Policy.load(model, device), f"{n} prompts x {SAMPLES} x {TOKENS}"
    texts = questions()
    prompts = [policy.encode(({"role": "user", "content": texts[k % len(texts)]},))[1] for k in range(n)]
    requests = [
        GenerationRequest(prompt, TOKENS, 1.0, (k, j)) for k, prompt in enumerate(prompts) for j in range(SAMPLES)
    ]
    policy.eos_ids = frozenset()
    seconds = []
    for _ in range(3):
        begin = _now(device)
        generations = policy.generate(requests)
        seconds.append(_now(device) - begin)
    tokens = sum(len(one.response_ids) for one in generations)
    batch = sampled_batch(requests, generations)
    differences = []
    with torch.no_grad():
        for packed in policy.forward.micro_batches(batch, np.arange(batch.n_steps), 16384):
            found = token_logprobs(policy.forward, packed, batch)[0].double().cpu().numpy()
            differences.append(np.abs(found - batch.logprobs[packed.token_at]))
    difference = np.concatenate(differences)
    actor = Actor(policy, ActorConfig())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    advantage_T = np.repeat(np.random.default_rng(0).normal(size=batch.n_steps), np.diff(batch.token_offsets))
    updates = []
    for _ in range(2):
        begin = _now(device)
        actor.update(batch, advantage_T, np.ones(batch.n_steps, dtype=bool), np.zeros(batch.n_steps, dtype=np.int64))
        updates.append(_now(device) - begin)
    return [
        Figure(f"{of}: sampling", tokens / min(seconds), unit="tokens/s"),
        Figure(f"{of}: update, response tokens", tokens / updates[-1], unit="tokens/s"),
        Figure(f"{of}: mean difference of log-probs, sampler and update", float(difference.mean())),
        Figure(f"{of}: largest difference of log-probs, sampler and update", float(difference.max())),
        Figure(f"{of}: peak memory of the update", _peak(device), unit="GB"),
    ]


def _train(model: Path, device: torch.device, lora: int) -> list[Figure]:
    """Two training steps of the task of one call."""
    with tempfile.TemporaryDirectory() as out:
        settings = [
            f"actor_rollout_ref.model.path={model}",
            f"actor_rollout_ref.model.lora_rank={lora}",
            f"trainer.device={device.type}",
            "trainer.total_training_steps=2",
            "trainer.val_before_train=false",
            f"trainer.default_local_dir={Path(out) / 'run'}",
            "data.train_batch_size=8",
            f"data.max_response_length={TOKENS}",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
        ]
        run = train(load_recipe(Path(__file__).parent / "single_turn.yaml", settings), Reporter())
        row: dict[str, Any] = read_metrics(run.path)[-1]
    of = f"training step of 8 x {SAMPLES} x {TOKENS}, " + ("LoRA" if lora else "all weights")
    memory = row.get("memory/cuda_peak_gib", row["memory/peak_gib"])
    return [
        Figure(f"{of}: seconds", row["timing/step_s"], unit="s"),
        Figure(f"{of}: sampling", row["timing/rollout_s"], unit="s"),
        Figure(f"{of}: update", row["timing/update_s"], unit="s"),
        Figure(f"{of}: peak memory", memory, unit="GiB"),
    ]


if __name__ == "__main__":
    exit_with(main)
