"""A GRPO step of SmolLM2-135M beside TRL's: `python -m benchmarks.real_training [--quick] [--model FOLDER]`.

8 prompts x 8 samples x 64 tokens, one update, all weights and LoRA (rank 16, all linear layers), in float32 on one
thread. Each side runs in a separate process, in turns. Samples per processor second come from the steps after the
first; peak memory is `ru_maxrss` of the process. Both sides have micro-batches of 8 sequences; with `--defaults`, each
has its own default. `make benchmarks` installs TRL. About half an hour on two cores.

* Equal work: the end token is one that is never sampled, so every response has 64 tokens.
* A tiny model: 16 prompts x 8 samples of up to 64 tokens, responses that end by themselves, six steps of which the
  last four count.
* Equal loss: on one recorded batch, TRL's `GRPOTrainer` and this project's actor compute the loss and the gradient
  (`loss_type=grpo` without clipping in force; means over sequences of means over tokens).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.local_engine import tiny_folder
from benchmarks.record import Figure, exit_with, measured_apart, peer_missing, quick_parser, show, write
from benchmarks.single_turn import one_step_batch, questions, share_of_letters, smollm2_folder
from benchmarks.sources import hashes

TRL = Path(sys.prefix) / "trl"
"""TRL's folder, filled by `make benchmarks`: TRL conflicts with verl in one environment."""
MEASURES = ("src/creditflow/credit", "src/creditflow/engines/local", "src/creditflow/rollout/scheduler.py")
PACKAGES = ("creditflow", "torch", "transformers", "peft")
SAMPLES, TOKENS = 8, 64


@dataclass(frozen=True)
class Setup:
    """The training steps of one comparison."""

    prompts: int
    micro: int
    """Sequences of a micro-batch."""
    steps: int
    warm: int
    """First steps that do not count."""


REAL, TINY = Setup(8, 8, 2, 1), Setup(16, 128, 6, 2)
LONGEST = 88
"""At least the tokens of the longest prompt; fewer than those of the shortest prompt and one response."""
RANK, ALPHA, LR = 16, 32, 1e-6
UNSAMPLED = "<gh_stars>"
"""The end token of both sides: a special token of the vocabulary that the model gives no probability to."""
TURN_END = "'<|im_end|>'"
"""The end of a turn in the model's chat template."""


def main() -> int:
    """Measure, print, write `docs/results/real_training.json`; 1 if a number falls short."""
    parser = quick_parser(__doc__, "one turn without LoRA; writes nothing")
    parser.add_argument("--defaults", action="store_true", help="each side with its own micro-batches")
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct; default: converted once into the cache")
    parser.add_argument("--part", choices=(*SIDES, *PARTS), help="measure one side or part, in this process")
    options = parser.parse_args()
    model = Path(options.model) if options.model else smollm2_folder()
    if options.part:
        with contextlib.redirect_stdout(sys.stderr):
            part = PARTS.get(options.part)
            found = part(model) if part else _side(options.part, model, options.defaults)
        print(json.dumps(found))
        return 0
    if not (TRL / "trl").is_dir():
        peer_missing("TRL", "make benchmarks")
        return int(show([]))
    measured, repeats = hashes(MEASURES), 1 if options.quick else 3
    figures: list[Figure] = []
    kinds = ("",) if options.quick else ("", "_lora")
    for defaults in (False,) if options.quick else (False, True):
        for lora in kinds:
            figures += _beside(lora, 1 if defaults else repeats, model, defaults=defaults)
    figures += _tiny(repeats)
    loss = _measured("loss", model)
    figures += [
        Figure("loss on one batch, relative difference to TRL's", loss["loss"], 1e-5, at_most=True),
        Figure("gradient on one batch, relative difference to TRL's", loss["gradient"], 1e-3, at_most=True),
    ]
    missed = show(figures)
    if not options.quick:
        write("real_training", figures, PACKAGES, measured, {"trl": _version_of_trl()})
    return int(missed)


def _beside(lora: str, repeats: int, model: Path, *, defaults: bool) -> list[Figure]:
    turns = [
        (_measured(f"ours{lora}", model, defaults), _measured(f"trl{lora}", model, defaults)) for _ in range(repeats)
    ]
    of = ("LoRA" if lora else "all weights") + (", own defaults" if defaults else "")
    hold = None if defaults else 2.0 if lora else 2.5
    speed = [theirs["processor_s"] / ours["processor_s"] for ours, theirs in turns]
    memory = [ours["peak_gb"] / theirs["peak_gb"] for ours, theirs in turns]
    figures = [
        Figure.from_values(f"{of}: samples per processor second, ours / TRL's", speed, hold, unit="x"),
        Figure.from_values(
            f"{of}: peak memory, ours / TRL's", memory, None if defaults else 0.5, at_most=True, unit="x"
        ),
    ]
    for k, side in enumerate(("ours", "TRL's")):
        figures += [
            Figure.from_values(
                f"{of}: processor time of a step, {side}", [turn[k]["processor_s"] for turn in turns], unit="s"
            ),
            Figure.from_values(f"{of}: peak memory, {side}", [turn[k]["peak_gb"] for turn in turns], unit="GB"),
        ]
    return [*figures, Figure.from_values(f"{of}: sampling, ours", [turn[0]["rollout_s"] for turn in turns], unit="s")]


