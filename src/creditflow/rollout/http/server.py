"""An OpenAI-compatible server for the policies of a run: every call of a client becomes a step of its rollout.

The step has the tokens, log-probs and policy version that were sampled. Each process has one server, in a separate
thread, so that it responds even if a rollout blocks its event loop, if only to report that. Each rollout has a separate
URL and key. This module has no rewards and no training. Imports starlette, uvicorn and pydantic.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import quote, unquote
from weakref import WeakKeyDictionary

from creditflow._utils.loopback import bound, host_name, hosts_of, is_proxied, url_of
from creditflow.data.trajectory import content_text
from creditflow.errors import (
    ConfigError,
    CreditflowError,
    EndpointError,
    InputError,
    PromptTooLong,
    did_you_mean,
    first_line,
)
from creditflow.rollout.chat import pieces
from creditflow.rollout.client import ChatClient
from creditflow.rollout.recorder import AgentCall, AgentSpec, Recorder, Reply

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from creditflow.rollout.http import openai_api as api
    from creditflow.rollout.http.connections import bounded_connections, make_room
    from creditflow.rollout.http.openai_api import Refused
except ImportError as missing:
    raise ConfigError(f"agents that call over HTTP need {missing.name}: pip install 'creditflow[serve]'") from missing

AGENT_HEADER = "x-creditflow-agent"
PARENTS_HEADER = "x-creditflow-parents"
_HOST = "127.0.0.1"
_TOLD = 4096
"""Maximum number of timed-out rollouts whose refusal is kept for calls of their threads; the oldest are dropped first.
"""
LONGEST_NAME = 200
"""Characters of a rollout's name, which is a segment of its URL."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits for clients."""

    connections: int = 4096
    """Total over all clients; fewer if the process may not have enough file descriptors."""
    connection_seconds: float = 20.0
    """For the head of a request, and for a client that does not read its response."""
    body_bytes: int = 4 << 20
    """The prompt of a longer body would take seconds to tokenise."""
    body_seconds: float = 60.0
    """For the body of a request."""
    answer_seconds: float = 3600.0
    """For the response to a request."""
    blocked_seconds: float = 60.0
    """For the rollout's event loop to take a call up. A quarter after each call that it did not take up, down to a
    sixteenth, and doubled after each call that it did."""
    steps: int = 10_000
    """Steps of one rollout."""
    waiting: int = 256
    """Concurrent calls of one rollout."""


class SessionFactory(Protocol):
    """Lets clients begin a rollout by their first call, under a name that they choose, and end it by a request.

    Its methods are called in the server's thread; the coroutine that `end` returns runs on the rollout's event loop.
    """

    api_key: str
    """The key of every client."""
    agents: Mapping[str, AgentSpec]
    """The agents of every rollout."""

    def enter(self, name: str) -> Session:
        """Begin a rollout. Raises Refused."""
        ...

    def end(self, session: Session, body: bytes) -> Coroutine[Any, Any, Mapping[str, Any]]:
        """End the rollout and return the answer for the client. Raises Refused."""
        ...


