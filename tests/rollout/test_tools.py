"""Tools: their schemas, the result of a call, and calls in a step."""

import asyncio
import functools
import json
import re
import threading
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditflow._utils.huggingface import load_tokenizer
from creditflow.data import TrajectoryBatch
from creditflow.engines.local.policy import Policy
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.errors import ConfigError
from creditflow.rollout import AgentSpec, Generation, Scheduler, chat
from creditflow.rollout.chat import ChatTokenizer, ToolCall, opens_thought, parse_tool_calls
from creditflow.rollout.recorder import AgentCall, Sampling
from creditflow.rollout.toolbox import calculator, inline
from creditflow.rollout.tools import Tool, call_tool, shortened
from tests.builders import Replies, run_team
from tests.rollout.test_chat_tokenizer import KNOWS_NONE, with_tokens

# Schemas and calls


def weather(city: str, days: int = 1, *, exact: bool = False) -> dict:
    """The weather to come.

    Args:
        city: Its name, in English.
        days: How far ahead.
    """
    return {"city": city, "days": days, "exact": exact}


class Greeter:
    """A callable object with a greeting."""

    def __call__(self, name: str) -> str:
        """Greets a person."""
        return name


class Silent(Greeter):
    """A callable object without a documented call."""

    def __call__(self, name: str) -> str:
        return name


@pytest.mark.parametrize(
    ("function", "described"),
    [
        (weather, "The weather to come."),
        (functools.partial(weather, exact=True), "The weather to come."),
        (Greeter(), "Greets a person."),
        (Silent(), "A callable object without a documented call."),
        (lambda name: name, ""),
    ],
)
def test_tool_description_comes_from_the_call_docstring(function, described):
    assert Tool.from_function(function, name="tool").description == described


def called(tool: Tool, state=None, **arguments):
    return asyncio.run(tool(arguments, {} if state is None else state))


def test_schema_comes_from_signature_and_docstring():
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name, in English."},
            "days": {"type": "integer", "default": 1, "description": "How far ahead."},
            "exact": {"type": "boolean", "default": False},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    function = {"name": "weather", "description": "The weather to come.", "parameters": parameters}
    assert Tool.from_function(weather).schema == {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("function", "left", "arguments"),
    [
        (functools.partial(weather, exact=True), ["city", "days"], ("Ulm", 3, True)),
        (functools.partial(functools.partial(weather, exact=True), days=3), ["city"], ("Ulm", 3, True)),
        (functools.partial(weather, "Ulm"), ["days", "exact"], ("Ulm", 3, False)),
    ],
)
def test_partial_schema_keeps_the_unbound_parameters(function, left, arguments):
    tool, whole = Tool.from_function(function), Tool.from_function(weather)
    assert tool.name == "weather"
    assert tool.parameters["properties"] == {name: whole.parameters["properties"][name] for name in left}
    given = {name: value for name, value in {"city": "Ulm", "days": "3"}.items() if name in left}
    assert tuple(json.loads(called(tool, **given).text).values()) == arguments
    assert called(tool, **given, **dict.fromkeys({"city", "exact"} - set(left), "x")).status == "error"


def test_partial_of_an_inline_tool_stays_inline_with_its_state():
    @inline
    def note(text: str, prefix: str, state: dict) -> str:
        return threading.current_thread().name + prefix + text + str(state)

    own = functools.partial(note, prefix=":", state={"mine": 1})
    assert called(Tool.from_function(own), {"the trajectory's": 2}, text="a").text == "MainThread:a{'mine': 1}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({}, "city: Field required"), ({"city": "Ulm", "days": "two"}, "days: .*integer"), ({"city": "U", "x": 1}, "x: ")],
)
def test_invalid_arguments_give_an_error_result(arguments, said):
    result = called(Tool.from_function(weather), **arguments)
    assert result.status == "error"
    assert re.match(f"error: {said}", result.text)


@dataclass
class Unit:
    """Looks up its sign when it is created."""

    name: str

    def __post_init__(self) -> None:
        self.sign = {"celsius": "C", "kelvin": "K"}[self.name]


