"""Records the spans of real runs of agent frameworks, for the adapter tests: `python record.py [NAME ...]`.

Needs an environment with the `frameworks` extra and the instrumentations named in docs/how_to/traces.md. The model is a
loopback server with scripted responses, so that the recordings can be checked by hand. Writes each run to NAME.json
(OTLP spans and log records), and the spans of one run also to NAME.pb (protobuf).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
os.environ.update(
    OPENAI_API_KEY="none",
    OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT="span_and_event",
    OTEL_SEMCONV_STABILITY_OPT_IN="gen_ai_latest_experimental",
    OTEL_RESOURCE_ATTRIBUTES="service.name=recorded",
)
PLAN = "First add 3 and 4, then double the sum."
FIRST, SECOND = "3 + 4 makes 7.", "Twice 7 makes 14."
VERDICT = "Both parts are right, the answer is 14."


def by_rote(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The scripted response of the model, with one rule per agent of each run."""
    system = next((str(m["content"]) for m in messages if m["role"] == "system"), "")
    last, texts = messages[-1], [str(message["content"]) for message in messages]
    look_up, hand_over = _call("look_up", {"order": "A17"}), _call("transfer_to_refunds", {})
    said: dict[str, dict[str, Any]] = {
        "planner": {"content": PLAN},
        "executor": {"content": FIRST if "part 1" in texts[-1] else SECOND},
        "verifier": {"content": VERDICT},
        "triage": {"content": None, "tool_calls": [hand_over if last["role"] == "tool" else look_up]},
        "refunds": {"content": "The money for order A17 is on its way."},
        "writer": {"content": f"Draft {sum('Draft' in text for text in texts) + 1}: the sea is wide and blue."},
        "critic": {"content": f"Critique {sum('Critique' in text for text in texts) + 1}: say how it smells."},
    }
    return next(message for agent, message in said.items() if agent in system)


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{name}", "type": "function", "function": function}


class Rote(BaseHTTPRequestHandler):
    """A server of scripted chat completions."""

    answered = 0

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = by_rote(request["messages"])
        Rote.answered += 1
        body = {
            "id": f"chatcmpl-{Rote.answered}",
            "object": "chat.completion",
            "created": 1_750_000_000,
            "model": request["model"],
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", **message},
                    "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
                    "logprobs": None,
                }
            ],
            "usage": {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30},
        }
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


def served() -> str:
    """Start a server of scripted responses and return its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Rote)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


def score(name: str, value: float, **more: str) -> None:
    """Record a reward in Agent Lightning's form inside the current span."""
    from opentelemetry import trace

    attributes = {"agentlightning.reward.0.name": name, "agentlightning.reward.0.value": value, **more}
    with trace.get_tracer("recorded").start_as_current_span("agentlightning.annotation", attributes=attributes):
        pass


def langgraph(url: str) -> None:
    """Run planner, executor (twice, each time scored) and verifier; then record the outcome."""
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph
    from typing_extensions import TypedDict

    class State(TypedDict, total=False):
        task: str
        plan: str
        first: str
        second: str
        answer: str

    model = ChatOpenAI(model="rote", base_url=url)

    def ask(agent: str, prompt: str) -> str:
        said = str(model.invoke([SystemMessage(f"You are the {agent}."), HumanMessage(prompt)]).content)
        if agent == "executor":
            score("right", 1.0 if "part 1" in prompt else 0.5)
        return said

    graph = StateGraph(State)
    graph.add_node("planner", lambda state: {"plan": ask("planner", state["task"])})
    graph.add_node("executor", lambda state: {"first": ask("executor", f"Plan: {state['plan']}\nDo part 1.")})
    graph.add_node(
        "executor_again",
        lambda state: {"second": ask("executor", f"Plan: {state['plan']}\nSo far: {state['first']}\nDo part 2.")},
    )
    graph.add_node(
        "verifier", lambda state: {"answer": ask("verifier", f"{state['first']}\n{state['second']}\nRight?")}
    )
    for one, other in [(START, "planner"), ("planner", "executor"), ("executor", "executor_again")]:
        graph.add_edge(one, other)
    graph.add_edge("executor_again", "verifier")
    graph.add_edge("verifier", END)
    graph.compile().invoke({"task": "What is twice the sum of 3 and 4?"})
    score("outcome", 1.0)