@dataclass(slots=True)
class Session:
    """A rollout that clients can call."""

    server: OpenAIServer = field(repr=False)
    name: str
    recorder: Recorder = field(repr=False)
    loop: asyncio.AbstractEventLoop = field(repr=False)
    api_key: str = field(repr=False)
    expected: bool = True
    """Whether generation waits for this rollout's next call, to batch it with others."""
    waiting: int = 0
    """Pending calls; counted on the rollout's event loop."""
    last_call: float = field(default_factory=time.monotonic)
    """Time at which a call last began or ended."""
    closed: bool = False
    ended: str = ""
    """The refusal of calls after the end, once `closed`."""
    _counted: bool = False
    """Whether its generator counts it as a rollout that is about to call."""

    @property
    def base_url(self) -> str:
        """The `base_url` of OpenAI's clients."""
        return f"{self.server.url}/t/{quote(self.name, safe='')}/v1"

    def close(self, why: str = "") -> None:
        """Refuse further calls: the rollout has ended. Call this on its event loop.

        `why`: the reason for later callers, if the rollout did not end by itself. They get 410 with it instead of 401.
        """
        if not self.closed:
            self.closed = True
            self.ended = f"trajectory {self.name} has ended" + (f": it {why}" if why else "")
            self.tell()
            self.server.forget(self, told=bool(why))

    async def ask(self, calls: Sequence[AgentCall], taken_up: Future[None]) -> list[Reply]:
        """Return the responses to one request. Runs on the rollout's event loop; sets `taken_up` as soon as it starts.

        If `taken_up` is already cancelled, the client has given up: generate nothing.
        """
        if not taken_up.set_running_or_notify_cancel():
            return []
        taken_up.set_result(None)
        limits, recorder = self.server.limits, self.recorder
        if self.closed:
            raise self.refusal()
        waiting = self.waiting + len(calls)
        if len(recorder.trajectory.steps) + waiting > limits.steps:
            raise Refused(
                429, f"trajectory {self.name}: at most {limits.steps} steps", code="too_many_steps", again=False
            )
        if waiting > limits.waiting:
            raise Refused(
                429, f"trajectory {self.name}: at most {limits.waiting} calls at a time", code="too_many_calls"
            )
        self.waiting += len(calls)
        self.tell()
        self.last_call = time.monotonic()
        try:
            return await recorder.ask_all(calls)
        except CreditflowError:
            if self.closed:
                raise self.refusal() from None
            raise
        finally:
            self.waiting -= len(calls)
            self.last_call = time.monotonic()
            self.tell()

    def refusal(self) -> Refused:
        """Return the refusal of calls after the rollout's end."""
        return Refused(410, self.ended or f"trajectory {self.name} has ended", code="trajectory_ended")

    def tell(self) -> None:
        """Report to the generator whether this rollout is about to call, that is, has no pending call.

        Call this on the rollout's event loop.
        """
        about_to_call = self.expected and not self.closed and self.waiting == 0
        if about_to_call != self._counted:
            self._counted = about_to_call
            self.recorder.generator.expect(1 if about_to_call else -1)


