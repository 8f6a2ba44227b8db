"""Memory of an update, predicted and measured: `python -m benchmarks.memory [--quick]`.

Generated Llamas of three sizes, up to that of SmolLM2-135M, train all weights or a LoRA adapter of rank 8 with
micro-batches of two sizes. Each case runs in a separate process and takes two updates, because AdamW's state exists
from the first one on. Peaks are `ru_maxrss`; predictions are `creditflow check`'s, which hold
for any micro-batch up to the size. Takes about ten minutes.
"""

from __future__ import annotations

import json
import resource
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import Figure, exit_with, measured_apart, quick_parser, show, write
from benchmarks.single_turn import one_step_batch
from benchmarks.sources import hashes
from creditflow.data import TrajectoryBatch

ROOT = Path(__file__).parent.parent
MEASURES = ("src/creditflow/engines/local",)
PACKAGES = ("creditflow", "torch", "transformers", "peft")
SIZES = {
    "9 M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "vocab_size": 8192},
    "42 M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10, "vocab_size": 32768},
    "135 M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152},
}
HEADS = {256: (4, 2), 512: (8, 4), 576: (9, 3)}
RANK = 8
ROW = 64
"""Tokens of a prompt and of a response."""


def main() -> int:
    """Measure, print, write `docs/results/memory.json`; 1 if a number falls short."""
    parser = quick_parser(__doc__, "the smaller micro-batch only; writes nothing")
    parser.add_argument("--part", help="measure one case, in this process, and print it as JSON")
    options = parser.parse_args()
    if options.part:
        size, rank, tokens = options.part.split(",")
        print(json.dumps(_peak(size, int(rank), int(tokens))))
        return 0
    measured = hashes(MEASURES)
    figures: list[Figure] = []
    for size, tokens in product(SIZES, (512,) if options.quick else (512, 2048)):
        full, lora = (measured_apart("memory", f"{size},{rank},{tokens}") for rank in (0, RANK))
        of = f"{size} parameters, micro-batches of {tokens} tokens"
        saved, expected = (1 - lora[key] / full[key] for key in ("mb", "predicted"))
        figures += [
            Figure(f"{of}: peak, all weights", full["mb"], unit="MB"),
            Figure(f"{of}: prediction / peak, all weights", full["predicted"] / full["mb"], 0.85, unit="x"),
            Figure(f"{of}: prediction / peak, all weights, at most", full["predicted"] / full["mb"], 1.4, True, "x"),
            Figure(f"{of}: peak, LoRA", lora["mb"], unit="MB"),
            Figure(f"{of}: prediction / peak, LoRA", lora["predicted"] / lora["mb"], 0.85, unit="x"),
            Figure(f"{of}: prediction / peak, LoRA, at most", lora["predicted"] / lora["mb"], 1.4, True, "x"),
            Figure(f"{of}: share that LoRA saves", saved),
            Figure(f"{of}: its difference from the prediction", abs(saved - expected), 0.1, True),
        ]
    missed = show(figures)
    if not options.quick:
        write("memory", figures, PACKAGES, measured)
    return int(missed)


def _peak(size: str, rank: int, tokens: int) -> dict[str, float]:
    """Peak memory of two updates of four micro-batches each, predicted and measured."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from creditflow.config import ActorConfig, ActorModelConfig
    from creditflow.engines.local import memory, planning
    from creditflow.engines.local.actor import Actor
    from creditflow.engines.local.lora import Adapter
    from creditflow.engines.local.policy import Policy

    torch.set_num_threads(1)
    heads, key_heads = HEADS[SIZES[size]["hidden_size"]]
    config = LlamaConfig(
        **SIZES[size], num_attention_heads=heads, num_key_value_heads=key_heads, tie_word_embeddings=True
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=1)
    device = torch.device("cpu")
    memory.suit(model.num_parameters(), device)
    policy = Policy(model, _tokenizer(), device)
    if rank:
        policy = policy.with_adapter(Adapter.add(model, "policy_0", rank, ActorModelConfig(lora_rank=rank), 0))
    actor = Actor(policy, ActorConfig(ppo_max_token_len_per_gpu=tokens))
    trained = actor.learner.parameters
    fixed = planning.MemoryPlan(
        weights=planning.bytes_of(model.parameters()),
        trained=planning.bytes_of(trained),
        per_token=0,
        per_pass=planning.bytes_per_pass(trained),
    )
    plan = planning.with_activations(fixed, [policy.forward])
    batch = _batch(4 * tokens // (2 * ROW), int(SIZES[size]["vocab_size"]))
    every, first = np.ones(batch.n_steps, dtype=np.bool_), np.zeros(batch.n_steps, dtype=np.int64)
    for _ in range(2):
        actor.update(batch, np.ones(len(batch.response_ids)), every, first)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"mb": peak, "predicted": plan.peak(tokens) / 2**20, "per_token": plan.per_token}


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    from creditflow.engines.models.tiny import byte_tokenizer

    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()[0], eos_token="<|end|>", pad_token="<|end|>")


def _batch(n_steps: int, vocabulary: int) -> TrajectoryBatch:
    """A batch with one step per trajectory, all with different prompts."""
    rng = np.random.default_rng(0)
    tokens = [[rng.integers(4, vocabulary, ROW).tolist() for _ in range(2)] for _ in range(n_steps)]
    return one_step_batch([(prompt, response, (-10.0,) * ROW) for prompt, response in tokens])


if __name__ == "__main__":
    exit_with(main)
