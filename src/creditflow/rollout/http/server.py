"""A server for the policies of a run: every call of a client, in any dialect, becomes a step of its rollout.

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
from functools import partial
from typing import Any, Protocol
from urllib.parse import quote, unquote

from creditflow._utils.files import json_ready
from creditflow._utils.install import needs
from creditflow._utils.loopback import bound, host_name, hosts_of, is_proxied, url_of
from creditflow.data.trajectory import content_text
from creditflow.errors import (
    CreditflowError,
    EndpointError,
    InputError,
    PromptTooLong,
    did_you_mean,
    first_line,
)
from creditflow.rollout.chat import pieces
from creditflow.rollout.client import ChatClient, PolicyView
from creditflow.rollout.recorder import AgentCall, AgentSpec, Recorder, Reply

with needs("calls over HTTP", "serve"):
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from creditflow.rollout.http.answers import answered
    from creditflow.rollout.http.connections import bounded_connections, make_room
    from creditflow.rollout.http.dialects import DIALECTS
    from creditflow.rollout.http.requests import MOST_CHOICES, Dialect, RefusedError, parsed

AGENT_HEADER = "x-creditflow-agent"
PARENTS_HEADER = "x-creditflow-parents"
_HOST = "127.0.0.1"
_MOST_REFUSALS = 4096
"""Maximum number of timed-out rollouts whose refusal is kept for calls of their threads; the oldest go first."""
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
    blocked_seconds: float = 20.0
    """For the rollout's event loop to take a call up."""
    steps: int = 10_000
    """Steps of one rollout."""
    waiting: int = 256
    """Concurrent calls of one rollout."""


class SessionFactory(Protocol):
    """Rollouts that clients begin and end; see `sessions.SessionStore`."""

    api_key: str
    agents: Mapping[str, AgentSpec]

    def enter(self, name: str) -> Session: ...

    def end(self, session: Session, body: bytes) -> Coroutine[Any, Any, Mapping[str, Any]]: ...


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
    ended: str = ""
    """The refusal of calls after the end; empty while the rollout runs."""
    _counted: bool = False
    """Whether its generator counts it as a rollout that is about to call."""

    @property
    def base_url(self) -> str:
        """The `base_url` of the clients of all dialects."""
        return f"{self.server.url}/t/{quote(self.name, safe='')}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables from which official clients read their URL and key."""
        return client_environment(self.base_url, self.api_key)

    def close(self, why: str = "") -> None:
        """Refuse further calls: the rollout has ended. Call this on its event loop.

        `why`: the reason for later callers, if the rollout did not end by itself. They get 410 with it instead of 401.
        """
        if not self.ended:
            self.ended = f"rollout {self.name} has ended" + (f": it {why}" if why else "")
            self.report_expected()
            self.server.forget(self, keep_refusal=bool(why))

    async def ask(self, calls: Sequence[AgentCall], taken_up: Future[None]) -> list[Reply]:
        """Return the responses to one request. Runs on the rollout's event loop; sets `taken_up` as soon as it starts.

        If `taken_up` is already cancelled, the client has given up: generate nothing.
        """
        if not taken_up.set_running_or_notify_cancel():
            return []
        taken_up.set_result(None)
        limits = self.server.limits
        if self.ended:
            raise self.refusal()
        waiting = self.waiting + len(calls)
        if len(self.recorder.trajectory.steps) + waiting > limits.steps:
            raise RefusedError(
                429, f"rollout {self.name}: at most {limits.steps} steps", code="too_many_steps", again=False
            )
        if waiting > limits.waiting:
            raise RefusedError(
                429, f"rollout {self.name}: at most {limits.waiting} calls at a time", code="too_many_calls"
            )
        self._add_waiting(len(calls))
        try:
            return await self.recorder.ask_all(calls)
        except CreditflowError:
            if self.ended:
                raise self.refusal() from None
            raise
        finally:
            self._add_waiting(-len(calls))

    def refusal(self) -> RefusedError:
        """Return the refusal of calls after the rollout's end."""
        return RefusedError(410, self.ended or f"rollout {self.name} has ended", code="trajectory_ended")

    def report_expected(self) -> None:
        """Report to the generator whether this rollout is about to call, that is, has no pending call.

        Call this on the rollout's event loop.
        """
        about_to_call = self.expected and not self.ended and self.waiting == 0
        if about_to_call != self._counted:
            self._counted = about_to_call
            self.recorder.generator.expect(1 if about_to_call else -1)

    def _add_waiting(self, calls: int) -> None:
        self.waiting += calls
        self.last_call = time.monotonic()
        self.report_expected()


