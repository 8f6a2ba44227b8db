"""The embedded engine against transformers: `python -m benchmarks.local_engine [--quick]`.

Each side runs in a separate process, without imports and loading, in turns; figures are medians of the ratios of each
turn. Takes about twenty minutes on two cores. `benchmarks.real_training` compares training with TRL.

* Generation: against `model.generate` on the requests of one training step of `arithmetic_chain`, each with its
  recorded response length, so that both sides generate the same numbers of tokens. Three cases: mixed batches of 128;
  the recorded batches (nearly all requests in a batch are of one agent, and so alike); and 128 rows of equal length.
* Update: against rows padded on the right, in the order of arrival, in micro-batches of as many tokens; rows are 64
  questions of GSM8K with their solutions, byte by byte.
* Memory: an update with trajectories of 8,000 tokens in 100 steps: 32 trajectories against 4, and against as many
  tokens in trajectories of one step. `benchmarks.memory` compares all weights with LoRA.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.record import Figure, exit_with, measured_apart, quick_parser, show, write
from benchmarks.single_turn import one_step_batch, problems
from benchmarks.sources import hashes
from creditflow.config import credit_options
from creditflow.data import TrajectoryBatch

MEASURES = ("src/creditflow/credit", "src/creditflow/engines/local", "src/creditflow/rollout/scheduler.py")
TRAJECTORIES = 8
BUDGET = 16384
"""Tokens of one micro-batch."""
PACKAGES = ("creditflow", "torch", "transformers", "peft")


def main() -> int:
    """Measure, print, write `docs/results/local_engine.json`; 1 if a number falls short."""
    parser = quick_parser(__doc__, "fewer repeats; holds the same, writes nothing")
    parser.add_argument("--part", choices=PARTS, help="measure one side, in this process, and print it as JSON")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    options = parser.parse_args()
    import torch

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.part:
        torch.set_num_threads(options.threads)
        with contextlib.redirect_stdout(sys.stderr):
            found = PARTS[options.part](device)
        print(json.dumps(found))
        return 0
    measured = hashes(MEASURES)
    repeats = 1 if options.quick else 3
    figures: list[Figure] = []
    for threads in (1,) if options.quick or device == "cuda" else (1, 2):
        figures += _generation(repeats, threads, device)
        figures += _update(repeats, threads, device)
    figures += _long(device)
    missed = show(figures)
    if not options.quick:
        write("local_engine", figures, PACKAGES, measured, {"device": device})
    return int(missed)


def _measured(part: str, threads: int, device: str) -> dict[str, Any]:
    """The JSON that one side prints in a separate process."""
    return measured_apart("local_engine", part, "--threads", str(threads), "--device", device, threads=threads)


def tiny_folder() -> Path:
    """A Llama of 0.4 million parameters over bytes."""
    return _llama("benchmark-llama-1", hidden=128, layers=2)


def _llama(name: str, hidden: int, layers: int, positions: int = 4096) -> Path:
    from creditflow.engines.models.tiny import byte_tokenizer, made_once, save_tiny_llama

    def make(folder: Path) -> None:
        tokenizer, template = byte_tokenizer()
        save_tiny_llama(
            folder, tokenizer, hidden=hidden, layers=layers, positions=positions, seed=0, chat_template=template
        )

    return made_once(name, make)


# ---- generation ----------------------------------------------------------------------------------------------------


def _generation(repeats: int, threads: int, device: str) -> list[Figure]:
    turns = [_measured("generation", threads, device) for _ in range(repeats)]
    of = f"generation, {threads} thread{'s' * (threads > 1)}"
    held = threads == 1 or device == "cuda"

    def ratios(mix: str) -> list[float]:
        return [turn[mix]["generate"] / turn[mix]["ours"] for turn in turns]

    return [
        Figure.from_values(
            f"{of}: model.generate / ours, arithmetic_chain's mix", ratios("mix"), 2 if held else None, unit="x"
        ),
        Figure.from_values(f"{of}: tokens/s, ours", [turn["mix"]["tokens"] / turn["mix"]["ours"] for turn in turns]),
        Figure.from_values(f"{of}: the same, batches as they were taken", ratios("taken"), unit="x"),
        Figure.from_values(f"{of}: the same, 128 rows of equal length", ratios("equal"), 1 if held else None, unit="x"),
        Figure.from_values(
            f"{of}: prompts of their own / shared by 8",
            [t["own"]["ours"] / t["shared"]["ours"] for t in turns],
            unit="x",
        ),
    ]


def _generated(device: str) -> dict[str, Any]:
    from creditflow.config import load_recipe
    from creditflow.engines.local.policy_set import load_policies

    recipe = load_recipe("arithmetic_chain", [f"trainer.device={device}"])
    (policy,) = load_policies(recipe).values()
    rng = np.random.default_rng(0)
    words = len(policy.tokenizer)

    def rows(n: int, times: int, prompt: int, response: int) -> list[list[Any]]:
        prompts = [tuple(rng.integers(1, words, prompt).tolist()) for _ in range(n)]
        return [[_request(prompts[k // times], response, k) for k in range(n * times)]]

    found: dict[str, Any] = {}
    trajectories = _waves("arithmetic_chain", device)
    for name, waves in {
        "mix": _mixed(trajectories, rng),
        "taken": trajectories,
        "equal": rows(128, 1, 128, 64),
        "own": rows(128, 1, 192, 16),
        "shared": rows(16, 8, 192, 16),
    }.items():
        sides: dict[str, Callable[[list[Any]], None]] = {"ours": lambda wave: _by_us(policy, wave)}
        if name not in ("own", "shared"):
            sides["generate"] = lambda wave: _by_transformers(policy, wave)
        taken = _by_turns({side: partial(_all, make, waves) for side, make in sides.items()}, 3, device)
        found[name] = {side: median(seconds) for side, seconds in taken.items()}
        found[name]["tokens"] = sum(request.max_tokens for wave in waves for request in wave)
    return found


def _all(make: Callable[[list[Any]], None], waves: list[list[Any]]) -> None:
    for wave in waves:
        make(wave)


def _mixed(waves: list[list[Any]], rng: np.random.Generator) -> list[list[Any]]:
    """The same requests, shuffled into batches of 128 regardless of their agent."""
    requests = [request for wave in waves for request in wave]
    order = rng.permutation(len(requests))
    return [[requests[k] for k in order[begin : begin + 128]] for begin in range(0, len(order), 128)]


def _request(prompt: tuple[int, ...], tokens: int, seed: int) -> Any:
    from creditflow.rollout import GenerationRequest

    return GenerationRequest(prompt, tokens, 1.0, (seed,))


def _waves(name: str, device: str) -> list[list[Any]]:
    """The generation requests of one training step of a recipe, each with its recorded response length."""
    from creditflow.config import load_recipe
    from creditflow.engines.common.components import build_components
    from creditflow.engines.local.policy_set import PolicySet
    from creditflow.engines.local.rollouts import sample_trajectories

    recipe = load_recipe(name, [f"trainer.device={device}"])
    components, policy_set = build_components(recipe), PolicySet.for_rollouts(recipe)
    waves: list[list[Any]] = []

    class Recorder:
        def __init__(self, policy: Any) -> None:
            self._policy = policy

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self._policy, attribute)

        def generate(self, requests: list[Any]) -> Any:
            made = self._policy.generate(requests)
            waves.append(
                [
                    _request(request.prompt_ids, len(one.response_ids), k)
                    for k, (request, one) in enumerate(zip(requests, made, strict=True))
                ]
            )
            return made

    recorded = PolicySet({policy: Recorder(own) for policy, own in policy_set.policies.items()}, {}, {})  # type: ignore[misc]
    size = recipe.config.data.train_batch_size
    asyncio.run(
        sample_trajectories(
            components, recorded, components.train_tasks[:size], recipe.config.actor_rollout_ref.rollout.n, 1.0, (0,)
        )
    )
    return waves


def _by_us(policy: Any, wave: list[Any]) -> None:
    from creditflow.engines.local import sampler

    with policy.forward.running():
        made = sampler.generate(policy.model, wave, frozenset(), policy.pad_id, shared=policy.shares)
    assert [len(one.response_ids) for one in made] == [request.max_tokens for request in wave]


def _by_transformers(policy: Any, wave: list[Any]) -> None:
    import torch
    from transformers import StoppingCriteria

    width = max(len(request.prompt_ids) for request in wave)
    limit = torch.tensor([request.max_tokens for request in wave], device=policy.device)

    class AsLongAsItWas(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: Any, *_: Any, **__: Any) -> Any:
            return input_ids.shape[1] - width >= limit

    ids = torch.tensor([[policy.pad_id] * (width - len(r.prompt_ids)) + list(r.prompt_ids) for r in wave])
    mask = torch.tensor([[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in wave])
    policy.model.generation_config.eos_token_id = None  # every row keeps its recorded length
    with policy.forward.running(), torch.inference_mode():
        out = policy.model.generate(
            ids.to(policy.device),
            attention_mask=mask.to(policy.device),
            do_sample=True,
            top_k=0,
            max_new_tokens=int(limit.max()),
            pad_token_id=policy.pad_id,
            stopping_criteria=[AsLongAsItWas()],
        )
    assert out.shape[1] - width == int(limit.max())


# ---- update --------------------------------------------------------------------------------------------------------


def _update(repeats: int, threads: int, device: str) -> list[Figure]:
    turns = [_measured("update", threads, device) for _ in range(repeats)]
    of = f"update, {threads} thread{'s' * (threads > 1)}"
    held = threads == 1 or device == "cuda"
    tolerance = 1e-5 if device == "cpu" else 1e-2  # bf16 on CUDA
    return [
        Figure.from_values(
            f"{of}: padded / packed", [t["padded"] / t["packed"] for t in turns], 1.5 if held else None, unit="x"
        ),
        Figure.from_values(
            f"{of}: losses apart", [t["apart"] for t in turns], tolerance if held else None, at_most=True, unit="rel."
        ),
        Figure.from_values(f"{of}: tokens/s, packed", [t["tokens"] / t["packed"] for t in turns]),
    ]


def _batch(rows: Sequence[tuple[list[int], list[int]]]) -> TrajectoryBatch:
    """A batch with one step per trajectory."""
    rng = np.random.default_rng(1)
    return one_step_batch(
        [(prompt, response, rng.normal(-5.0, 0.3, len(response)).tolist()) for prompt, response in rows], TRAJECTORIES
    )


def _updates(folder: Path, device: str, batch: Any) -> tuple[Callable[[], float], Callable[[], float]]:
    """The same update, packed by creditflow and padded; each returns its loss."""
    import torch

    from creditflow.config import ActorConfig, OptimConfig
    from creditflow.engines.local.actor import Actor
    from creditflow.engines.local.policy import Policy

    config = ActorConfig(ppo_max_token_len_per_gpu=BUDGET, optim=OptimConfig(lr=1e-6))
    advantage_T = np.random.default_rng(2).normal(size=batch.n_steps).repeat(np.diff(batch.token_offsets))
    actor, padded = Actor(Policy.load(folder, torch.device(device)), config), Padded(folder, device)
    every, first = np.ones(batch.n_steps, dtype=np.bool_), np.zeros(batch.n_steps, dtype=np.int64)
    return (
        lambda: actor.update(batch, advantage_T, every, first)["actor/pg_loss"],
        lambda: padded.update(batch, advantage_T),
    )


def _updated(device: str) -> dict[str, float]:
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tiny_folder()).encode
    batch = _batch([(encode(one["question"]), encode(one["answer"])) for one in problems()])
    packed, padded = _updates(tiny_folder(), device, batch)
    a, b = packed(), padded()
    taken = _by_turns({"packed": packed, "padded": padded}, 3, device)
    tokens = int(len(batch.response_ids) + len(batch.prompt_ids))
    return {name: median(seconds) for name, seconds in taken.items()} | {"apart": abs(a - b) / abs(b), "tokens": tokens}


def _by_turns(runs: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of each run in each turn, after one uncounted turn."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-1, repeats):
        for name, run in runs.items():
            seconds = _seconds(run, device)
            if turn >= 0:
                taken[name].append(seconds)
    return taken


class Padded:
    """The same update on padded rows: the usual way, written out."""

    def __init__(self, folder: Path, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.device = device

    def update(self, batch: Any, advantage_T: Any) -> float:
        """Update with the clipped loss, averaged over all tokens of the batch, and return the loss."""
        import torch

        rows = [
            (
                batch.prompt_ids[batch.prompt_offsets[s] : batch.prompt_offsets[s + 1]],
                slice(batch.token_offsets[s], batch.token_offsets[s + 1]),
            )
            for s in range(batch.n_steps)
        ]
        longest = max(len(prompt) + tokens.stop - tokens.start for prompt, tokens in rows)
        at_once, total = max(1, BUDGET // longest), 0.0
        self.optimizer.zero_grad()
        for begin in range(0, len(rows), at_once):
            some = rows[begin : begin + at_once]
            width = max(len(prompt) + tokens.stop - tokens.start for prompt, tokens in some)
            ids = np.zeros((len(some), width), dtype=np.int64)
            mask, trained = np.zeros_like(ids), np.zeros(ids.shape, dtype=np.float32)
            old, advantage = np.zeros_like(trained), np.zeros_like(trained)
            for row, (prompt, tokens) in enumerate(some):
                response = batch.response_ids[tokens]
                inside = slice(len(prompt), len(prompt) + len(response))
                ids[row, : inside.stop] = np.concatenate([prompt, response])
                mask[row, : inside.stop] = 1
                trained[row, inside] = 1
                old[row, inside], advantage[row, inside] = batch.logprobs[tokens], advantage_T[tokens]
            ids_, mask_, trained_, old_, advantage_ = (
                torch.from_numpy(array).to(self.device) for array in (ids, mask, trained, old, advantage)
            )
            half = torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda")
            with half:
                logits = self.model(input_ids=ids_, attention_mask=mask_, use_cache=False).logits
            logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(2, ids_[:, 1:, None]).squeeze(2)
            ratio = torch.exp(logprobs - old_[:, 1:])
            gain = torch.minimum(ratio * advantage_[:, 1:], ratio.clamp(0.8, 1.2) * advantage_[:, 1:])
            gain = torch.where(advantage_[:, 1:] < 0, torch.maximum(gain, 3.0 * advantage_[:, 1:]), gain)
            loss = -(gain * trained_[:, 1:]).sum() / len(batch.response_ids)
            torch.autograd.backward(loss)
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total


# ---- memory --------------------------------------------------------------------------------------------------------


_STEPS_OF_LONG, _TOKENS_OF_STEP = 100, 80


def _long(device: str) -> list[Figure]:
    few, many, one = (
        _measured(part, 1, device)["mb"] for part in ("4 long trajectories", "32 long trajectories", "8000 at once")
    )
    of = f"memory, trajectories of {_STEPS_OF_LONG} steps and {_STEPS_OF_LONG * _TOKENS_OF_STEP} tokens"
    return [
        Figure(f"{of}: what credit and update add, 32 trajectories / 4", many / few, 1.25, True, "x"),
        Figure(
            f"{of}: the same, 32 trajectories / 4 trajectories of one step of as many tokens",
            many / one,
            1.5,
            True,
            "x",
        ),
        Figure(f"{of}: 32 trajectories", many, unit="MB"),
    ]


def _peak_of_long(device: str, n_trajectories: int, steps: int, tokens: int) -> dict[str, float]:
    """Peak memory of an update and its credit, for `n_trajectories` of `steps` steps of `tokens` tokens."""
    import torch

    from creditflow.config import ActorConfig
    from creditflow.credit import assign
    from creditflow.data import Score, Step, Task, Trajectory, TrajectoryBatch
    from creditflow.engines.local.actor import Actor
    from creditflow.engines.local.policy import Policy

    folder = _llama("benchmark-llama-long-1", hidden=128, layers=2, positions=8192)
    actor = Actor(Policy.load(folder, torch.device(device)), ActorConfig(ppo_max_token_len_per_gpu=BUDGET))
    rng, trajectories = np.random.default_rng(0), []
    for n in range(n_trajectories):
        made = []
        for k in range(steps):
            ids = tuple(rng.integers(4, 256, tokens).tolist())
            asked, said = ids[: tokens // 2], ids[tokens // 2 :]
            made.append(Step(
                f"{n}/{k}", str(n), k, "a", k, (k - 1,) if k else (), "", "", prompt_ids=asked, response_ids=said,
                response_mask=(1,) * len(said), logprobs=(-5.5,) * len(said),
                scores={"right": Score(float(rng.random()))},
            ))  # fmt: skip
        trajectories.append(Trajectory(str(n), str(n // 4), Task("", (), None), made, outcome=Score(float(n % 2))))
    batch = TrajectoryBatch.from_trajectories(trajectories)
    before = _megabytes(device)
    assignment = assign(batch, credit_options(propagation="threshold"))
    every, first = np.ones(batch.n_steps, dtype=np.bool_), np.zeros(batch.n_steps, dtype=np.int64)
    actor.update(batch, assignment.token_advantages(), every, first)
    return {"mb": _megabytes(device) - before}


def _megabytes(device: str) -> float:
    """The peak memory of this process."""
    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _seconds(run: Callable[[], object], device: str) -> float:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "generation": _generated,
    "update": _updated,
    "4 long trajectories": lambda device: _peak_of_long(device, 4, _STEPS_OF_LONG, _TOKENS_OF_STEP),
    "32 long trajectories": lambda device: _peak_of_long(device, 32, _STEPS_OF_LONG, _TOKENS_OF_STEP),
    "8000 at once": lambda device: _peak_of_long(device, 4, 1, _STEPS_OF_LONG * _TOKENS_OF_STEP),
}


if __name__ == "__main__":
    exit_with(main)