def agents_sdk(url: str) -> None:
    """Run a triage agent that calls a scored tool and hands off to a second agent; then record the outcome."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
    from openai import AsyncOpenAI

    model = OpenAIChatCompletionsModel(model="rote", openai_client=AsyncOpenAI(base_url=url))

    @function_tool
    def look_up(order: str) -> str:
        """Return the status of an order."""
        score("found", 0.75)
        return f"Order {order}: paid, sent back."

    refunds = Agent(name="refunds", instructions="You are refunds.", model=model)
    triage = Agent(name="triage", instructions="You are triage.", model=model, tools=[look_up], handoffs=[refunds])
    asyncio.run(Runner.run(triage, "Where is my money for order A17?"))
    score("outcome", 0.0)


def autogen(url: str) -> None:
    """Run writer and critic for two rounds; then score the critic's first reply by its id and record the outcome."""
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_core import SingleThreadedAgentRuntime
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = {"vision": False, "function_calling": True, "json_output": False, "family": "unknown"}
    info["structured_output"] = False
    client = OpenAIChatCompletionClient(model="rote", base_url=url, model_info=info)

    async def run() -> None:
        runtime = SingleThreadedAgentRuntime()
        runtime.start()
        agents = [AssistantAgent(name, client, system_message=f"You are the {name}.") for name in ("writer", "critic")]
        team = RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(5), runtime=runtime)
        await team.run(task="Write a line about the sea.")
        await runtime.stop_when_idle()

    asyncio.run(run())
    by_id = {"key_match": "gen_ai.response.id", "value_match": "chatcmpl-2"}
    score("helpful", 0.25, **{f"agentlightning.link.0.{key}": value for key, value in by_id.items()})
    score("outcome", 1.0)


def _openinference_langchain(provider: Any) -> None:
    from openinference.instrumentation.langchain import LangChainInstrumentor

    LangChainInstrumentor().instrument(tracer_provider=provider)


def _openllmetry_langchain(provider: Any) -> None:
    from opentelemetry.instrumentation.langchain import LangchainInstrumentor

    LangchainInstrumentor().instrument(tracer_provider=provider)


def _openinference_agents(provider: Any) -> None:
    from agents import set_trace_processors
    from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor

    set_trace_processors([])  # disables the upload of traces
    OpenAIAgentsInstrumentor().instrument(tracer_provider=provider)


def _otel_agents(provider: Any) -> None:
    from agents import set_trace_processors
    from opentelemetry.instrumentation.openai_agents import OpenAIAgentsInstrumentor

    set_trace_processors([])
    OpenAIAgentsInstrumentor().instrument(tracer_provider=provider)


def _openinference_openai(provider: Any) -> None:
    from openinference.instrumentation.openai import OpenAIInstrumentor

    OpenAIInstrumentor().instrument(tracer_provider=provider)


def _otel_openai(provider: Any) -> None:
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

    OpenAIInstrumentor().instrument(tracer_provider=provider)


def _otel_openai_in_logs(provider: Any) -> None:
    os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "event_only"
    _otel_openai(provider)


def _otel_openai_in_logs_before(provider: Any) -> None:
    del os.environ["OTEL_SEMCONV_STABILITY_OPT_IN"]
    os.environ["OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"] = "true"
    _otel_openai(provider)


RUNS: dict[str, tuple[Callable[..., None], tuple[Callable[[Any], None], ...]]] = {
    "langgraph_openinference": (langgraph, (_openinference_langchain,)),
    "langgraph_openllmetry": (langgraph, (_openllmetry_langchain,)),
    "langgraph_twice": (langgraph, (_openllmetry_langchain, _otel_openai)),
    "agents_sdk_openinference": (agents_sdk, (_openinference_agents,)),
    "agents_sdk_otel": (agents_sdk, (_otel_agents,)),
    "autogen_openinference": (autogen, (_openinference_openai,)),
    "autogen_otel": (autogen, (_otel_openai,)),
    "autogen_otel_logs": (autogen, (_otel_openai_in_logs,)),
    "autogen_otel_logs_before": (autogen, (_otel_openai_in_logs_before,)),
}


def record(name: str) -> None:
    """Record one run; needs a new process for each."""
    from google.protobuf.json_format import MessageToJson
    from opentelemetry import _logs, trace
    from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    logged, logs = LoggerProvider(), InMemoryLogRecordExporter()
    logged.add_log_record_processor(SimpleLogRecordProcessor(logs))
    _logs.set_logger_provider(logged)
    run, instruments = RUNS[name]
    for instrument in instruments:
        instrument(provider)
    trace.set_tracer_provider(provider)
    with trace.get_tracer("recorded").start_as_current_span("trajectory"):
        run(served())
    message = encode_spans(exporter.get_finished_spans())
    found = json.loads(MessageToJson(message))
    if records := logs.get_finished_logs():
        found |= json.loads(MessageToJson(encode_logs(records)))
    (HERE / f"{name}.json").write_text(json.dumps(_in_hex(found), indent=1) + "\n")
    if name == "langgraph_openinference":
        (HERE / f"{name}.pb").write_bytes(message.SerializeToString())
    print(f"{name}: {len(exporter.get_finished_spans())} spans")


def _in_hex(value: Any) -> Any:
    """Convert ids from base64 (protobuf's JSON) to hexadecimal (OTLP's JSON)."""
    if isinstance(value, list):
        return [_in_hex(one) for one in value]
    if isinstance(value, dict):
        ids = ("traceId", "spanId", "parentSpanId")
        return {key: base64.b64decode(one).hex() if key in ids else _in_hex(one) for key, one in value.items()}
    return value


if __name__ == "__main__":
    names = sys.argv[1:] or list(RUNS)
    if len(names) == 1:
        record(names[0])
    else:
        for one in names:
            os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, one])