def _tiny(repeats: int) -> list[Figure]:
    folder = tiny_folder()
    turns = [(_measured("ours_tiny", folder), _measured("trl_tiny", folder)) for _ in range(repeats)]
    speed = [theirs["processor_s"] / ours["processor_s"] for ours, theirs in turns]
    tokens = [ours["tokens"] / theirs["tokens"] for ours, theirs in turns]
    return [
        Figure.from_values("tiny model: samples per processor second, ours / TRL's", speed, 3, unit="x"),
        Figure.from_values("tiny model: tokens a sample, ours / TRL's", tokens, unit="x"),
    ]


def _version_of_trl() -> str:
    from importlib.metadata import distributions

    return next(found.version for found in distributions(path=[str(TRL)]) if found.name == "trl")


def _measured(part: str, model: Path, defaults: bool = False) -> dict[str, Any]:
    """The JSON that one side prints in its own process."""
    own = os.pathsep.join(filter(None, [str(TRL), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": own} if part.startswith(("trl", "loss")) else {}
    more = ["--model", str(model), *(["--defaults"] if defaults else [])]
    return measured_apart("real_training", part, *more, environment=environment)


@contextlib.contextmanager
def _endless(model: Path) -> Iterator[Path]:
    """A copy of the model's folder, with linked weights, whose responses never end by themselves."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for file in model.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        tokenizer = AutoTokenizer.from_pretrained(model)
        end = tokenizer.convert_tokens_to_ids(UNSAMPLED)
        tokenizer.eos_token = UNSAMPLED
        # A template's end of an assistant turn ends responses here too. The prompts, which have none, stay the same.
        assert TURN_END in tokenizer.chat_template
        of_turn = f"({TURN_END} if message['role'] != 'assistant' else '{UNSAMPLED}')"
        tokenizer.chat_template = tokenizer.chat_template.replace(TURN_END, of_turn)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
            (folder / name).unlink(missing_ok=True)
        tokenizer.save_pretrained(folder)
        for name in ("config.json", "generation_config.json"):
            content = json.loads((model / name).read_text()) | {"eos_token_id": end}
            (folder / name).unlink()
            (folder / name).write_text(json.dumps(content))
        yield folder


def _side(part: str, model: Path, defaults: bool) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    side, _, kind = part.partition("_")
    measure, setup = (_ours if side == "ours" else _trl), TINY if kind == "tiny" else REAL
    with contextlib.ExitStack() as stack:
        folder = model if kind == "tiny" else stack.enter_context(_endless(model))
        out = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = measure(folder, out, setup, kind == "lora", defaults)
    if kind != "tiny":
        assert found["tokens"] == TOKENS, found
    return {**found, "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


def _ours(model: Path, out: Path, setup: Setup, lora: bool, defaults: bool) -> dict[str, float]:
    from creditflow._utils.progress import Reporter
    from creditflow.config import load_recipe
    from creditflow.engines.local.trainer import train
    from creditflow.runs.run_folder import read_metrics

    settings = [
        f"actor_rollout_ref.model.path={model}",
        "trainer.device=cpu",
        "trainer.num_threads=1",
        f"trainer.total_training_steps={setup.steps}",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={out / 'run'}",
        f"data.train_batch_size={setup.prompts}",
        f"recipe.tasks={setup.prompts}",
        f"data.max_response_length={TOKENS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={setup.prompts}",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"trainer.total_epochs={setup.steps}",
    ]
    if lora:
        settings += [f"actor_rollout_ref.model.lora_rank={RANK}", f"actor_rollout_ref.model.lora_alpha={ALPHA}"]
    if not defaults and setup is REAL:
        # A prompt is stored once for its samples: room for one prompt and `micro` responses, not for one more response.
        settings += [f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={setup.micro * TOKENS + LONGEST}"]
    run = train(load_recipe(Path(__file__).parent / "single_turn.yaml", settings), Reporter())
    rows = [row for row in read_metrics(run.path) if row["step"] > setup.warm]
    return {
        "processor_s": fmean(row["timing/processor_s"] for row in rows),
        "rollout_s": fmean(row["timing/rollout_s"] for row in rows),
        "tokens": fmean(row["rollout/response_tokens"] for row in rows) / (setup.prompts * SAMPLES),
    }


def _trainer(model: Path, out: Path, setup: Setup, *, lora: bool, defaults: bool, callbacks: list[Any]) -> Any:
    """TRL's trainer."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def letters(completions: list[Any], **_: Any) -> list[float]:
        return [share_of_letters(completion[0]["content"]) for completion in completions]

    own: dict[str, Any] = {} if defaults else {"gradient_checkpointing": False}
    micro = setup.prompts * SAMPLES if defaults else setup.micro
    config = trl.GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        max_steps=setup.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=setup.prompts * SAMPLES // micro,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        learning_rate=LR,
        beta=0.0,
        loss_type="grpo",
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
        **own,
    )
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=letters,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": text}]} for text in questions()[: setup.prompts]]
        ),
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        if lora
        else None,
        callbacks=callbacks,
    )


