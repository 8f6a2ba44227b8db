"""Records what tracing SDKs send or store, for the tests of their exports: `python record.py NAME`.

Two agents, a solver and a checker, work on two tasks; the second answer is wrong. Each solver's call has the score
`right`, each trajectory the score `outcome`, where the SDK has scores. The model is a loopback server with scripted
responses. The SDK sends to a second loopback server, which keeps the requests. Each NAME needs these packages:

| NAME | packages |
| --- | --- |
| langfuse | langfuse 5.0.4, openai 2.54.0 |
| langsmith, langsmith_otel | langsmith 0.15.1, openai 2.54.0, opentelemetry-exporter-otlp-proto-http 1.45.1 |
| langsmith_langgraph | langsmith 0.15.1, langgraph 1.2.24, langchain-openai 1.7.4 |
| agent_lightning_1 | agentlightning 1.0.2, under Python 3.12 |
| phoenix | arize-phoenix 20.26.1, openinference-instrumentation-openai 0.1.66 |
| mlflow, mlflow_otlp | mlflow 3.17.2, openai 3.57.0, opentelemetry-exporter-otlp-proto-http 1.45.2 |
| strands | strands-agents 1.62.0 with the extras `openai` and `otel` |

`record_vercel.mjs` records Vercel's AI SDK; `python record.py vercel` starts it with both servers.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import platform
import re
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).parent
TASKS = {"What is 3 + 4?": ("3 + 4 makes 7.", "Right: 7."), "What is 5 + 6?": ("5 + 6 makes 12.", "Wrong: not 12.")}
"""Task to the responses of the solver and of the checker."""
SYSTEM = {"solver": "You are the solver.", "checker": "You are the checker."}


def right(answer: str) -> float:
    return float(answer == "3 + 4 makes 7.")


# ---- servers -------------------------------------------------------------------------------------------------------


class Rote(BaseHTTPRequestHandler):
    """A model of scripted responses, behind OpenAI's API for chat; it streams on request."""

    answered = 0

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        texts = json.dumps(request["messages"])
        answers = next(said for task, said in TASKS.items() if task in texts)
        Rote.answered += 1
        common = {"id": f"chatcmpl-{Rote.answered}", "created": 1_750_000_000, "model": request["model"]}
        message = {"role": "assistant", "content": answers[SYSTEM["checker"] in texts]}
        usage = {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}
        if request.get("stream"):
            chunks: list[dict[str, Any]] = [
                {"choices": [{"index": 0, "delta": message, "finish_reason": None}]},
                {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
                {"choices": [], "usage": usage},
            ]
            events = [json.dumps({**common, "object": "chat.completion.chunk", **one}) for one in chunks]
            answer(self, "".join(f"data: {one}\n\n" for one in [*events, "[DONE]"]), "text/event-stream")
            return
        choices: list[dict[str, Any]] = [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]
        if request.get("return_token_ids"):  # as vLLM does; here each word is a token
            ids = [len(word) for word in str(message["content"]).split()]
            content = [{"token": str(id), "logprob": -id / 10, "bytes": None, "top_logprobs": []} for id in ids]
            choices[0] |= {"token_ids": ids, "logprobs": {"content": content}}
            common["prompt_token_ids"] = [len(word) for word in texts.split()]
        answer(self, json.dumps({**common, "object": "chat.completion", "choices": choices, "usage": usage}))

    def log_message(self, *_: Any) -> None: ...


def answer(handler: BaseHTTPRequestHandler, text: str, form: str = "application/json", status: int = 200) -> None:
    data = text.encode()
    handler.send_response(status)
    handler.send_header("Content-Type", form)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@dataclass
class Request:
    """A request that an SDK made."""

    path: str
    form: str
    body: bytes


class Sink(BaseHTTPRequestHandler):
    """A server that keeps every request and accepts it."""

    requests: ClassVar[list[Request]] = []

    def do_POST(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        match self.headers.get("Content-Encoding"):
            case "gzip":
                body = gzip.decompress(body)
            case "deflate":
                body = zlib.decompress(body)
        Sink.requests.append(Request(self.path, self.headers.get("Content-Type") or "", body))
        answer(self, '{"message": "Accepted"}' if self.path.endswith("/scores") else "{}")

    do_PATCH = do_PUT = do_POST

    def do_GET(self) -> None:
        # LangSmith's client reads the server's abilities; without multipart it posts JSON.
        answer(self, json.dumps({"version": "0.13.0", "batch_ingest_config": _LIMITS}))

    def log_message(self, *_: Any) -> None: ...


_LIMITS = {
    "use_multipart_endpoint": False,
    "size_limit": 100,
    "scale_up_nthreads_limit": 1,
    "scale_up_qsize_trigger": 1000,
    "scale_down_nempty_trigger": 4,
}


def served(handler: type[BaseHTTPRequestHandler]) -> str:
    """Start a loopback server and return its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


# ---- runs ----------------------------------------------------------------------------------------------------------


def messages(agent: str, prompt: str) -> list[Any]:
    return [{"role": "system", "content": SYSTEM[agent]}, {"role": "user", "content": prompt}]


def check(task: str, said: str) -> str:
    """The checker's prompt."""
    return f"{task}\n{said}\nRight?"


def langfuse(model: str, sink: str) -> None:
    """Agents as observations of type `agent`; scores on the generation and on the trace."""
    os.environ |= {"LANGFUSE_PUBLIC_KEY": "pk", "LANGFUSE_SECRET_KEY": "sk", "LANGFUSE_BASE_URL": sink}
    from langfuse import get_client
    from langfuse.openai import OpenAI

    tracer, client = get_client(), OpenAI(base_url=model, api_key="none")

    def ask(agent: str, prompt: str) -> str:
        with tracer.start_as_current_observation(name=agent, as_type="agent", input=prompt) as observation:
            response = client.chat.completions.create(model="rote", messages=messages(agent, prompt), temperature=0.7)
            said = str(response.choices[0].message.content)
            observation.update(output=said)
            if agent == "solver":
                observation.score(name="right", value=right(said), data_type="NUMERIC")
        return said

    for task in TASKS:
        with tracer.start_as_current_observation(name="team", input=task) as root:
            said = ask("solver", task)
            root.update(output=ask("checker", check(task, said)))
            root.score_trace(name="outcome", value=right(said), data_type="BOOLEAN")
            root.score_trace(name="tone", value="dry", data_type="CATEGORICAL")
    tracer.flush()
    tracer.shutdown()
    keep_spans("langfuse")
    keep_json("langfuse_scores", [one for batch in jsons("/api/public/scores") for one in batch])


def _langsmith(model: str, sink: str, mode: str) -> None:
    """Agents as traceable functions; feedback on the solver's run and on the root."""
    os.environ |= {
        "LANGSMITH_TRACING": "true",
        "LANGSMITH_ENDPOINT": sink,
        "LANGSMITH_API_KEY": "none",
        "OTEL_EXPORTER_OTLP_ENDPOINT": sink,
        "LANGSMITH_PROJECT": "recorded",
        "LANGCHAIN_REVISION_ID": "recorded",
    }
    from langsmith import Client, get_current_run_tree, traceable
    from langsmith.wrappers import wrap_openai
    from openai import OpenAI

    client = Client(tracing_mode=mode, omit_traced_runtime_info=True)
    openai = wrap_openai(OpenAI(base_url=model, api_key="none"), tracing_extra={"client": client})

    def ask(agent: str, prompt: str) -> str:
        response = openai.chat.completions.create(model="rote", messages=messages(agent, prompt), temperature=0.7)
        said = str(response.choices[0].message.content)
        if agent == "solver" and mode != "otel":
            score("right", right(said))
        return said

    def score(key: str, value: float) -> None:
        run = get_current_run_tree()
        client.create_feedback(run.id, key=key, score=value, trace_id=run.trace_id)

    solver = traceable(lambda prompt: ask("solver", prompt), name="solver", client=client)
    checker = traceable(lambda prompt: ask("checker", prompt), name="checker", client=client)

    @traceable(client=client)
    def team(task: str) -> str:
        said = solver(task)
        verdict = checker(check(task, said))
        if mode != "otel":
            score("outcome", right(said))
        return str(verdict)

    for task in TASKS:
        team(task)
    client.flush()
    if mode == "otel":
        from opentelemetry import trace

        trace.get_tracer_provider().force_flush()  # type: ignore[attr-defined]


def langsmith(model: str, sink: str) -> None:
    _langsmith(model, sink, "langsmith")
    keep_json("langsmith", [one for batch in jsons("/runs/batch") for key in batch for one in batch[key]])
    keep_json("langsmith_feedback", jsons("/feedback"))


def langsmith_langgraph(model: str, sink: str) -> None:
    """A graph of two LangChain models, traced by LangChain itself."""
    os.environ |= {"LANGSMITH_TRACING": "true", "LANGSMITH_ENDPOINT": sink, "LANGSMITH_API_KEY": "none"}
    os.environ |= {"LANGSMITH_PROJECT": "recorded", "LANGCHAIN_REVISION_ID": "recorded"}
    platform.platform = lambda *_: "recorded"  # LangChain writes it into each run
    from langchain_core.tracers import LangChainTracer
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph
    from langsmith import Client
    from typing_extensions import TypedDict

    class State(TypedDict, total=False):
        task: str
        said: str
        verdict: str

    client, rote = Client(omit_traced_runtime_info=True), ChatOpenAI(model="rote", base_url=model, api_key="none")

    def ask(agent: str, prompt: str) -> str:
        return str(rote.invoke(messages(agent, prompt)).content)

    graph = StateGraph(State)
    graph.add_node("solver", lambda state: {"said": ask("solver", state["task"])})
    graph.add_node("checker", lambda state: {"verdict": ask("checker", check(state["task"], state["said"]))})
    for one, other in ((START, "solver"), ("solver", "checker"), ("checker", END)):
        graph.add_edge(one, other)
    team, tracer = graph.compile(), LangChainTracer(client=client)
    for task in TASKS:
        team.invoke({"task": task}, {"callbacks": [tracer]})
    client.flush()
    keep_json("langsmith_langgraph", [one for batch in jsons("/runs/batch") for key in batch for one in batch[key]])


def langsmith_otel(model: str, sink: str) -> None:
    _langsmith(model, sink, "otel")
    keep_spans("langsmith_otel")  # its spans have no id of a run, so feedback cannot be matched


def strands(model: str, sink: str) -> None:
    """A graph of two Strands agents."""
    os.environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": sink, "OTEL_SEMCONV_STABILITY_OPT_IN": ""}
    from strands import Agent
    from strands.models.openai import OpenAIModel
    from strands.multiagent import GraphBuilder
    from strands.telemetry import StrandsTelemetry

    telemetry = StrandsTelemetry().setup_otlp_exporter()

    def agent(name: str) -> Agent:
        rote = OpenAIModel(client_args={"base_url": model, "api_key": "none"}, model_id="rote")
        return Agent(name=name, model=rote, system_prompt=SYSTEM[name], callback_handler=None)

    for task in TASKS:
        graph = GraphBuilder()
        for name in SYSTEM:
            graph.add_node(agent(name), name)
        graph.add_edge("solver", "checker")
        graph.set_entry_point("solver")
        graph.build()(task)
    telemetry.tracer_provider.force_flush()
    keep_spans("strands")


def phoenix(model: str, sink: str) -> None:
    """A Phoenix server on loopback; its REST API returns the spans and the annotations."""
    import tempfile
    import time
    import urllib.request

    del sink
    with tempfile.TemporaryDirectory() as folder:
        here = {"PHOENIX_WORKING_DIR": folder, "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": "6116"}
        more = {"PHOENIX_GRPC_PORT": "6117", "PHOENIX_TELEMETRY_ENABLED": "false"}
        command = [str(Path(sys.executable).with_name("phoenix")), "serve"]
        server = subprocess.Popen(command, env={**os.environ, **here, **more}, stdout=subprocess.DEVNULL)
        url = "http://127.0.0.1:6116"

        def fetch(path: str) -> Any:
            with urllib.request.urlopen(f"{url}/v1/projects/recorded/{path}") as response:
                return json.loads(response.read())

        try:
            for _ in range(6000):  # its first start takes minutes on a busy machine
                try:
                    urllib.request.urlopen(f"{url}/healthz").close()
                    break
                except OSError:
                    time.sleep(0.2)
            _phoenix_runs(model, url)
            for _ in range(100):
                spans = fetch("spans?limit=100")
                if len(spans["data"]) == 5 * len(TASKS):
                    break
                time.sleep(0.2)
            keep_json("phoenix", spans)
            of_spans = "&".join(f"span_ids={span['context']['span_id']}" for span in spans["data"])
            keep_json("phoenix_annotations", fetch(f"span_annotations?{of_spans}"))
            of_traces = "&".join(f"trace_ids={one}" for one in {span["context"]["trace_id"] for span in spans["data"]})
            keep_json("phoenix_trace_annotations", fetch(f"trace_annotations?{of_traces}"))
        finally:
            server.terminate()
            server.wait()


def _phoenix_runs(model: str, url: str) -> None:
    from openai import OpenAI
    from openinference.instrumentation.openai import OpenAIInstrumentor
    from phoenix.client import Client
    from phoenix.otel import register

    provider = register(endpoint=f"{url}/v1/traces", project_name="recorded", batch=False, verbose=False)
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    tracer, openai, client = (
        provider.get_tracer("recorded"),
        OpenAI(base_url=model, api_key="none"),
        Client(base_url=url),
    )
    scores: list[tuple[str, str, float]] = []

    def ask(agent: str, prompt: str) -> str:
        with tracer.start_as_current_span(agent, openinference_span_kind="agent") as span:
            response = openai.chat.completions.create(model="rote", messages=messages(agent, prompt), temperature=0.7)
            said = str(response.choices[0].message.content)
        if agent == "solver":
            scores.append(("right", f"{span.get_span_context().span_id:016x}", right(said)))
        return said

    for task in TASKS:
        with tracer.start_as_current_span("team", openinference_span_kind="chain") as span:
            said = ask("solver", task)
            ask("checker", check(task, said))
        scores.append(("outcome", f"{span.get_span_context().trace_id:032x}", right(said)))
    for name, id, score in scores:
        if name == "right":
            client.spans.add_span_annotation(
                span_id=id, annotation_name=name, annotator_kind="CODE", score=score, sync=True
            )
        else:
            client.traces.add_trace_annotation(
                trace_id=id, annotation_name=name, annotator_kind="CODE", score=score, label="checked", sync=True
            )


def mlflow(model: str, sink: str) -> None:
    """Autologged calls in a local store (sqlite); agents are spans of type AGENT, rewards are feedback."""
    del sink
    _mlflow(model, "mlflow")


def mlflow_otlp(model: str, sink: str) -> None:
    """The same, exported over OTLP."""
    os.environ |= {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{sink}/v1/traces"}
    os.environ |= {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    _mlflow(model, "mlflow_otlp")


def _mlflow(model: str, name: str) -> None:
    import tempfile

    os.environ |= {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "LOGNAME": "recorder",
        "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",
    }
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        import mlflow
        from openai import OpenAI

        stored = name == "mlflow"
        if stored:
            mlflow.set_tracking_uri("sqlite:///mlflow.db")
            experiment = mlflow.create_experiment("recorded", artifact_location="mlflow-artifacts:/recorded")
            mlflow.set_experiment(experiment_id=experiment)
        mlflow.openai.autolog()
        openai = OpenAI(base_url=model, api_key="none")

        def ask(agent: str, prompt: str) -> str:
            with mlflow.start_span(name=agent, span_type="AGENT") as span:
                span.set_inputs({"prompt": prompt})
                response = openai.chat.completions.create(
                    model="rote", messages=messages(agent, prompt), temperature=0.7
                )
                said = str(response.choices[0].message.content)
                span.set_outputs(said)
            if agent == "solver":
                scores.append((span.span_id, said))
            return said

        for task in TASKS:
            scores: list[tuple[str, str]] = []
            with mlflow.start_span(name="team") as root:
                said = ask("solver", task)
                ask("checker", check(task, said))
            if stored:
                (span_id, said), trace_id = scores[0], root.trace_id
                mlflow.log_feedback(trace_id=trace_id, span_id=span_id, name="right", value=right(said))
                mlflow.log_feedback(trace_id=trace_id, name="outcome", value=right(said) == 1.0)
                mlflow.log_feedback(trace_id=trace_id, name="tone", value="dry")
        mlflow.flush_trace_async_logging()
        if stored:
            traces = mlflow.search_traces(locations=[experiment], return_type="list")
            keep_json(name, [trace.to_dict() for trace in traces])
        else:
            from mlflow.tracing.provider import provider

            provider.get().force_flush()

            keep_spans(name)
        os.chdir("/")


def agent_lightning_1(model: str, sink: str) -> None:
    """Agent Lightning's gateway on loopback; its API returns the events of each rollout."""
    import time
    import urllib.request

    import uvicorn
    from agentlightning.server.app import create_app

    del sink
    proxy = {"model_name": "rote", "train": {"temperature": 0.7}, "val": {"temperature": 0.0}}
    server = uvicorn.Server(
        uvicorn.Config(create_app({"key": "", "default_proxy": proxy}), port=6118, log_level="error")
    )
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.1)

    def call(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:6118{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return json.loads(response.read())

    call("/api/models", [{"model": "rote", "endpoint": model}])
    rollouts = call(
        "/api/rollouts", [{"input": {"question": task}, "rollout_id": str(i)} for i, task in enumerate(TASKS)]
    )
    events: list[Any] = []
    for task, rollout in zip(TASKS, rollouts, strict=True):
        id = rollout["rollout_id"]
        said = ""
        for agent in SYSTEM:
            prompt = task if agent == "solver" else check(task, said)
            chat = f"/proxy/rollout/{id}/attempt/0/mode/train/openai/v1/chat/completions"
            response = call(chat, {"model": "any", "messages": messages(agent, prompt)})
            if agent == "solver":
                said = response["choices"][0]["message"]["content"]
                call(f"/api/rollouts/{id}/attempt/0/events", {"event_type": "reward", "data": {"value": 0.25}})
        call(f"/api/rollouts/{id}/attempt/0/events", {"event_type": "reward", "data": {"value": right(said)}})
        events += call(f"/api/rollouts/{id}/events")
    keep_json("agent_lightning_1", events)
    server.should_exit = True


def vercel(model: str, sink: str) -> None:
    """Vercel's AI SDK, under Node."""
    environment = {**os.environ, "MODEL_URL": model, "OTEL_EXPORTER_OTLP_ENDPOINT": sink}
    subprocess.run(["node", HERE / "record_vercel.mjs"], env=environment, check=True)
    keep_spans("vercel")


# ---- files ---------------------------------------------------------------------------------------------------------


def jsons(path: str) -> list[Any]:
    """The JSON bodies of the requests to a path."""
    return [json.loads(one.body) for one in Sink.requests if one.path.endswith(path)]


def keep_spans(name: str) -> None:
    """Write the spans that the SDK exported over OTLP, as JSON with ids in hexadecimal."""
    groups: list[Any] = []
    for one in Sink.requests:
        if not one.path.endswith("/v1/traces"):
            continue
        if "json" in one.form:
            groups += json.loads(one.body)["resourceSpans"]
            continue
        from google.protobuf.json_format import MessageToDict
        from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

        groups += in_hex(MessageToDict(TracesData.FromString(one.body)))["resourceSpans"]
    keep_json(name, {"resourceSpans": groups})


def in_hex(value: Any) -> Any:
    """Convert ids from base64 (protobuf's JSON) to hexadecimal (OTLP's JSON)."""
    if isinstance(value, list):
        return [in_hex(one) for one in value]
    if isinstance(value, dict):
        ids = ("traceId", "spanId", "parentSpanId")
        return {key: base64.b64decode(one).hex() if key in ids else in_hex(one) for key, one in value.items()}
    return value


def keep_json(name: str, value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    machine = os.uname()
    for word in (machine.nodename, machine.release, str(Path.home()), str(HERE.parents[3]), sys.prefix):
        if re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text):
            raise SystemExit(f"{name}: the recording names this machine: {word!r}")
    (HERE / f"{name}.json").write_text(text)
    print(f"{name}.json: {len(text)} bytes")


RUNS: dict[str, Callable[[str, str], None]] = {
    "langfuse": langfuse,
    "langsmith": langsmith,
    "langsmith_langgraph": langsmith_langgraph,
    "langsmith_otel": langsmith_otel,
    "phoenix": phoenix,
    "mlflow": mlflow,
    "mlflow_otlp": mlflow_otlp,
    "strands": strands,
    "vercel": vercel,
    "agent_lightning_1": agent_lightning_1,
}

if __name__ == "__main__":
    RUNS[sys.argv[1]](f"{served(Rote)}/v1", served(Sink))
