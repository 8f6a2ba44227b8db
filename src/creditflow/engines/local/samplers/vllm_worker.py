"""The worker process of an external sampler: serves one engine over a connection to its parent.

Runs in another environment than its parent, so it imports nothing of creditflow. Messages are JSON, one per frame of
`multiprocessing.connection`. The first frame is `start`; each of the parent's frames has one reply.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

_LOOK_S = 1.0
"""Seconds between two checks for the parent."""


class Engine(Protocol):
    """A model that samples and takes new weights."""

    def generate(self, requests: Sequence[dict[str, Any]], eos_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return `{ids, logprobs}` for each request `{prompt_ids, max_tokens, temperature, seed}`, in order."""
        ...

    def load(self, files: Sequence[str]) -> None:
        """Replace all weights by those in safetensors files."""
        ...


class VllmEngine:
    """vLLM's offline engine, in this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled from: after the temperature
            disable_log_stats=True,
            **options,
        )

    def generate(self, requests: Sequence[dict[str, Any]], eos_ids: Sequence[int]) -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = [{} for _ in requests]
        # Greedy requests have no generator, and a batch in which some have none draws from a global one.
        for greedy in (False, True):
            rows = [i for i, request in enumerate(requests) if (request["temperature"] == 0) == greedy]
            if rows:
                for i, reply in zip(rows, self._generate([requests[i] for i in rows], eos_ids), strict=True):
                    replies[i] = reply
        return replies

    def _generate(self, requests: Sequence[dict[str, Any]], eos_ids: Sequence[int]) -> Iterator[dict[str, Any]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=request["temperature"],
                seed=request["seed"],
                max_tokens=request["max_tokens"],
                logprobs=0,  # of the sampled token alone
                stop_token_ids=list(eos_ids),
                ignore_eos=True,
                detokenize=False,
            )
            for request in requests
        ]
        prompts: Any = [{"prompt_token_ids": request["prompt_ids"]} for request in requests]
        for out in self.llm.generate(prompts, params, use_tqdm=False):
            ids = list(out.outputs[0].token_ids)
            logprobs = out.outputs[0].logprobs or []
            yield {"ids": ids, "logprobs": [entry[token].logprob for entry, token in zip(logprobs, ids, strict=True)]}

    def load(self, files: Sequence[str]) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": _weights(files)})
        self.llm.apply_model(_repack_heads)
        if not self.llm.reset_prefix_cache():  # keys and values of the old weights
            raise RuntimeError("vLLM's prefix cache cannot be reset: requests are still running")


def _weights(files: Sequence[str]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # safe_open is not a mapping
                yield name, opened.get_tensor(name)


def _repack_heads(model: Any) -> None:
    """Pack the weights of output heads again.

    `reload_weights` copies new values into a head that shares the embedding's weights, but keeps the copy that is
    packed for the CPU, from which logits are computed.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def serve(connection: Connection, engine_of: Any) -> None:
    """Serve the parent's requests until it closes the connection. `engine_of(options)` makes the engine."""
    engine: Any = None
    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except EOFError:
            return
        reply: dict[str, Any] = {}
        try:
            match message["kind"]:
                case "start":
                    engine = engine_of(message["options"])
                case "load":
                    engine.load(message["files"])
                case "generate":
                    reply["generations"] = engine.generate(message["requests"], message["eos_ids"])
        except Exception as error:  # sent to the parent, which raises
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        connection.send_bytes(json.dumps(reply).encode())


def exit_with_parent(parent: int, folder: str) -> None:
    """End this process as soon as its parent has ended or closed this process's standard input."""

    def watch() -> None:
        while os.getppid() == parent:
            readable, _, _ = select.select([sys.stdin], [], [], _LOOK_S)
            if readable and not os.read(sys.stdin.fileno(), 1):
                break
        _exit(folder)

    threading.Thread(target=watch, daemon=True).start()


def _exit(folder: str) -> None:
    """End this process at once: some of vLLM's libraries print pages about leaks when they are torn down."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def main(engine_of: Any) -> None:
    """Run the worker.

    Its arguments are the connection's file descriptor, the parent's process id, and the folder to remove at the end.
    """
    descriptor, parent, folder = sys.argv[1:]
    exit_with_parent(int(parent), folder)
    serve(Connection(int(descriptor)), engine_of)
    _exit(folder)


if __name__ == "__main__":
    main(VllmEngine)