class OpenAIServer:
    """The server, its socket, and the open rollouts."""

    def __init__(
        self,
        host: str = _HOST,
        port: int = 0,
        *,
        limits: ServerLimits | None = None,
        session_factory: SessionFactory | None = None,
    ) -> None:
        """`port`: 0 takes a free one.

        `session_factory`: its rollouts begin with their first call; without it, each rollout is opened by `open`.
        """
        self.limits = limits or ServerLimits()
        self._session_factory = session_factory
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, tuple[str, str]] = {}
        """Key and refusal of timed-out rollouts, by name."""
        self._patience = _PickUpTimeout(self.limits.blocked_seconds)
        self._socket = bound(host, port)
        self.url = url_of(host, self._socket)
        self._hosts = hosts_of(host)
        config = uvicorn.Config(
            self._application(),
            http=bounded_connections(make_room(self.limits.connections), self.limits.connection_seconds),
            ws="none",
            lifespan="off",
            timeout_keep_alive=75,  # longer than that of OpenAI's client: no call meets a closing connection
            timeout_graceful_shutdown=5,  # a blocked event loop may delay a rollout's end
            log_config=None,  # the process configures its logging
            log_level=None,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="creditflow-server", daemon=True
        )

    def start(self) -> OpenAIServer:
        """Start to serve; clients that connect before the thread is ready wait."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the thread, the connections, and the pending calls."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def open(
        self,
        recorder: Recorder,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        name: str | None = None,
        api_key: str | None = None,
        expected: bool = True,
    ) -> Session:
        """Let clients call a rollout until the door is closed. Callable from any thread.

        `loop`: the rollout's event loop; default: the running one. `name`: default: a name that no other rollout ever
        had, because some libraries keep connections by URL, and with them the event loop of an ended rollout. Raises
        InputError for a name that is not one segment of a URL, or that belongs to an open rollout; CreditflowError if
        the loop has ended.
        """
        if name is None:
            name = f"{_NOT_IN_NAMES.sub('-', recorder.trajectory.id)[:100]}-{secrets.token_hex(4)}"
        elif not _is_segment(name):
            raise InputError(
                f"a trajectory's name has 1 to {LONGEST_NAME} printable characters, none a slash: got {name[:80]!r}"
            )
        key = secrets.token_urlsafe(24) if api_key is None else api_key
        session = Session(self, name, recorder, loop or asyncio.get_running_loop(), key, expected)
        if self._sessions.setdefault(name, session) is not session:
            raise InputError(f"a trajectory of the name {name[:80]!r} is open: its door must be closed first")
        try:
            session.loop.call_soon_threadsafe(session.tell)
        except RuntimeError:
            self.forget(session)
            raise CreditflowError(f"trajectory {recorder.trajectory.id}: its event loop has ended") from None
        return session

    def forget(self, session: Session, *, told: bool = False) -> None:
        """Remove a rollout that has ended. `told`: calls with its key still get its refusal."""
        if told:
            self._ended[session.name] = session.api_key, session.ended
            while len(self._ended) > _TOLD:
                del self._ended[next(iter(self._ended))]
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]

    # The methods below run in the server's thread.

    def _application(self) -> Starlette:
        base = "/t/{name}/v1"
        routes = [
            Route(f"{base}/chat/completions", self._answered(self._chat), methods=["POST"]),
            Route(f"{base}/completions", self._answered(self._complete), methods=["POST"]),
            Route(f"{base}/models", self._answered(self._models), methods=["GET"]),
            Route(f"{base}/models/{{model:path}}", self._answered(self._model), methods=["GET"]),
            Route("/t/{name}/end", self._answered(self._end), methods=["POST"]),
            Route("/health", self._health, methods=["GET"]),
        ]

        async def refused(request: Request, error: Exception) -> Response:
            status, path = getattr(error, "status_code", 404), request.url.path
            expected = next((said for end, said in _NOT_HERE.items() if path.endswith(end)), _HERE)
            return _refusal(Refused(status, f"{request.method} {path[:200]}: {expected}"))

        application = Starlette(routes=routes, exception_handlers={404: refused, 405: refused})
        application.router.redirect_slashes = False  # a redirected client has shown no key yet
        return application

    def _answered(
        self, make: Callable[[Request, Session | None], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Any]]:
        async def answer(request: Request) -> Response:
            try:
                return await make(request, self._door(request))
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # sent to the client; the generator also keeps a model's error
                return _refusal(_as_refusal(error))

        return answer

    async def _health(self, request: Request) -> Response:
        # Clients without a key do not keep a connection.
        return JSONResponse({"status": "ok"}, headers={"connection": "close"})

    def _door(self, request: Request) -> Session | None:
        """Return the rollout of a request; None for one that clients may begin and have not begun. Raises Refused."""
        if self._hosts is not None and host_name(request.headers.get("host", "")) not in self._hosts:
            raise Refused(421, f"this server is {' or '.join(self._hosts)}")
        name = request.path_params["name"]
        session = self._sessions.get(name)
        key, told = self._ended.get(name, ("", "")) if session is None else (session.api_key, "")
        expected = key if self._session_factory is None else self._session_factory.api_key
        _, _, given = request.headers.get("authorization", "").partition(" ")
        # An unknown rollout gets the same refusal as a wrong key: clients without the key cannot tell them apart.
        if not expected or not hmac.compare_digest(given.encode(), expected.encode()):
            raise Refused(401, "no such trajectory, or a wrong API key", code="invalid_api_key")
        if told and self._session_factory is None:
            raise Refused(410, told, code="trajectory_ended")
        return session

    def _agents(self, session: Session | None) -> Mapping[str, AgentSpec]:
        if session is not None:
            return session.recorder.agents
        assert self._session_factory is not None  # without a lobby, no key opens a rollout that does not exist
        return self._session_factory.agents

    def _begun(self, request: Request, session: Session | None, choices: int) -> Session:
        """Return the rollout of a request for `choices` choices. Raises Refused if it can never have as many."""
        if choices > self.limits.waiting:
            raise Refused(400, f"expected at most {self.limits.waiting} choices of all prompts together, got {choices}")
        name = request.path_params["name"]
        session = session or self._sessions.get(name)  # another call may have begun it during this one's upload
        if session is None:
            assert self._session_factory is not None
            session = self._session_factory.enter(name)
        return session

    async def _body(self, request: Request) -> bytes:
        most = self.limits.body_bytes
        said = f"expected a body of at most {most} bytes"
        if int(request.headers.get("content-length", "0")) > most:
            raise Refused(413, said)
        parts, length = [], 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    length += len(part)
                    if length > most:
                        raise Refused(413, said)
                    parts.append(part)
        except TimeoutError:
            raise Refused(408, f"expected a body within {self.limits.body_seconds:g} s") from None
        return b"".join(parts)

    async def _chat(self, request: Request, session: Session | None) -> Response:
        asked = api.parsed(api.ChatRequest, await self._body(request))
        said, agents = asked.conversation, self._agents(session)
        systems = [content_text(message.get("content")) for message in said if message["role"] == "system"]
        agent = _agent(agents, request, asked.model, "\n".join(systems))
        call = AgentCall(
            agent,
            said if systems else agents[agent].introduced(said),
            parents=_parents(request, session),
            reads=[content_text(one.get("content")) for one in said if one["role"] != "assistant"],
            spoken=[content_text(one.get("content")) for one in said if one["role"] == "assistant"],
            answers=[] if session is None else api.answered(said, session.recorder.trajectory.id),
            tools=asked.schemas,
            ignored=asked.ignored(agents[agent].ignored_fields),
        )
        session = self._begun(request, session, asked.n or 1)
        calls = _calls(session, asked, call, asked.most_tokens)
        replies = await self._ask(request, session, calls)
        answer = api.chat_answer(asked, replies, lambda reply: _tokens(session, reply))
        return _reply(asked, answer)

    async def _complete(self, request: Request, session: Session | None) -> Response:
        asked = api.parsed(api.TextRequest, await self._body(request))
        agents, parents = self._agents(session), _parents(request, session)
        agent = _agent(agents, request, asked.model, "")
        ignored = asked.ignored(agents[agent].ignored_fields)
        session = self._begun(request, session, len(asked.prompt) * (asked.n or 1))
        made = [
            AgentCall(agent, prompt, parents, reads=[prompt] if isinstance(prompt, str) else [], ignored=ignored)
            for prompt in asked.prompts
        ]
        calls = [call for one in made for call in _calls(session, asked, one, asked.max_tokens)]
        replies = await self._ask(request, session, calls)
        return _reply(asked, api.text_answer(asked, replies, lambda reply: _tokens(session, reply)))

    async def _ask(self, request: Request, session: Session, calls: Sequence[AgentCall]) -> list[Reply]:
        """Return the responses, made on the rollout's event loop. A client's disconnect cancels its request."""
        seconds, taking = self._patience.seconds_for(session.loop), Future[None]()
        taken_up = asyncio.wrap_future(taking)
        made: asyncio.Future[list[Reply]] = asyncio.wrap_future(_run_on(session.loop, session.ask(calls, taking)))
        gone = asyncio.create_task(_disconnected(request))
        try:
            first = await _first(made, taken_up, gone, within=seconds)
            if first is None and taking.cancel():  # it is refused or answered, never both
                raise self._blocked(session, seconds)
            if taking.done():
                self._patience.was_kept(session.loop, seconds)
            first = await _first(made, gone, within=self.limits.answer_seconds)
            if first is None:
                raise Refused(504, f"no response within {self.limits.answer_seconds:g} s", again=False)
            if first is gone:
                raise ClientDisconnect
            if made.cancelled():
                raise session.refusal()
            return made.result()
        finally:
            for one in (made, taken_up, gone):
                one.cancel()

    def _blocked(self, session: Session, seconds: float) -> Refused:
        """Return the refusal of a call that was not taken up."""
        self._patience.was_lost(session.loop, seconds)
        said = (
            f"the event loop of trajectory {session.name} did not take the call up within {seconds:.3g} s: "
            "call what blocks by `await asyncio.to_thread(...)`"
        )
        # The first time, another rollout may have blocked the loop, and may have finished.
        return Refused(503, said, again=None if seconds == self.limits.blocked_seconds else False)

    async def _end(self, request: Request, session: Session | None) -> Response:
        if self._session_factory is None:
            raise Refused(404, "this trajectory ends when its workflow returns")
        if session is None:
            said = f"no trajectory {request.path_params['name'][:80]!r} is open"
            raise Refused(404, said, code="trajectory_not_found")
        return JSONResponse(
            await asyncio.wrap_future(
                _run_on(session.loop, self._session_factory.end(session, await self._body(request)))
            )
        )

    async def _models(self, request: Request, session: Session | None) -> Response:
        return JSONResponse({"object": "list", "data": [_model(name) for name in self._model_names(session)]})

    async def _model(self, request: Request, session: Session | None) -> Response:
        name, known = request.path_params["model"], self._model_names(session)
        if name not in known:
            raise Refused(
                404,
                f"no model {name[:80]!r}; there is {', '.join(known)}{did_you_mean(name[:80], known)}",
                code="model_not_found",
            )
        return JSONResponse(_model(name))

    def _model_names(self, session: Session | None) -> list[str]:
        return [f"{spec.policy}:{name}" for name, spec in self._agents(session).items()]


_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")
"""Characters of a trajectory's id that its URL leaves out, so that no client or proxy rewrites it."""


