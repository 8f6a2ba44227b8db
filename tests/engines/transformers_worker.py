"""A worker that speaks the protocol of the vLLM worker and samples with transformers.

Options beside `model`: `dies_at` and `fails_at` name a call of `generate` (from 1), `hangs` never becomes ready.
"""

import importlib.util
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

SCRIPT = Path(__file__).parents[2] / "src/creditflow/engines/local/samplers/vllm_worker.py"


class TransformersEngine:
    def __init__(self, options: dict[str, Any]) -> None:
        if options.get("hangs"):
            threading.Event().wait()
        self.options, self.calls = options, 0
        self.model = AutoModelForCausalLM.from_pretrained(options["model"]).eval()

    @torch.inference_mode()
    def generate(self, requests: Sequence[dict[str, Any]], eos_ids: Sequence[int]) -> list[dict[str, Any]]:
        self.calls += 1
        if self.calls == self.options.get("dies_at"):
            print("about to die", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == self.options.get("fails_at"):
            raise ValueError("no such kernel")
        return [self._row(request, eos_ids) for request in requests]

    def _row(self, request: dict[str, Any], eos_ids: Sequence[int]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(request["seed"])
        ids, logprobs = list(request["prompt_ids"]), []
        for _ in range(request["max_tokens"]):
            logits = self.model(torch.tensor([ids])).logits[0, -1]
            scaled = torch.log_softmax(logits / (request["temperature"] or 1.0), -1)
            greedy = request["temperature"] == 0
            token = int(scaled.argmax() if greedy else torch.multinomial(scaled.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(scaled[token]))
            if token in eos_ids:
                break
        return {"ids": ids[len(request["prompt_ids"]) :], "logprobs": logprobs}

    def load(self, files: Sequence[str]) -> None:
        self.model.load_state_dict({name: tensor for file in files for name, tensor in load_file(file).items()})


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("vllm_worker", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    worker.main(TransformersEngine)