class OpenAIServer:
    """The server, its socket, and the open rollouts."""

    def __init__(
        self,
        host: str = _HOST,
        port: int = 0,
        *,
        limits: ServerLimits | None = None,
        session_store: SessionFactory | None = None,
    ) -> None:
        """`port`: 0 takes a free one.

        `session_store`: clients begin its rollouts by their first call, under a name that they choose, and end them by
        a request; without it, each rollout is opened by `open`.
        """
        self.limits = limits or ServerLimits()
        self._session_store = session_store
        self.sessions: dict[str, Session] = {}
        """The open rollouts by name."""
        self._ended: dict[str, tuple[str, str]] = {}
        """Key and refusal of timed-out rollouts, by name."""
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
        """Let clients call a rollout until its session is closed. Callable from any thread.

        `loop`: the rollout's event loop; default: the running one. `name`: default: a name that no other rollout ever
        had, because some libraries keep connections by URL, and with them the event loop of an ended rollout. Raises
        InputError for a name that is not one segment of a URL, or that belongs to an open rollout; CreditflowError if
        the loop has ended.
        """
        if name is None:
            name = f"{_NOT_IN_NAMES.sub('-', recorder.trajectory.id)[:100]}-{secrets.token_hex(4)}"
        elif not _is_segment(name):
            raise InputError(
                f"a rollout's name has 1 to {LONGEST_NAME} printable characters, none a slash: got {name[:80]!r}"
            )
        key = secrets.token_urlsafe(24) if api_key is None else api_key
        session = Session(self, name, recorder, loop or asyncio.get_running_loop(), key, expected)
        if self.sessions.setdefault(name, session) is not session:
            raise InputError(f"a rollout of the name {name[:80]!r} is open: its session must be closed first")
        try:
            session.loop.call_soon_threadsafe(session.report_expected)
        except RuntimeError:
            self.forget(session)
            raise CreditflowError(f"rollout {recorder.trajectory.id}: its event loop has ended") from None
        return session

    def forget(self, session: Session, *, keep_refusal: bool = False) -> None:
        """Remove a rollout that has ended. `keep_refusal`: calls with its key still get its refusal."""
        if keep_refusal:
            self._ended[session.name] = session.api_key, session.ended
            while len(self._ended) > _MOST_REFUSALS:
                del self._ended[next(iter(self._ended))]
        if self.sessions.get(session.name) is session:
            del self.sessions[session.name]

    # The methods below run in the server's thread.

    def _application(self) -> Starlette:
        base = "/t/{name}/v1"
        routes = [
            *(route for _, dialect in DIALECTS.items() for route in self._routes(dialect, base)),
            *(
                Route(f"{path}/models{end}", self._answered(self._models), methods=["GET"])
                for path in _paths(base, adds_version=True)
                for end in ("", "/{model:path}")
            ),
            Route("/t/{name}/end", self._answered(self._end), methods=["POST"]),
        ]
        application = Starlette(routes=routes, exception_handlers={404: _unknown_route, 405: _unknown_route})
        application.router.redirect_slashes = False  # a redirected client has shown no key yet
        return application

    def _routes(self, dialect: Dialect, base: str) -> list[Route]:
        complete = self._answered(partial(self._complete, dialect))
        return [
            Route(f"{path}{dialect.path}", complete, methods=["POST"])
            for path in _paths(base, adds_version=dialect.client_adds_version)
        ]

    def _answered(
        self, make: Callable[[Request, Session | None], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Any]]:
        async def answer(request: Request) -> Response:
            try:
                return await make(request, self._session(request))
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # sent to the client; the generator also keeps a model's error
                return _refusal(_as_refused(error), request)

        return answer

    def _session(self, request: Request) -> Session | None:
        """Return the rollout of a request; None for one that clients may yet begin. Raises RefusedError."""
        if self._hosts is not None and host_name(request.headers.get("host", "")) not in self._hosts:
            raise RefusedError(421, f"this server is {' or '.join(self._hosts)}")
        name = request.path_params["name"]
        session = self.sessions.get(name)
        key, refusal = self._ended.get(name, ("", "")) if session is None else (session.api_key, "")
        if self._session_store is not None:
            key, refusal = self._session_store.api_key, ""
        keys = (request.headers.get("authorization", "").partition(" ")[2], request.headers.get("x-api-key", ""))
        # An unknown rollout gets the same refusal as a wrong key: clients without the key cannot tell them apart.
        if not key or not any(hmac.compare_digest(sent.encode(), key.encode()) for sent in keys):
            raise RefusedError(401, "no such rollout, or a wrong API key", code="invalid_api_key")
        if refusal:
            raise RefusedError(410, refusal, code="trajectory_ended")
        return session

    def _agents(self, session: Session | None) -> Mapping[str, AgentSpec]:
        if session is not None:
            return session.recorder.agents
        assert self._session_store is not None  # without it, no key opens a rollout that does not exist
        return self._session_store.agents

    async def _body(self, request: Request) -> bytes:
        too_long = RefusedError(413, f"expected a body of at most {self.limits.body_bytes} bytes")
        if int(request.headers.get("content-length", "0")) > self.limits.body_bytes:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.body_bytes:
                        raise too_long
        except TimeoutError:
            raise RefusedError(408, f"expected a body within {self.limits.body_seconds:g} s") from None
        return bytes(body)

    async def _complete(self, dialect: Dialect, request: Request, session: Session | None) -> Response:
        """Make the calls of a request, one for each choice, and return their responses."""
        body, agents = parsed(dialect.request, await self._body(request)), self._agents(session)
        asked = body.asked()
        messages, n, most = asked.messages, asked.choices, self.limits.waiting
        texts = [(message["role"], content_text(message.get("content"))) for message in messages]
        systems = [text for role, text in texts if role == "system"]
        agent = _agent(agents, request, body.model, "\n".join(systems))
        parents, ignored = _parents(request, session), body.ignored(agents[agent].ignored_fields)
        if n > most:
            raise RefusedError(400, f"n: expected at most {most} choices, got {n}", param="n")
        session = self._begun(request, session)
        limit = session.recorder.sampling.max_tokens
        call = AgentCall(
            agent,
            messages if systems else agents[agent].introduced(messages),
            parents=parents,
            reads=[text for role, text in texts if role != "assistant"],
            spoken=[text for role, text in texts if role == "assistant"],
            answers=answered(messages, session.recorder.trajectory.id),
            max_tokens=None if asked.max_tokens is None else min(asked.max_tokens, limit),
            temperature=body.temperature,
            stop=tuple(asked.stop),
            tools=body.schemas,
            info=body.metadata,
            ignored=ignored,
        )
        seeds = [None if body.seed is None else (body.seed * MOST_CHOICES + i) % 2**63 for i in range(n)]
        replies = await self._ask(request, session, [replace(call, seed=seed) for seed in seeds])
        clients = session.recorder.generator.clients
        # A log-probability may be -inf.
        answer = json_ready(dialect.answer(body, replies, lambda reply: _tokens(clients[reply.step.policy], reply)))
        if body.stream:
            return Response(dialect.streamed(body, answer), media_type="text/event-stream")
        return JSONResponse(answer)

    def _begun(self, request: Request, session: Session | None) -> Session:
        """Return the session of a request, begun if clients may begin it."""
        name = request.path_params["name"]
        session = session or self.sessions.get(name)  # another call may have begun it during this one's upload
        if session is None:
            assert self._session_store is not None
            session = self._session_store.enter(name)
        return session

    async def _ask(self, request: Request, session: Session, calls: Sequence[AgentCall]) -> list[Reply]:
        """Return the responses, made on the rollout's event loop. A client's disconnect cancels its request."""
        seconds, taking_up = self.limits.blocked_seconds, Future[None]()
        taken_up = asyncio.wrap_future(taking_up)
        replies: asyncio.Future[list[Reply]] = asyncio.wrap_future(_run_on(session.loop, session.ask(calls, taking_up)))
        gone = asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait((replies, taken_up, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not (replies.done() or gone.done()) and taking_up.cancel():  # it is refused or answered, never both
                # The client may retry: another rollout may have blocked the loop, and may have finished.
                raise RefusedError(
                    503,
                    f"the event loop of rollout {session.name} did not take the call up within {seconds:.3g} s: "
                    "call what blocks by `await asyncio.to_thread(...)`",
                )
            await asyncio.wait((replies, gone), timeout=self.limits.answer_seconds, return_when=asyncio.FIRST_COMPLETED)
            if replies.cancelled():
                raise session.refusal()
            if replies.done():
                return replies.result()
            if gone.done():
                raise ClientDisconnect
            raise RefusedError(504, f"no response within {self.limits.answer_seconds:g} s", again=False)
        finally:
            for waited in (replies, taken_up, gone):
                waited.cancel()

    async def _end(self, request: Request, session: Session | None) -> Response:
        if self._session_store is None:
            raise RefusedError(404, "this rollout ends when its workflow returns")
        if session is None:
            name = request.path_params["name"][:80]
            raise RefusedError(404, f"no rollout {name!r} is open", code="trajectory_not_found")
        ending = self._session_store.end(session, await self._body(request))
        return JSONResponse(await asyncio.wrap_future(_run_on(session.loop, ending)))

    async def _models(self, request: Request, session: Session | None) -> Response:
        agents, name = self._agents(session), request.path_params.get("model")
        names = _model_names(agents)
        if name is not None:
            if name not in (*names, *agents):
                raise _unknown_model(name, names)
            return JSONResponse(_model(name))
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": list(map(_model, names)), **ends})


def _model(name: str) -> dict[str, Any]:
    """Return a model with the fields of OpenAI's and of Anthropic's API."""
    of_anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "creditflow", **of_anthropic}


def _paths(base: str, *, adds_version: bool) -> list[str]:
    """Return the beginnings of a path: a client that adds the version itself may be given the same URL as others."""
    return [base, f"{base}/v1"] if adds_version else [base]


_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")
"""Characters of a rollout's id that its URL leaves out, so that no client or proxy rewrites it."""


def _is_segment(name: str) -> bool:
    """Whether a name is one segment of a URL and reads back unchanged; \ufffd marks unreadable characters."""
    fits = 0 < len(name) <= LONGEST_NAME and name not in (".", "..")
    return fits and name.isprintable() and not {"/", "\ufffd"}.intersection(name)


def _model_names(agents: Mapping[str, AgentSpec]) -> list[str]:
    return [f"{spec.policy}:{name}" for name, spec in agents.items()]


def _unknown_model(name: str, names: Sequence[str]) -> RefusedError:
    hint = f"there is {', '.join(names)}{did_you_mean(name[:80], names)}"
    return RefusedError(404, f"model: no {name[:80]!r}; {hint}", code="model_not_found")


def _agent(agents: Mapping[str, AgentSpec], request: Request, model: str, system: str) -> str:
    """Return the agent of a call: by the header, the model's name, or the system prompt; or the only agent."""
    names = ", ".join(agents)
    if (named := request.headers.get(AGENT_HEADER)) is not None:
        if named not in agents:
            names += did_you_mean(named[:80], agents)
            raise RefusedError(
                404, f"{AGENT_HEADER}: no agent {named[:80]!r}; there is {names}", code="agent_not_found"
            )
        return named
    policy, colon, agent = model.rpartition(":")
    if agent in agents and (not colon or agents[agent].policy == policy):
        return agent
    if colon and policy in {spec.policy for spec in agents.values()}:
        raise _unknown_model(model, _model_names(agents))
    if len(agents) == 1:
        return next(iter(agents))
    matching = [name for name, spec in agents.items() if spec.match and re.search(spec.match, system)]
    if not matching and system:
        lengths = {name: len(spec.system) for name, spec in agents.items() if spec.system and spec.system in system}
        matching = [name for name, length in lengths.items() if length == max(lengths.values())]
    if len(matching) != 1:
        fits = f"fits {', '.join(matching)}" if matching else "fits none"
        raise RefusedError(
            400,
            f"no agent matches this call. Expected header {AGENT_HEADER}, a model named as one of {names} (such as "
            f"{next(iter(agents.values())).policy}:{next(iter(agents))}), or a system prompt that team.agents.<name>."
            f"match finds; model {model[:80]!r} names none, and the system prompt {fits}",
            code="agent_not_found",
        )
    return matching[0]


def client_environment(base_url: str, api_key: str) -> dict[str, str]:
    """Return the environment variables of the official clients for a `base_url` that ends with `/v1`."""
    variables: dict[str, str] = {}
    for _, dialect in DIALECTS.items():
        url, key = dialect.variables
        variables |= {url: base_url.removesuffix("/v1") if dialect.client_adds_version else base_url, key: api_key}
    return variables


def _parents(request: Request, session: Session | None) -> tuple[int, ...] | None:
    """Return the parents from the ids of answers; None if the header is missing.

    Ids with a comma, or with characters that no header can have, are percent-encoded.
    """
    if (header := request.headers.get(PARENTS_HEADER)) is None:
        return None
    index_of = {} if session is None else {step.id: step.index for step in list(session.recorder.trajectory.steps)}
    ids = [id if id in index_of else unquote(id) for part in header.split(",") if (id := part.strip())]
    if unknown := [id for id in ids if id not in index_of]:
        raise RefusedError(400, f"{PARENTS_HEADER}: no answer of this trajectory has the id {unknown[0][:80]!r}")
    return tuple(sorted({index_of[id] for id in ids}))


def _tokens(client: PolicyView | ChatClient, reply: Reply) -> list[dict[str, Any]]:
    """Return tokens and log-probs of a reply, in the format of chat completions."""
    if isinstance(client, ChatClient):
        return []
    step = reply.step
    texts = pieces(client.decode, step.response_ids)
    return [
        # The bytes of an incomplete character are unknown.
        {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for begin, end in step.info.get("turns", [(0, len(texts))])  # the tokens between turns are the tools'
        for text, logprob in zip(texts[begin:end], reply.logprobs[begin:end], strict=True)
    ]


def _as_refused(error: Exception) -> RefusedError:
    match error:
        case RefusedError():
            return error
        case PromptTooLong():
            return RefusedError(400, str(error), code="context_length_exceeded", param="messages")
        case InputError() | ValueError():
            return RefusedError(400, first_line(error))
        case EndpointError():
            return RefusedError(502, first_line(error), again=False)  # the endpoint's retries are used up
    return RefusedError(500, f"{type(error).__name__}: {first_line(error)}", again=False)


_HERE = (
    f"expected POST /t/NAME/v1 + {', '.join(dialect.path for _, dialect in DIALECTS.items())}, or GET /t/NAME/v1/models"
)
_UNREAD = (401, 404, 405, 408, 413, 421, 429)
"""Statuses of refusals that come before the body has been read to its end."""


def _dialect(request: Request) -> Dialect:
    """Return the dialect of a request's errors: by its path, or by a header that one official client sends."""
    path = request.scope["path"].rstrip("/")  # the URL may hold an invalid host
    by_path = (dialect for _, dialect in DIALECTS.items() if path.endswith(dialect.path))
    other = "anthropic_messages" if "anthropic-version" in request.headers else "openai_chat"
    return next(by_path, DIALECTS[other])


def _refusal(refused: RefusedError, request: Request) -> Response:
    # The rest of an unread request must not be parsed as the next one.
    headers = {"connection": "close"} if refused.status in _UNREAD else {}
    if refused.again is not None:
        headers["x-should-retry"] = json.dumps(refused.again)
    return JSONResponse(_dialect(request).error(refused), status_code=refused.status, headers=headers)


async def _unknown_route(request: Request, error: Exception) -> Response:
    status, path = getattr(error, "status_code", 404), request.scope["path"]
    expected = "expected POST /t/NAME/end" if path.endswith("/end") else _HERE
    return _refusal(RefusedError(status, f"{request.method} {path[:200]}: {expected}"), request)


async def _disconnected(request: Request) -> None:
    """Return when the client has disconnected; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError:  # the loop is closed, and its rollout has ended
        coroutine.close()
        raise RefusedError(410, "the rollout has ended", code="trajectory_ended") from None


_PROCESS_SERVER: list[OpenAIServer] = []
_STARTING = threading.Lock()


def open_session(recorder: Recorder, loop: asyncio.AbstractEventLoop) -> Session:
    """Let clients call a rollout of this process. The first call starts the server, which then stays."""
    with _STARTING:
        if not _PROCESS_SERVER:
            _PROCESS_SERVER.append(OpenAIServer().start())
            if is_proxied(_HOST):
                warnings.warn(
                    "HTTP_PROXY is set and NO_PROXY does not name 127.0.0.1: clients of team.base_url call the proxy, "
                    "which cannot reach this process and reads prompts and keys. Set NO_PROXY=127.0.0.1,localhost",
                    stacklevel=2,
                )
    return _PROCESS_SERVER[0].open(recorder, loop)