def _is_segment(name: str) -> bool:
    """Whether a name is one segment of a URL and reads back unchanged; \ufffd marks unreadable characters."""
    fits = 0 < len(name) <= LONGEST_NAME and name not in (".", "..")
    return fits and name.isprintable() and not {"/", "\ufffd"}.intersection(name)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "creditflow"}


def _agent(agents: Mapping[str, AgentSpec], request: Request, model: str, system: str) -> str:
    """Return the agent of a call: by the header, the model's name, or the system prompt; or the only agent."""
    names = ", ".join(agents)
    if (named := request.headers.get(AGENT_HEADER)) is not None:
        if named not in agents:
            names += did_you_mean(named[:80], agents)
            raise Refused(404, f"{AGENT_HEADER}: no agent {named[:80]!r}; there is {names}", code="agent_not_found")
        return named
    policy, colon, agent = model.rpartition(":")
    if agent in agents and (not colon or agents[agent].policy == policy):
        return agent
    if colon and policy in {spec.policy for spec in agents.values()}:
        meant = [f"{spec.policy}:{name}" for name, spec in agents.items()]
        said = f"model: no {model[:80]!r}; there is {', '.join(meant)}{did_you_mean(model[:80], meant)}"
        raise Refused(404, said, code="model_not_found")
    if len(agents) == 1:
        return next(iter(agents))
    matching = [name for name, spec in agents.items() if spec.match and re.search(spec.match, system)]
    if not matching and system:
        begins = {name: len(spec.system) for name, spec in agents.items() if spec.system and spec.system in system}
        longest = max(begins.values(), default=0)
        matching = [name for name, length in begins.items() if length == longest]
    if len(matching) != 1:
        found = f"fits {', '.join(matching)}" if matching else "fits none"
        raise Refused(
            400,
            f"whose call is this? Expected header {AGENT_HEADER}, a model named as one of {names} (such as "
            f"{next(iter(agents.values())).policy}:{next(iter(agents))}), or a system prompt that team.agents.<name>."
            f"match finds; model {model[:80]!r} names none, and the system prompt {found}",
            code="agent_not_found",
        )
    return matching[0]


