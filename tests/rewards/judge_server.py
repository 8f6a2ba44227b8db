"""A stub of an OpenAI-compatible endpoint on 127.0.0.1: sends the given answers, and records its requests.

It is lean on purpose (HTTP/1.1 with keep-alive over asyncio's own protocol), so that a benchmark measures its client:

    with JudgeServer([Answer(status=500), Answer("Fine.\\nScore: 7")]) as server:   # in a thread; the last answer
    repeats
        ... server.url, server.requests
    with server_process(latency=0.05) as url: ...                 # in a separate process
    python -m tests.rewards.judge_server --latency 0.05            # the same by hand; prints its address
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_STATUS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 429: "Too Many Requests", 500: "Internal Server Error"}


@dataclass(frozen=True)
class Answer:
    """One answer of the stub."""

    text: str = "Fine.\nScore: 7"
    """The judge's reply, in a chat completion."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    """Sent unchanged, instead of a chat completion."""
    delay: float = 0.0
    """Seconds before anything is sent. Infinite: never."""
    hang_up: bool = False
    """Close the connection without an answer."""
    company: int = 0
    """Requests that must be in flight at once before this is sent."""
    drip: float = 0.0
    """Seconds between two bytes of the body."""
    endless: bool = False
    """Send the body repeatedly, in chunks, until the client hangs up."""
    usage: tuple[int, int] | None = (100, 10)
    """Prompt and completion tokens."""
    finish_reason: str = "stop"

    def encoded(self) -> tuple[bytes, bytes]:
        """Head and body."""
        body = self.body if self.body is not None else self._completion()
        lines = [f"HTTP/1.1 {self.status} {_STATUS.get(self.status, 'Whatever')}"]
        length = {"Transfer-Encoding": "chunked"} if self.endless else {"Content-Length": str(len(body))}
        headers = {"Content-Type": "application/json", **length, **self.headers}
        return "\r\n".join([*lines, *(f"{k}: {v}" for k, v in headers.items()), "", ""]).encode(), body

    def _completion(self) -> bytes:
        if self.status != 200:
            return json.dumps({"error": {"message": self.text, "type": "stub"}}).encode()
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text},
            "finish_reason": self.finish_reason,
        }
        usage = self.usage and {
            "prompt_tokens": self.usage[0],
            "completion_tokens": self.usage[1],
            "total_tokens": sum(self.usage),
        }
        completion = {"id": "c", "object": "chat.completion", "created": 0, "model": "stub", "choices": [choice]}
        return json.dumps(completion | ({"usage": usage} if usage else {})).encode()


@dataclass(frozen=True)
class Request:
    """One request to the stub."""

    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: Any

    @property
    def text(self) -> str:
        """The content of all messages, one after the other."""
        return "\n".join(message["content"] for message in self.body["messages"])


Answers = Answer | list[Answer] | Callable[[Request], Answer]


class JudgeServer:
    """The stub, in a thread of this process."""

    def __init__(self, answers: Answers, *, remember: bool = True) -> None:
        self.answers = answers
        self.remember = remember
        self.requests: list[Request] = []
        self.in_flight = self.most_in_flight = 0
        self.held: list[tuple[_Connection, Answer]] = []
        """Answers that wait for more requests."""
        self.sent_without_end = 0
        """Bytes of endless bodies that were sent."""
        self.hung_up = threading.Event()
        """Set when the client has left an endless body."""
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._connections: set[_Connection] = set()
        self._encoded: dict[int, tuple[Answer, tuple[bytes, bytes]]] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> JudgeServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.listen(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def listen(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self), "127.0.0.1", 0, backlog=1024
        )
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def _stop(self) -> None:
        self._server.close()
        for connection in list(self._connections):
            connection.drop()
        await asyncio.sleep(0)

    def pick(self, path: str, head: bytes, body: bytes) -> Answer:
        """The answer to one request."""
        if not self.remember and isinstance(self.answers, Answer):
            return self.answers
        headers = dict(line.split(": ", 1) for line in head.decode("latin-1").split("\r\n")[1:])
        request = Request(path, {k.lower(): v for k, v in headers.items()}, json.loads(body))
        self.requests.append(request)
        if isinstance(self.answers, list):
            return self.answers[min(len(self.requests), len(self.answers)) - 1]
        return self.answers if isinstance(self.answers, Answer) else self.answers(request)

    def encoded(self, answer: Answer) -> tuple[bytes, bytes]:
        """The encoded answer; each answer is encoded once."""
        if id(answer) not in self._encoded:
            self._encoded[id(answer)] = (answer, answer.encoded())
        return self._encoded[id(answer)][1]


class _Connection(asyncio.Protocol):
    def __init__(self, server: JudgeServer) -> None:
        self.server = server
        self.received = b""
        self.transport: asyncio.Transport
        self.busy = False
        self.chunk = b""
        """Chunk of an endless body."""
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.server._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._done()
        self.server._connections.discard(self)
        if self.chunk:
            self.server.hung_up.set()

    def data_received(self, data: bytes) -> None:
        self.received += data
        end = self.received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self.received[:end]
        at = head.lower().find(b"\r\ncontent-length:")
        length = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self.received) < end + 4 + length:
            return
        body, self.received = self.received[end + 4 : end + 4 + length], self.received[end + 4 + length :]
        self.busy = True
        self.server.in_flight += 1
        self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
        answer = self.server.pick(head.split(b" ", 2)[1].decode("latin-1"), head, body)
        self._release()
        if answer.delay == float("inf"):
            return
        if answer.company > self.server.most_in_flight:
            self.server.held.append((self, answer))
        elif answer.delay:
            asyncio.get_running_loop().call_later(answer.delay, self._answer, answer)
        else:
            self._answer(answer)

    def _release(self) -> None:
        ready = [one for one in self.server.held if one[1].company <= self.server.most_in_flight]
        self.server.held = [one for one in self.server.held if one not in ready]
        for connection, answer in ready:
            connection._answer(answer)

    def _answer(self, answer: Answer) -> None:
        if self.transport.is_closing():
            return
        if answer.hang_up:
            self.transport.close()
            return
        head, body = self.server.encoded(answer)
        self._done()
        if answer.endless:
            self.transport.write(head)
            self.chunk = b"%x\r\n%s\r\n" % (len(body), body)
            self._again()
        elif answer.drip:
            self.transport.write(head)
            self._drip(body, answer.drip)
        else:
            self.transport.write(head + body)

    def _drip(self, body: bytes, pause: float) -> None:
        if body and not self.transport.is_closing():
            self.transport.write(body[:1])
            asyncio.get_running_loop().call_later(pause, self._drip, body[1:], pause)

    def _again(self) -> None:
        if self.chunk and not self.paused and not self.transport.is_closing():
            self.transport.write(self.chunk)
            self.server.sent_without_end += len(self.chunk)
            asyncio.get_running_loop().call_soon(self._again)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._again()

    def _done(self) -> None:
        if self.busy:
            self.busy = False
            self.server.in_flight -= 1

    def drop(self) -> None:
        self.transport.abort()


@contextmanager
def server_process(latency: float, text: str = "Fine.\nScore: 7") -> Iterator[str]:
    """Run the stub in a separate process, with every answer `latency` seconds after its request; yields its address."""
    command = [sys.executable, str(Path(__file__).resolve()), "--latency", str(latency), "--text", text]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout and process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--text", default=Answer.text, help="the judge's reply")
    args = parser.parse_args()

    async def serve() -> None:
        server = JudgeServer(Answer(args.text, delay=args.latency), remember=False)
        await server.listen()
        print(server.url, flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
