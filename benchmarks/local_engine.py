"""The embedded engine against TRL and transformers: `python -m benchmarks.local_engine [--quick]`.

Each side runs in a separate process, without imports and loading, in turns; figures are medians of the ratios of each
turn. `make benchmarks` installs TRL. Takes about half an hour on two cores.

* Training: GRPO on a task of one call (`single_turn.py`), 16 questions x 8 responses of up to 64 tokens a step, one
  update a step, the same tiny model, reward and learning rate. TRL's `GRPOTrainer` with its defaults, without gradient
  checkpointing, reports or saved models. Samples and tokens count from the third step on.
* Generation: against `model.generate` on the requests of one training step of `arithmetic_chain`, each with its
  recorded response length, so that both sides generate the same numbers of tokens. Three cases: mixed batches of 128;
  the recorded batches (nearly all requests in a batch are of one agent, and so alike); and 128 rows of equal length.
* Update: against rows padded on the right, in the order of arrival, in micro-batches of as many tokens; rows are 64
  questions of GSM8K with their solutions, byte by byte.
* Memory: an update with trajectories of 8,000 tokens in 100 steps: 32 trajectories against 4, and against as many
  tokens in trajectories of one step. `benchmarks.memory` compares all weights with LoRA.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.record import Figure, exit_with, peer_missing, show, write
from benchmarks.single_turn import problems, questions, share_of_letters
from benchmarks.sources import hashes

ROOT = Path(__file__).parent.parent
TRL = Path(sys.prefix) / "trl"
"""TRL's folder, filled by `make benchmarks`: TRL conflicts with verl in one environment."""
MEASURES = ("src/creditflow/credit", "src/creditflow/engines/local", "src/creditflow/rollout/scheduler.py")
TASKS, TRAJECTORIES, TOKENS = 16, 8, 64
BUDGET = 16384
"""Tokens of one micro-batch."""
PACKAGES = ("creditflow", "torch", "transformers", "peft")