def _parents(request: Request, session: Session | None) -> tuple[int, ...] | None:
    """Return the parents from the ids of answers; None if the header is missing.

    Ids with a comma, or with characters that no header can have, are percent-encoded.
    """
    if (given := request.headers.get(PARENTS_HEADER)) is None:
        return None
    known = {} if session is None else {step.id: step.index for step in list(session.recorder.trajectory.steps)}
    ids = [one if one in known else unquote(one) for part in given.split(",") if (one := part.strip())]
    if unknown := [one for one in ids if one not in known]:
        raise Refused(400, f"{PARENTS_HEADER}: no answer of this trajectory has the id {unknown[0][:80]!r}")
    return tuple(sorted({known[one] for one in ids}))


def _calls(session: Session, asked: api.Request, call: AgentCall, most_tokens: int | None) -> list[AgentCall]:
    """Return one call for each choice."""
    n = asked.n or 1
    base = replace(
        call,
        max_tokens=None if most_tokens is None else min(most_tokens, session.recorder.sampling.max_tokens),
        temperature=asked.temperature,
        stop=tuple(asked.stop),
        info=asked.metadata,
    )
    seeds = [None] * n if asked.seed is None else [(asked.seed * api.MOST_CHOICES + i) % 2**63 for i in range(n)]
    return [replace(base, seed=seed) for seed in seeds]


