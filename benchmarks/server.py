"""The server under load: `python -m benchmarks.server [--quick]`.

256 concurrent clients, each with its own rollout, from another process that speaks raw HTTP and does little else. First
with a model that answers at once, which leaves the server and the recording of steps; then with the tiny model over
bytes, with real sampling. Every response is compared with the recorded step, and every prompt carries the mark of its
rollout. In the first run, further clients disconnect, send garbage or too much, or have a wrong key.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from benchmarks.record import Figure, exit_with, quick_parser, show, write
from benchmarks.sources import hashes
from creditflow._utils.huggingface import load_tokenizer
from creditflow.data import Task, Trajectory
from creditflow.engines.local.policy import Policy, pick_device
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.rollout import AgentSpec, Generation, GenerationRequest, ModelClient, Scheduler
from creditflow.rollout.chat import ChatTokenizer
from creditflow.rollout.http.server import OpenAIServer
from creditflow.rollout.recorder import Recorder, Sampling

MEASURES = ("src/creditflow/rollout", "src/creditflow/rollout/chat.py")
CLIENTS = 256
SAID = 16
"""Maximum tokens of a response."""
TROUBLE = {"go away": 8, "send garbage": 8, "send too much": 4, "have a wrong key": 8}
"""Clients beside the 256 that misbehave repeatedly while the others are served."""


def main() -> int:
    """Measure, print, write `docs/results/server.json`; 1 if a number falls short."""
    parser = quick_parser(__doc__, "once, and fewer calls; writes nothing")
    parser.add_argument("--clients", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.clients:
        asyncio.run(clients(json.load(sys.stdin)))
        return 0
    measured = hashes(MEASURES)
    repeats, calls = (1, 4) if given.quick else (5, 16)
    figures: list[Figure] = []
    for name, make, hold, trouble in (
        ("a model that answers at once", Echo, 300.0, True),
        ("the tiny model", lambda: Timed(Policy.load(tiny_byte_model(), pick_device("cpu"))), 150.0, False),
    ):
        asyncio.run(loaded(make(), 1, trouble=False))  # imports and compilation at the first call
        runs = [asyncio.run(loaded(make(), calls, trouble)) for _ in range(repeats)]
        figures += [
            Figure.from_values(
                f"{name}: requests/s of {CLIENTS} clients", [run["requests_per_s"] for run in runs], hold
            ),
            Figure.from_values(
                f"{name}: outside of the model, a request", [run["outside_ms"] for run in runs], unit="ms"
            ),
            Figure.from_values(f"{name}: latency, median", [run["latency_ms"] for run in runs], unit="ms"),
            Figure(f"{name}: responses lost", max(run["lost"] for run in runs), 0, at_most=True),
            Figure(f"{name}: responses of another trajectory", max(run["crossed"] for run in runs), 0, at_most=True),
        ]
        if trouble:
            told = sum((Counter(run["trouble"]) for run in runs), Counter())
            figures += [Figure(f"{name}: beside it, clients who {kind}: times", told[kind]) for kind in TROUBLE]
    failed = show(figures)
    if not given.quick:
        write("server", figures, ("creditflow", "uvicorn", "starlette", "torch"), measured)
    return int(failed)


class Echo:
    """A model that repeats the end of the prompt, which is the rollout's mark."""

    version, max_positions = 0, 4096

    def __init__(self) -> None:
        self.chat = ChatTokenizer(load_tokenizer(tiny_byte_model(), "model"))
        self.encode, self.follow, self.decode = self.chat.encode, self.chat.follow, self.chat.decode
        self.seconds = 0.0

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Answer at once."""
        start = time.perf_counter()
        said = [request.prompt_ids[-2 - SAID : -2] for request in requests]
        made = [Generation(ids, (-1.0,) * len(ids), "stop") for ids in said]
        self.seconds += time.perf_counter() - start
        return made


class Timed:
    """A policy that measures its seconds of generation."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.seconds = policy, 0.0
        self.encode, self.follow, self.decode = policy.encode, policy.follow, policy.decode
        self.version, self.max_positions = policy.version, policy.max_positions

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate with the policy."""
        start = time.perf_counter()
        made = self.policy.generate(requests)
        self.seconds += time.perf_counter() - start
        return made


def mark(client: int, call: int) -> str:
    """A text that is unique to the call and as long as a response."""
    return f"mark {client:05d}/{call:05d}"[:SAID].ljust(SAID, ".")


async def loaded(model: Any, calls: int, trouble: bool) -> dict[str, Any]:
    """Run all clients with `calls` calls each."""
    client: ModelClient = model
    scheduler = Scheduler({"default": client})
    server = OpenAIServer().start()
    loop = asyncio.get_running_loop()
    sessions = []
    for k in range(CLIENTS + 1):  # the last is for misbehaving clients
        trajectory = Trajectory(id=f"trajectory{k}", uid=f"trajectory{k}", task=Task("load", (), None))
        recorder = Recorder({"agent": AgentSpec()}, trajectory, scheduler, Sampling(max_tokens=SAID), (0, k))
        sessions.append(server.open(recorder, loop, expected=False))
    asked = {
        "sessions": [(session.base_url, session.api_key) for session in sessions],
        "calls": calls,
        "trouble": TROUBLE if trouble else {},
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.server",
        "--clients",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate(json.dumps(asked).encode())
    if process.returncode:
        raise RuntimeError(f"the clients ended with {process.returncode}")
    for session in sessions:
        session.close()
    await asyncio.to_thread(server.stop)
    found = json.loads(out)
    lost = crossed = 0
    for k, said in enumerate(found["said"]):
        steps = {step.id: step for step in sessions[k].recorder.trajectory.steps}
        lost += calls - len(said) + abs(len(steps) - calls)
        for call, (id, text) in enumerate(said):
            step = steps.get(id)
            crossed += step is None or step.response != text or mark(k, call) not in step.prompt
            crossed += isinstance(model, Echo) and text != mark(k, call)
    total = CLIENTS * calls
    return {
        "requests_per_s": total / found["seconds"],
        "outside_ms": 1000 * (found["seconds"] - model.seconds) / total,
        "latency_ms": 1000 * found["latency"],
        "lost": lost,
        "crossed": crossed,
        "trouble": found["trouble"],
    }


# The clients, in a separate process


async def clients(asked: dict[str, Any]) -> None:
    """Run the clients and print their responses."""
    latencies: list[float] = []
    *sessions, (spare_url, spare_key) = asked["sessions"]
    over = asyncio.Event()
    troubled: Counter[str] = Counter()
    others = [
        asyncio.create_task(make_trouble(kind, spare_url, spare_key, over, troubled))
        for kind, number in asked["trouble"].items()
        for _ in range(number)
    ]
    start = time.perf_counter()
    said = await asyncio.gather(
        *(one_client(k, url, key, asked["calls"], latencies) for k, (url, key) in enumerate(sessions))
    )
    seconds = time.perf_counter() - start
    over.set()
    await asyncio.gather(*others)
    latencies.sort()
    told = {"said": said, "seconds": seconds, "latency": latencies[len(latencies) // 2], "trouble": troubled}
    json.dump(told, sys.stdout)


async def one_client(k: int, url: str, key: str, calls: int, latencies: list[float]) -> list[tuple[str, str]]:
    """Ids and texts of the responses, in order."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    said = []
    for call in range(calls):
        start = time.perf_counter()
        writer.write(_request(url, key, _chat(mark(k, call))))
        answer = json.loads(await _body(reader))
        latencies.append(time.perf_counter() - start)
        said.append((answer["id"], answer["choices"][0]["message"]["content"]))
    writer.close()
    return said