def test_error_of_an_argument_type_is_a_result():
    def temperature(unit: Unit) -> str:
        return f"20 {unit.sign}"

    tool = Tool.from_function(temperature)
    assert called(tool, unit={"name": "celsius"}).text == "20 C"
    result = called(tool, unit={"name": "furlong"})
    assert (result.status, result.text) == ("error", "error: KeyError: 'furlong'")


def test_timeout_of_a_plain_function_is_a_result():
    def stuck() -> None:
        threading.Event().wait()

    result = called(Tool.from_function(stuck, timeout=0.05))
    assert (result.status, result.text) == ("timeout", "error: stuck took longer than 0.05 s")


async def forecast(city: str, seconds: float = 0.0) -> str:
    await asyncio.sleep(seconds)
    return f"rain in {city}"


def handed_on(city: str, seconds: float = 0.0):
    return forecast(city, seconds)


@inline
async def at_once(city: str, seconds: float = 0.0) -> str:
    return await forecast(city, seconds)


@functools.wraps(forecast)
def wrapped(*args, **kwargs):
    return forecast(*args, **kwargs)


@pytest.mark.parametrize("function", [forecast, handed_on, at_once, wrapped])
def test_returned_awaitable_is_awaited(function):
    result = called(Tool.from_function(function, name="forecast", timeout=60), city="Ulm")
    assert (result.status, result.text) == ("ok", "rain in Ulm")
    late = called(Tool.from_function(function, name="forecast", timeout=0.2), city="Ulm", seconds=3600)
    assert (late.status, late.text) == ("timeout", "error: forecast took longer than 0.2 s")


def raises(error: BaseException):
    def fails() -> str:
        raise error

    return fails


async def leaves() -> str:
    raise SystemExit(3)


def counted():
    yield 1


async def counted_later():
    yield 1


async def waits_for_a_cancelled_task() -> None:
    task = asyncio.create_task(asyncio.sleep(3600))
    task.cancel()
    await task


NO_TEXT = "error: TypeError: expected the result to be a text, number, list or dict, got"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raises(KeyError("x")), "error: KeyError: 'x'"),
        (raises(TimeoutError("the server did not answer")), "error: TimeoutError: the server did not answer"),
        (raises(SystemExit(3)), "error: RuntimeError: raised SystemExit"),
        (leaves, "error: SystemExit: 3"),
        (waits_for_a_cancelled_task, "error: CancelledError: CancelledError"),
        (
            inline(raises(BaseExceptionGroup("both", [SystemExit(3), KeyError("x")]))),
            "error: BaseExceptionGroup: both (2 sub-exceptions)",
        ),
        (counted, f"{NO_TEXT} a generator"),
        (counted_later, f"{NO_TEXT} a async_generator"),
        (lambda: {"rows": map(str, [1])}, f"{NO_TEXT} a map"),
        (lambda: object(), f"{NO_TEXT} a object"),  # noqa: PLW0108
        (lambda: len, f"{NO_TEXT} a builtin_function_or_method"),
    ],
)
def test_error_of_a_tool_is_a_result(function, text):
    result = called(Tool.from_function(function, name="f"))
    assert (result.status, result.text) == ("error", text)


def test_tool_is_cancelled_with_its_caller():
    async def main():
        calling = asyncio.create_task(Tool.from_function(forecast)({"city": "Ulm", "seconds": 3600}, {}))
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling

    asyncio.run(main())


def test_recipe_arguments_and_state_are_hidden_from_agents():
    def note(text: str, prefix: str, state: dict) -> str:
        state["seen"] = prefix + text
        return "noted"

    tool, state = Tool.from_function(note, args={"prefix": ">"}), {}
    assert list(tool.parameters["properties"]) == ["text"]
    assert called(tool, state, text="a").text == "noted"
    assert state == {"seen": ">a"}
    assert called(tool, text="a", prefix="mine").status == "error"


def opens(path: str, file: typing.IO | None = None) -> str:
    return ""


def maps(start: object, step: Callable[[int], int]) -> int:
    return 0


def misspelt(city: str, when: "NoSuchType") -> str:  # noqa: F821
    return city