def _tokens(session: Session, reply: Reply) -> list[dict[str, Any]]:
    """Return tokens and log-probs of a reply, in the format of chat completions."""
    step = reply.step
    client = session.recorder.generator.clients[step.policy]
    if isinstance(client, ChatClient):
        return []
    said = list(zip(pieces(client.decode, step.response_ids), reply.logprobs, strict=True))
    listed = []
    for begin, end in step.info.get("turns", [(0, len(said))]):  # the tokens between turns are the tools'
        for text, logprob in said[begin:end]:
            told = None if "\ufffd" in text else list(text.encode())  # the bytes of an incomplete character are unknown
            listed.append({"token": text, "logprob": logprob, "bytes": told, "top_logprobs": []})
    return listed


def _reply(asked: api.Request, answer: Mapping[str, Any]) -> Response:
    if asked.stream:
        usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        return Response(api.streamed(answer, usage=usage), media_type="text/event-stream")
    return Response(json.dumps(answer, ensure_ascii=False).encode(), media_type="application/json")


def _as_refusal(error: Exception) -> Refused:
    match error:
        case Refused():
            refused = error
        case PromptTooLong():
            refused = Refused(400, str(error), code="context_length_exceeded", param="messages")
        case InputError() | ValueError():
            refused = Refused(400, first_line(error))
        case EndpointError():
            refused = Refused(502, first_line(error), again=False)  # the endpoint's retries are used up
        case _:
            refused = Refused(500, f"{type(error).__name__}: {first_line(error)}", again=False)
    return refused


_HERE = "expected POST /t/NAME/v1/chat/completions or /completions, or GET /t/NAME/v1/models"
_NOT_HERE = {
    "/end": "expected POST /t/NAME/end",
    "/responses": f"there is no Responses API here; {_HERE}",
    "/embeddings": f"a policy has no embeddings; {_HERE}",
}
"""Expected requests, by the end of the path of an unknown one."""
_UNREAD = (401, 404, 405, 408, 413, 421, 429)
"""Statuses of refusals that come before the body has been read to its end."""


def _refusal(refused: Refused) -> Response:
    # The rest of an unread request must not be parsed as the next one.
    headers = {"connection": "close"} if refused.status in _UNREAD else {}
    if refused.again is not None:
        headers["x-should-retry"] = json.dumps(refused.again)
    return JSONResponse(refused.body(), status_code=refused.status, headers=headers)


class _PickUpTimeout:
    """Seconds to wait for each event loop to take a call up.

    A quarter after each call that the loop did not take up, down to a sixteenth: a rollout that blocks its loop once
    will do so again. Doubled after each call that it did take up: the loop was blocked only for a time.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._shorter: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()

    def seconds_for(self, loop: asyncio.AbstractEventLoop) -> float:
        return self._shorter.get(loop, self._longest)

    def was_lost(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._shorter[loop] = max(seconds / 4, self._longest / 16)

    def was_kept(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        if seconds < self._longest:
            self._shorter[loop] = min(2 * seconds, self._longest)


async def _first(*awaited: asyncio.Future[Any], within: float) -> asyncio.Future[Any] | None:
    """Return the one that is done within `within` seconds, the first named if several are; None if none is."""
    await asyncio.wait(awaited, timeout=within, return_when=asyncio.FIRST_COMPLETED)
    return next((one for one in awaited if one.done()), None)


async def _disconnected(request: Request) -> None:
    """Return when the client has disconnected; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:  # the loop is closed, and its rollout has ended
        coroutine.close()
        raise Refused(410, "the trajectory has ended", code="trajectory_ended") from None


_PROCESS_SERVER: list[OpenAIServer] = []
_STARTING = threading.Lock()


def open_door(recorder: Recorder, loop: asyncio.AbstractEventLoop) -> Session:
    """Let clients call a rollout of this process. The first call starts the server, which then stays."""
    with _STARTING:
        if not _PROCESS_SERVER:
            _PROCESS_SERVER.append(OpenAIServer().start())
            if is_proxied(_HOST):
                warnings.warn(
                    "HTTP_PROXY is set and NO_PROXY does not name 127.0.0.1: clients of team.base_url ask the proxy, "
                    "which cannot reach this process and reads prompts and keys. Set NO_PROXY=127.0.0.1,localhost",
                    stacklevel=2,
                )
    return _PROCESS_SERVER[0].open(recorder, loop)