def main() -> int:
    """Measure, print, write `docs/results/local_engine.json`; 1 if a number falls short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats; holds the same, writes nothing")
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
    beside_trl = (TRL / "trl").is_dir()
    if not beside_trl and not options.quick:
        raise SystemExit("error: TRL is not installed: make benchmarks")
    measured = hashes(MEASURES)
    repeats = 1 if options.quick else 3
    figures: list[Figure] = []
    for threads in (1,) if options.quick or device == "cuda" else (1, 2):
        if beside_trl:
            figures += _training(repeats, threads, device)
        figures += _generation(repeats, threads, device)
        figures += _update(repeats, threads, device)
    figures += _sharing(device)
    figures += _long(device)
    missed = show(figures)
    if not beside_trl:
        peer_missing("TRL", "make benchmarks")
    if not options.quick:
        write("local_engine", figures, PACKAGES, measured, {"device": device, "trl": _version_of_trl()})
    return int(missed)


def _version_of_trl() -> str:
    from importlib.metadata import distributions

    return next(found.version for found in distributions(path=[str(TRL)]) if found.name == "trl")


def _measured(part: str, threads: int, device: str) -> dict[str, Any]:
    """The JSON that one side prints in a separate process."""
    print(f"{part}, {threads} thread{'s' * (threads > 1)}", flush=True)
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "benchmarks.local_engine", "--part", part, "--threads", str(threads)]
    command += ["--device", device]
    if part == "trl":
        quiet["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TRL), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, cwd=ROOT, env=os.environ | quiet, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {part}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- training ------------------------------------------------------------------------------------------------------


def _training(repeats: int, threads: int, device: str) -> list[Figure]:
    turns = [(_measured("ours", threads, device), _measured("trl", threads, device)) for _ in range(repeats)]
    of = f"{threads} thread{'s' * (threads > 1)}"

    def ratios(key: str) -> list[float]:
        return [ours[key] / theirs[key] for ours, theirs in turns]

    hold = 3 if threads == 1 or device == "cuda" else None
    tokens = [ours["tokens_a_sample"] / theirs["tokens_a_sample"] for ours, theirs in turns]
    return [
        Figure.from_values(f"training, {of}: samples/s, ours / TRL's GRPOTrainer", ratios("samples"), hold, unit="x"),
        Figure.from_values(f"training, {of}: tokens a sample, ours / TRL's", tokens, unit="x"),
        Figure.from_values(f"training, {of}: samples/s, ours", [ours["samples"] for ours, _ in turns]),
        Figure.from_values(f"training, {of}: samples/s, TRL's", [theirs["samples"] for _, theirs in turns]),
    ]


_STEPS, _WARM = 6, 2


def _rates(ends: list[float], tokens: list[float]) -> dict[str, float]:
    """Rates after the warm-up steps. `ends`: end time of each step; `tokens`: mean response length of each step."""
    seconds = ends[-1] - ends[_WARM - 1]
    samples = TASKS * TRAJECTORIES * (len(ends) - _WARM)
    return {"samples": samples / seconds, "tokens_a_sample": float(np.mean(tokens[_WARM:]))}


def _ours(device: str) -> dict[str, float]:
    from creditflow.config import load_recipe
    from creditflow.engines.local.trainer import train
    from creditflow.runs.run_folder import read_metrics

    class Clock:
        def __init__(self) -> None:
            self.ends: list[float] = []

        def say(self, text: str) -> None:
            print(text)

        @contextlib.contextmanager
        def bar(self, title: str, total: int) -> Iterator[Clock]:
            yield self

        def advance(self, amount: int = 1, status: str = "") -> None:
            if amount:
                self.ends.append(time.perf_counter())

        def note(self, status: str) -> None:
            pass

    settings = [
        f"actor_rollout_ref.model.path={_model()}",
        f"trainer.device={device}",
        "trainer.num_threads=0",
        f"trainer.total_training_steps={_STEPS}",
        f"data.train_batch_size={TASKS}",
        f"data.max_response_length={TOKENS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={TASKS}",
        f"actor_rollout_ref.rollout.n={TRAJECTORIES}",
    ]
    clock: Any = Clock()
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe(Path(__file__).parent / "single_turn.yaml", settings)
        recipe.config.trainer.default_local_dir = f"{folder}/run"
        run = train(recipe, clock)
        rows = read_metrics(run.path)
    tokens = [
        row["rollout/response_tokens"] / (TASKS * TRAJECTORIES) for row in rows if "rollout/response_tokens" in row
    ]
    return _rates(clock.ends, tokens)


def _trl(device: str) -> dict[str, float]:
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    ends: list[float] = []
    tokens: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            if "completions/mean_length" in logs:
                tokens.append(logs["completions/mean_length"])

    def letters(completions: list[Any], **_: Any) -> list[float]:
        return [share_of_letters(completion[0]["content"]) for completion in completions]

    folder = _model()
    with tempfile.TemporaryDirectory() as out:
        config = trl.GRPOConfig(
            output_dir=out,
            use_cpu=device == "cpu",
            bf16=device == "cuda",
            max_steps=_STEPS,
            per_device_train_batch_size=TASKS * TRAJECTORIES,
            num_generations=TRAJECTORIES,
            max_completion_length=TOKENS,
            learning_rate=1e-6,
            beta=0.0,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=0,
        )
        trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=letters,
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": [{"role": "user", "content": question}]} for question in questions()]
            ),
            callbacks=[Clock()],
        )
        trainer.train()
    return _rates(ends, tokens)


def _model() -> Path:
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


def _sharing(device: str) -> list[Figure]:
    turns = _measured("sharing", 1, device)
    return [
        Figure.from_values(f"update, {size}: prompts of their own / shared by 8", turns[size], unit="x")
        for size in _SHARING
    ]


_SHARING = {"0.4 M parameters": (128, 2, 64), "10 M parameters": (512, 4, 16)}
"""Width, layers and rows of the updates with and without shared prompts."""


def _batch(rows: list[tuple[list[int], list[int]]]) -> Any:
    """A batch with one step per trajectory."""
    from creditflow.data import Step, Task, Trajectory, TrajectoryBatch

    rng, task, n_trajectories = np.random.default_rng(1), Task("gsm8k", (), None), []
    for k, (prompt, response) in enumerate(rows):
        step = Step(
            f"{k}/0", str(k), 0, "solver", 0, (), "", "", prompt_ids=tuple(prompt), response_ids=tuple(response),
            response_mask=(1,) * len(response), logprobs=tuple(rng.normal(-5.0, 0.3, len(response)).tolist()),
        )  # fmt: skip
        n_trajectories.append(Trajectory(str(k), str(k // TRAJECTORIES), task, [step]))
    return TrajectoryBatch.from_trajectories(n_trajectories)


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


def _solutions(which: list[int], own: bool = False) -> Any:
    """Questions `which` with their solutions; a repeated question takes the solutions of the following questions.

    `own`: give each question a different number as its prefix, so that all prompts differ and keep their length.
    """
    encode, found = _encode(), problems()
    return _batch(
        [
            (
                encode(f"{k if own else 0:04d} {found[q]['question']}"),
                encode(found[(q + which[:k].count(q)) % len(found)]["answer"]),
            )
            for k, q in enumerate(which)
        ]
    )


def _encode() -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    encode: Callable[[str], list[int]] = AutoTokenizer.from_pretrained(_model()).encode
    return encode


def _updated(device: str) -> dict[str, float]:
    batch = _solutions(list(range(64)))
    packed, padded = _updates(_model(), device, batch)
    a, b = packed(), padded()
    taken = _by_turns({"packed": packed, "padded": padded}, 3, device)
    tokens = int(len(batch.response_ids) + len(batch.prompt_ids))
    return {name: median(seconds) for name, seconds in taken.items()} | {"apart": abs(a - b) / abs(b), "tokens": tokens}


def _shared(device: str) -> dict[str, list[float]]:
    found = {}
    for size, (hidden, layers, rows) in _SHARING.items():
        folder = _llama(f"benchmark-llama-{hidden}-{layers}-1", hidden=hidden, layers=layers)
        which = [k // TRAJECTORIES for k in range(rows)]
        runs = {own: _updates(folder, device, _solutions(which, own))[0] for own in (True, False)}
        taken = _by_turns({str(own): run for own, run in runs.items()}, 3, device)
        found[size] = [a / b for a, b in zip(taken["True"], taken["False"], strict=True)]
    return found


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
    from creditflow.credit import CreditOptions, assign
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
    assignment = assign(batch, CreditOptions(propagation="threshold"))
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
    "ours": _ours,
    "trl": _trl,
    "generation": _generated,
    "update": _updated,
    "sharing": _shared,
    "4 long trajectories": lambda device: _peak_of_long(device, 4, _STEPS_OF_LONG, _TOKENS_OF_STEP),
    "32 long trajectories": lambda device: _peak_of_long(device, 32, _STEPS_OF_LONG, _TOKENS_OF_STEP),
    "8000 at once": lambda device: _peak_of_long(device, 4, 1, _STEPS_OF_LONG * _TOKENS_OF_STEP),
}


if __name__ == "__main__":
    exit_with(main)