def elsewhere(city: str) -> "asyncio.NoSuchType":
    return city


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda *numbers: 0, {"name": "f"}, "parameters that have names"),
        (weather, {"args": {"cty": "Ulm"}}, r"has no parameter 'cty' \(did you mean 'city'"),
        (weather, {"name": "the weather"}, "expected a name of 1 to 64"),
        (opens, {}, "tool opens: file: expected a type that JSON can say, got .*IO"),
        (maps, {}, r"tool maps: step: expected a type that JSON can say, got .*Callable\[\[int\], int\]"),
        (misspelt, {}, "tool misspelt: name 'NoSuchType' is not defined"),
        (elsewhere, {}, "tool elsewhere: module 'asyncio' has no attribute 'NoSuchType'"),
    ],
)
def test_invalid_tool_is_refused(function, options, message):
    with pytest.raises(ConfigError, match=message):
        Tool.from_function(function, **options)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (b"\xc3\xa9\xff", "\u00e9\ufffd"),
        ({"x": bytearray(b"a")}, '{"x": "a"}'),
        (Path("a"), '"a"'),
        ({"x": "\ud800"}, '{"x": "?"}'),
    ],
)
def test_bytes_become_text_and_objects_their_str(result, text):
    assert called(Tool.from_function(lambda: result, name="f")).text == text


F, G = '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "g"}</tool_call>'
END = '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>'
THOUGHT = f"<think>so {G} then</think>"
TAGS = [
    ("<thinking>", "</thinking>"),
    ("<Thought>", "</thought>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
]
MALFORMED = [
    "{'name': 'f'}",
    '["f"]',
    '{"name": "f", "arguments": {"x": NaN}}',
    '{"name": "f", "arguments": {"x": [-1e999]}}',
    '{"name": "", "arguments": {"x": 1}}',
    '{"name": null}',
    '{"arguments": {"x": 1}}',
    f'{{"name": "f", "arguments": {"[" * 99 + "]" * 99}}}',
]
WITH_ARGUMENTS = [
    ('"arguments": {"x": 1}', {"x": 1}),
    ('"parameters": {"x": 1}', {"x": 1}),
    ('"arguments": "{\\"x\\": 2}"', {"x": 2}),
    ('"arguments": {"x": "\\ud800"}', {"x": "?"}),
    ('"arguments": null', {}),
    ('"arguments": ""', {}),
    ('"arguments": 0', None),
    ('"arguments": [1]', None),
    ('"arguments": "{\\"x\\": 1e999}"', None),
]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        (f"a {F} b", "a  b", [("f", {})]),
        *[
            (f'<tool_call>\n{{"name": "f", {given}}}\n</tool_call>', "", [("f", read)])
            for given, read in WITH_ARGUMENTS
        ],
        *[(f"<tool_call>{body}</tool_call>", "", [("", None)]) for body in MALFORMED],
        (f"<tool_call>{'[' * 9999}", "", [("", None)]),
        ('<tool_call>{"name": "f"', "", [("", None)]),
        # A call ends where its JSON ends
        (END, "", [("f", {"x": "</tool_call>"})]),
        ('<tool_call>{"name": "f"}\n{"name": "g"}</tool_call> b', "b", [("f", {}), ("g", {})]),
        (f'<tool_call>{{"name": "f"}}\n{G}', "", [("f", {}), ("g", {})]),
        ('<tool_call>{"name": "f"}\nIt is warm.', "It is warm.", [("f", {})]),
        (f'<tool_call>{{"name": "f",{G}', "", [("", None), ("g", {})]),
        (f"I write <tool_call> first. {G}", "I write <tool_call> first.", [("g", {})]),
        ("I write <tool_call> tags", "I write", [("", None)]),
        # Thoughts
        (f"{THOUGHT}\n{F}", THOUGHT, [("f", {})]),
        (f"<think>the <tool_call> tag</think>{F}", "<think>the <tool_call> tag</think>", [("f", {})]),
        (f"{THOUGHT} 5.", f"{THOUGHT} 5.", []),
        (f"\n<think>so {G}", f"\n<think>so {G}", []),
        (f"I use <think>. {F}", "I use <think>.", [("f", {})]),
        (END.replace("</tool_call>", "<think>", 1), "", [("f", {"x": "<think>"})]),
        (f"<think></think>{F}</think>", "<think></think></think>", [("f", {})]),
        *[(f"{begin}a {G}{end}{F}", f"{begin}a {G}{end}", [("f", {})]) for begin, end in TAGS],
    ],
)
def test_calls_end_with_their_json_and_thoughts_are_skipped(text, content, calls):
    left, parsed = parse_tool_calls(text)
    assert left == content
    assert [(call.name, call.arguments) for call in parsed] == calls