async def make_trouble(kind: str, url: str, key: str, over: asyncio.Event, counted: Counter[str]) -> None:
    """Misbehave repeatedly until `over` is set."""
    place = urlsplit(url)
    while not over.is_set():
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        try:
            match kind:
                case "go away":
                    writer.write(_request(url, key, _chat("gone")))
                    await writer.drain()
                case "send garbage":
                    writer.write(_request(url, key, b'{"messages": [[[[' * 1000))
                    assert b" 400 " in await reader.readline()
                case "send too much":
                    writer.write(_request(url, key, b"x", length=100_000_000))
                    assert b" 413 " in await reader.readline()
                case _:
                    writer.write(_request(url, "wrong", _chat("wrong")))
                    assert b" 401 " in await reader.readline()
            counted[kind] += 1
        finally:
            writer.close()
        await asyncio.sleep(0.05)


def _chat(text: str) -> bytes:
    return json.dumps({"model": "agent", "messages": [{"role": "user", "content": text}]}).encode()


def _request(url: str, key: str, body: bytes, length: int | None = None) -> bytes:
    place = urlsplit(url)
    head = (
        f"POST {place.path}/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


async def _body(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.splitlines()[0]:
        raise RuntimeError(head.decode())
    length = next(line for line in head.lower().splitlines() if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length.split(b":")[1]))


if __name__ == "__main__":
    exit_with(main)
