"""A stub of an HTTP service on 127.0.0.1, by default of an OpenAI-compatible endpoint that judges.

It sends the given answers, and records its requests.

with JudgeServer([Answer(status=500), Answer("Fine.\\nScore: 7")]) as server:   # in a thread; the last answer repeats
    ... server.url, server.requests
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


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

    def encoded(self) -> bytes:
        """The body."""
        if self.body is not None:
            return self.body
        if self.status != 200:
            return json.dumps({"error": {"message": self.text, "type": "stub"}}).encode()
        choice = {"message": {"role": "assistant", "content": self.text}, "finish_reason": self.finish_reason}
        usage = self.usage and dict(zip(("prompt_tokens", "completion_tokens"), self.usage, strict=True))
        return json.dumps({"model": "stub", "choices": [choice], "usage": usage}).encode()


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
    """The stub, with a thread for each connection. Inside its context, no client uses a proxy."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.requests: list[Request] = []
        self.most_in_flight = 0
        self.sent_without_end = 0
        """Bytes of endless bodies that were sent."""
        self.address = self.url = ""
        """The service without a path, and as the base URL of an OpenAI-compatible endpoint."""
        self._in_flight = 0
        self._arrival = threading.Condition()
        self._over = threading.Event()
        self._environment = pytest.MonkeyPatch()

    def __enter__(self) -> JudgeServer:
        self._environment.setenv("NO_PROXY", "127.0.0.1")
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.stub = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.url = f"{self.address}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with self._arrival:
            self._arrival.notify_all()
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()
        self._environment.undo()

    def answer_to(self, path: str, headers: dict[str, str], body: bytes) -> Answer | None:
        """The answer to a request, when it is to be sent; None once the stub has ended."""
        request = Request(path, headers, json.loads(body))
        with self._arrival:
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            self.requests.append(request)
            number = len(self.requests)
        answer = self._pick(number, request)
        with self._arrival:
            self._arrival.notify_all()
            self._arrival.wait_for(lambda: self.most_in_flight >= answer.company or self._over.is_set())
        if answer.delay:
            self._over.wait(None if answer.delay == float("inf") else answer.delay)
        with self._arrival:
            self._in_flight -= 1
        return None if self._over.is_set() else answer

    def _pick(self, number: int, request: Request) -> Answer:
        if isinstance(self.answers, list):
            return self.answers[min(number, len(self.answers)) - 1]
        return self.answers if isinstance(self.answers, Answer) else self.answers(request)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024
    stub: JudgeServer

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that leave."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_POST(self) -> None:
        stub, received = self.server.stub, self.rfile.read(int(self.headers["Content-Length"]))
        answer = stub.answer_to(self.path, {name.lower(): value for name, value in self.headers.items()}, received)
        if answer is None or answer.hang_up:
            self.close_connection = True
            return
        body = answer.encoded()
        length = {"Transfer-Encoding": "chunked"} if answer.endless else {"Content-Length": str(len(body))}
        self.send_response(answer.status)
        for name, value in {"Content-Type": "application/json", **length, **answer.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if answer.endless:
            chunk = b"%x\r\n%s\r\n" % (len(body), body)
            while self.wfile.write(chunk):
                stub.sent_without_end += len(chunk)
        for place in range(len(body) if answer.drip else 0):
            self.wfile.write(body[place : place + 1])
            time.sleep(answer.drip)
        if not answer.drip:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