def test_call_without_a_name_gets_the_format_as_an_error():
    (call,) = parse_tool_calls('<tool_call>{"name": null}</tool_call>')[1]
    result = asyncio.run(call_tool({"weather": Tool.from_function(weather)}, call, {}))
    assert (result.name, result.text) == ("", 'error: expected {"name": ..., "arguments": {...}}')


@given(st.text(alphabet=st.sampled_from('<>/tool_call{}"[]: ,naemrgus1\\\n'), max_size=200))
def test_any_text_parses(text):
    content, calls = parse_tool_calls(f"<tool_call>{text}")
    assert isinstance(content, str)
    assert all((call.arguments is None) == bool(call.error) for call in calls)
    assert all(call.name for call in calls if call.arguments is not None)


@given(st.text(max_size=100), st.integers(0, 60))
def test_long_result_is_cut_in_its_middle(text, most):
    short = shortened(text, max(most, 5))
    assert len(short) <= max(most, 5)
    assert short == text or "..." in short


# Chat templates

HERMES = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m['role'] == 'tool' else m['role'] }}|>"
    "{% if m['role'] == 'tool' %}<tool_response>{{ m['content'] }}</tool_response>"
    "{% else %}{{ m['content'] }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [{"role": "user", "content": "how warm?"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


def chat_tokenizer(template: str | None = None) -> ChatTokenizer:
    tokenizer = load_tokenizer(tiny_byte_model(), "path")
    if template is not None:
        tokenizer.chat_template = template or None
    return ChatTokenizer(tokenizer)


@pytest.mark.parametrize("template", [None, HERMES, ""])
def test_follow_matches_the_template_of_the_whole_talk(template):
    """After the sampled response, the tokens equal those of the whole conversation, rendered at once."""
    chat = chat_tokenizer(template)
    result = {"role": "tool", "content": "21 C"}
    _, prompt_ids = chat.encode(TALK)
    response_ids = tuple(chat.tokenizer(CALL)["input_ids"]) + ((chat.tokenizer.eos_token_id,) if template != "" else ())
    _, whole = chat.encode([*TALK, {"role": "assistant", "content": CALL}, result])
    glue = chat.tokenizer("\n")["input_ids"] if template == "" else []
    assert (*prompt_ids, *glue, *response_ids, *chat.follow([result])) == (*whole, *glue)