def _trl(model: Path, out: Path, setup: Setup, lora: bool, defaults: bool) -> dict[str, float]:
    from transformers import TrainerCallback

    ends: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time())

        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            if "completions/mean_length" in logs:
                lengths.append(logs["completions/mean_length"])

    _trainer(model, out, setup, lora=lora, defaults=defaults, callbacks=[Clock()]).train()
    seconds = (ends[-1] - ends[setup.warm - 1]) / (setup.steps - setup.warm)
    return {"processor_s": seconds, "tokens": fmean(lengths[setup.warm :])}


def _loss(model: Path) -> dict[str, float]:
    """Relative differences of loss and gradient between both sides, on 8 sequences whose policy has moved since."""
    import torch

    rng = np.random.default_rng(0)
    prompt = rng.integers(20, 2000, 40).tolist()
    responses = [rng.integers(20, 2000, length).tolist() for length in (64, 20, 5, 33, 48, 64, 1, 12)]
    old = [rng.normal(-11, 0.3, len(row)).tolist() for row in responses]
    advantages = rng.normal(size=len(responses))
    with tempfile.TemporaryDirectory() as out:
        trainer = _trainer(model, Path(out), REAL, lora=False, defaults=False, callbacks=[])
        net, width = trainer.model, max(map(len, responses))

        def padded(rows: list[list[Any]]) -> Any:
            return torch.tensor([row + [0] * (width - len(row)) for row in rows])

        trainer.current_gradient_accumulation_steps = 1
        net.eval()
        theirs = trainer._compute_loss(
            net,
            {
                "prompt_ids": torch.tensor([prompt] * len(responses)),
                "prompt_mask": torch.ones(len(responses), len(prompt), dtype=torch.long),
                "completion_ids": padded(responses),
                "completion_mask": padded([[1] * len(row) for row in responses]),
                "advantages": torch.tensor(advantages, dtype=torch.float32),
                "old_per_token_logps": padded(old),
                "num_items_in_batch": torch.tensor(sum(map(len, responses))),
            },
        )
        theirs.backward()
        their_gradient = torch.cat([weight.grad.flatten() for weight in net.parameters()])
        their_loss = float(theirs.detach())
        del trainer, net
    loss, gradient = _our_loss(model, prompt, responses, old, advantages)
    return {
        "loss": abs(loss - their_loss) / abs(their_loss),
        "gradient": float((gradient - their_gradient).norm() / their_gradient.norm()),
    }


def _our_loss(
    model: Path, prompt: list[int], responses: list[Any], old: list[Any], advantages: Any
) -> tuple[float, Any]:
    import torch

    from creditflow.config import ActorConfig
    from creditflow.engines.local.actor import Actor
    from creditflow.engines.local.policy import Policy

    batch = one_step_batch([(prompt, row, logprobs) for row, logprobs in zip(responses, old, strict=True)])
    # Neither dual clip nor gradient clipping.
    config = ActorConfig(loss_agg_mode="seq-mean-token-mean", clip_ratio_c=1e9, grad_clip=1e9)
    actor = Actor(Policy.load(model, torch.device("cpu")), config)
    n = batch.n_steps
    advantage_T = np.repeat(advantages, np.diff(batch.token_offsets))
    metrics = actor.update(batch, advantage_T, np.ones(n, dtype=bool), np.zeros(n, dtype=np.int64))
    gradient = torch.cat([weight.grad.flatten() for weight in actor.policy.model.parameters()])
    return metrics["actor/pg_loss"], gradient


SIDES = ("ours", "trl", "ours_lora", "trl_lora", "ours_tiny", "trl_tiny")
PARTS = {"loss": _loss}


if __name__ == "__main__":
    exit_with(main)