def test_template_without_tools_gets_calls_as_text():
    messages = [
        {"role": "system", "content": "Be brief."},
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": [ToolCall("weather", {"city": "Ulm"}).to_message("c1")]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "21 C"}]},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    ]
    text, _ = chat_tokenizer().encode(messages, [Tool.from_function(weather).schema])
    assert text.startswith("<|system|>Be brief.\n\nYou may call functions.")
    assert '"name": "weather", "description"' in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>' in text
    responses = "<tool_response>\n21 C\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    assert f"<|user|>{responses}<|end|>" in text


# In a step


class Scripted(Replies):
    """Returns one line after the other."""

    version, max_positions = 2, 10_000

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        super().__init__(lambda prompt: self.lines.pop(0))


def test_thought_opened_by_the_prompt_hides_calls():
    assert opens_thought("<|assistant|><think>\n")
    assert not opens_thought("<|assistant|><think>\n\n</think>\n\n")
    assert parse_tool_calls(f"so {G}", in_thought=True) == (f"so {G}", [])
    expected = (f"so {G}</think>\n</think>", [ToolCall("f", {})])
    assert parse_tool_calls(f"so {G}</think>\n{F}</think>", in_thought=True) == expected


@pytest.mark.parametrize(
    "unit",
    ["<think>", "</think>", "<tool_call>", '<tool_call>{"', '<tool_call>{"a":"', '<tool_call>{"a":[', "<tool_call>["],
)
def test_many_tags_are_searched_once(unit, monkeypatch):
    """Counts the characters that the JSON decoder reads, because no test measures time."""
    text, read = unit * 2000, []

    class Counting(json.JSONDecoder):
        def raw_decode(self, text, idx=0):
            try:
                value, end = super().raw_decode(text, idx)
            except json.JSONDecodeError as error:
                read.append(error.pos - idx)
                raise
            read.append(end - idx)
            return value, end

    monkeypatch.setattr(chat, "_EXTENT", Counting(strict=False, parse_int=len, parse_float=len, parse_constant=len))
    parse_tool_calls(f"<tool_call>{text}")
    assert sum(read) <= 2 * len(text)


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@inline
def store(key: str, value: str, state: dict) -> str:
    state[key] = value
    return f"stored {key}"


@inline
def recall(key: str, state: dict) -> str:
    return state[key]


def run_workflow(client, *functions, sampling=None, workflow=None, temperature=1.0):
    async def solve(task, team):
        return await team.a("go", temperature=temperature)

    agents = {name: AgentSpec(tools=tuple(map(Tool.from_function, functions))) for name in "ab"}
    return run_team(workflow or solve, agents, Scheduler({"default": client}), sampling=sampling)[0]


def test_call_cut_by_a_stop_text_is_not_made():
    """The text after a stop was never sampled, so no call can follow."""
    response = call("calculator", expression="6 * 7")

    async def solve(task, team):
        request = AgentCall("a", [{"role": "user", "content": "go"}], stop=("</tool_call>",))
        return await team._recorder.ask(request)

    trajectory = run_workflow(Scripted(response), calculator, workflow=solve)
    (step,) = trajectory.steps
    assert trajectory.answer == response.removesuffix("</tool_call>")
    assert (step.response_ids, step.info) == (tuple(map(ord, response)), {})


def test_calls_and_results_form_one_step_with_a_masked_result():
    asked, answer = call("calculator", expression="6 * 7"), "It is 42."
    client = Scripted(asked, answer)
    trajectory = run_workflow(client, calculator)
    (step,) = trajectory.steps
    told = "[42]"
    assert step.response == asked + told + answer
    assert (trajectory.status, trajectory.answer) == ("ok", answer)
    assert step.response_mask == (1,) * len(asked) + (0,) * len(told) + (1,) * len(answer)
    assert step.logprobs[len(asked) : len(asked) + len(told)] == (0.0,) * len(told)
    assert step.logprobs[-1] == 0.5 - len(answer)
    assert step.info["tool_calls"] == [
        {"name": "calculator", "arguments": {"expression": "6 * 7"}, "status": "ok", "result": "42"}
    ]
    first, second = client.requests
    assert second.prompt_ids == first.prompt_ids + step.response_ids[: len(asked) + len(told)]
    assert second.seed != first.seed


def test_step_records_the_versions_of_its_tokens():
    class Updated(Scripted):
        """Is updated in the middle of its first turn, and again before its second one."""

        def generate(self, requests):
            versions = {2: (3, ((0, 3), (5, 4))), 1: (5, ())}[len(self.lines)]
            (generation,) = super().generate(requests)
            return [replace(generation, version=versions[0], version_spans=versions[1])]

    asked = call("calculator", expression="6 * 7")
    trajectory = run_workflow(Updated(asked, "It is 42."), calculator)
    assert trajectory.steps[0].policy_version == 3
    assert trajectory.steps[0].version_spans == ((0, 3), (5, 4), (len(asked) + len("[42]"), 5))
    TrajectoryBatch.from_trajectories([trajectory])  # checks the spans


def test_failing_tool_does_not_end_the_rollout():
    client = Scripted(call("calculator", expression="1 / 0"), call("calculater"), "<tool_call>{", "I give up.")
    trajectory = run_workflow(client, calculator)
    assert (trajectory.status, trajectory.answer) == ("ok", "I give up.")
    calls = trajectory.steps[0].info["tool_calls"]
    results = [record["result"] for record in calls]
    assert results[:2] == [
        "error: ZeroDivisionError: division by zero",
        "error: no tool 'calculater'; there is calculator (did you mean 'calculator'?)",
    ]
    assert results[2].startswith("error: the call is no JSON")
    assert [record["status"] for record in calls] == ["error"] * 3


def test_turns_parallel_calls_and_result_length_are_bounded():
    two = call("calculator", expression="1 + 1")
    client = Scripted(two + two, two, "never said")
    made = run_workflow(client, calculator, sampling=Sampling(max_assistant_turns=2, max_parallel_calls=1))
    assert [one["result"] for one in made.steps[0].info["tool_calls"]] == [
        "2",
        "error: not called: at most 1 calls at a time",
    ]  # no call is made after the last turn
    assert client.lines == ["never said"]
    assert made.answer == two
    long = Scripted(call("store", key="k", value="v" * 300), call("recall", key="k"), "ok")
    made = run_workflow(long, store, recall, sampling=Sampling(max_tokens=3000, max_tool_response_length=50))
    assert len(made.steps[0].info["tool_calls"][1]["result"]) == 50


@pytest.mark.parametrize(("room", "made"), [(3, True), (-12, False)])
def test_step_without_room_to_answer_is_truncated(room, made):
    response = call("calculator", expression="1 + 1")
    sampling = Sampling(max_tokens=len(response) + room)
    trajectory = run_workflow(Scripted(response, "x"), calculator, sampling=sampling)
    (step,) = trajectory.steps
    assert trajectory.status == "truncated"
    assert step.response == response[: len(response) + min(room, 0)]
    assert ("tool_calls" in step.info) == made


def test_store_is_shared_within_a_rollout_only():
    async def solve(task, team):
        await team.a("keep")
        return await team.b("give")

    lines = (call("store", key="k", value="v"), "kept", call("recall", key="k"), "given")
    made = run_workflow(Scripted(*lines), store, recall, workflow=solve)
    assert made.steps[1].info["tool_calls"][0]["result"] == "v"
    another = run_workflow(Scripted(call("recall", key="k"), "none"), recall)
    assert "KeyError" in another.steps[0].info["tool_calls"][0]["result"]


@pytest.mark.parametrize("template", [HERMES, KNOWS_NONE])
def test_log_probs_after_a_result_match_one_forward_pass(template):
    """With a real model: log-probs of both turns equal those of one pass over the whole sequence."""
    policy = Policy.load(tiny_byte_model(), torch.device("cpu"))
    tokenizer, generate = with_tokens(template, []), policy.generate
    policy.chat_tokenizer = ChatTokenizer(tokenizer)
    asked = call("calculator", expression="2")

    def first_calls(requests):
        policy.generate = generate
        ids = (*tokenizer(asked)["input_ids"], tokenizer.eos_token_id)
        return [Generation(ids, (-1.0,) * len(ids), "stop")]

    policy.generate = first_calls  # type: ignore[method-assign]
    sampling = Sampling(max_tokens=400, max_prompt_tokens=2000)
    (step,) = run_workflow(policy, calculator, sampling=sampling).steps
    assert [called["result"] for called in step.info["tool_calls"]] == ["2"]
    assert step.response.startswith(asked)
    begin, _ = step.info["turns"][1]
    ids = torch.tensor([[*step.prompt_ids, *step.response_ids]])
    with torch.no_grad():
        logprobs = torch.log_softmax(policy.model(ids).logits[0].double(), dim=-1)
    at = len(step.prompt_ids) + begin
    expected = [float(logprobs[at + i - 1, token]) for i, token in enumerate(step.response_ids[begin:])]
    assert list(step.logprobs[begin:]) == pytest.approx(expected, abs=1e-4)


class Thinking(Scripted):
    """Opens a thought at the end of each prompt."""

    def encode(self, prompt, tools=()):
        text, _ = super().encode(prompt, tools)
        return f"{text}<think>\n", tuple(map(ord, f"{text}<think>\n"))

    def follow(self, messages, prompt):
        return (*super().follow(messages, prompt), *map(ord, "<think>\n"))


@pytest.mark.parametrize("kind", [Scripted, Thinking])
def test_call_inside_a_thought_is_not_made(kind):
    opening = "" if kind is Thinking else "<think>"
    draft = f"{opening}maybe {call('store', key='a', value='draft')}</think>"
    client = kind(f"{draft}{call('store', key='a', value='real')}", f"{draft}done")
    (step,) = run_workflow(client, store).steps
    assert [one["arguments"]["value"] for one in step.info["tool_calls"]] == ["real"]
