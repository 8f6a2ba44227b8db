"""Tools: Python functions that an agent may call, by the JSON schema of their signature.

    def weather(city: str, days: int = 1) -> str:
        '''The weather to come.

        :param city: Its name, in English.
        '''

Every call of a tool ends with a text for the agent, even after an error. `creditflow.rollout.chat` parses calls, and
`recorder` makes them. pydantic and docstring_parser (extra `tools`) are imported when a tool is
made.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from creditflow._utils.install import needs
from creditflow.errors import ConfigError, did_you_mean, first_line
from creditflow.rollout.chat import ToolCall
from creditflow.rollout.user_code import in_thread, is_callers_end

STATE = "state"
"""A parameter of this name receives the rollout's dict, which all its tools share; agents do not see it."""
TIMEOUT = 30.0
ToolStatus = Literal["ok", "error", "timeout"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call."""

    name: str
    status: ToolStatus
    text: str
    """Text for the agent: the result, or the error."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that agents may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments."""
    function: Callable[..., Any] = field(repr=False)
    check: Callable[[Mapping[str, Any]], dict[str, Any]] = field(repr=False)
    """Converts arguments to the function's types. Raises ValueError that names the error, or any exception of their
    types."""
    timeout: float = TIMEOUT
    """Time limit of one call, in seconds."""
    inline: bool = False
    """Whether the function is called on the event loop: it must be quick, and the timeout covers only its awaits.
    Other functions run in a thread; their calls end later, and the models' calls are batched accordingly."""

    @classmethod
    def from_function(
        cls,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        args: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Tool:
        """Make a tool of `function`: a function, `async` or not, or a callable object.

        Arguments that do not fit its signature or types are refused before the call. The description and those of the
        parameters come from the docstring (Google's, numpy's or Sphinx's form). `args`: arguments that agents do not
        see, like those that a `functools.partial` has bound. Raises ConfigError for a function that cannot be a tool.
        """
        whole = _whole(function)
        called = whole if inspect.isroutine(whole) else type(whole).__call__
        name = name or getattr(whole, "__name__", None) or _snake(type(whole).__name__)
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
            raise ConfigError(f"tool {name!r}: expected a name of 1 to 64 letters, digits, _ or -")
        try:
            text, parameters, check = _read(function, called, name, set(args or ()))
        except (TypeError, ValueError, NameError, AttributeError, SyntaxError) as error:
            raise ConfigError(f"tool {name}: {first_line(error)}") from error
        return cls(
            name=name,
            description=text,
            parameters=parameters,
            function=functools.partial(function, **args) if args else function,
            check=check,
            timeout=TIMEOUT if timeout is None else timeout,
            inline=bool(getattr(function, "inline", False) or getattr(whole, "inline", False)),
        )

    @property
    def schema(self) -> dict[str, Any]:
        """The schema in the format of OpenAI's chat completions and of chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    async def __call__(self, arguments: Mapping[str, Any], state: dict[str, Any]) -> ToolResult:
        """Make one call and return its result, even after an error. It is cancelled with its caller."""
        try:
            checked = self.check(arguments)
        except ValueError as error:
            return ToolResult(self.name, "error", f"error: {error}")
        except BaseException as error:  # a type may raise any exception for an agent's arguments
            if is_callers_end(error):
                raise
            return self._raised(error)
        if STATE in inspect.signature(self.function).parameters and STATE not in _bound(self.function):
            checked[STATE] = state
        call, whole = functools.partial(self.function, **checked), _whole(self.function)
        is_async = inspect.iscoroutinefunction(whole) or inspect.iscoroutinefunction(type(whole).__call__)
        limit = asyncio.timeout(self.timeout)
        try:
            result: Any = call() if self.inline or is_async else in_thread(call)
            async with limit:
                while inspect.isawaitable(result):  # a plain function may return an awaitable
                    result = await result
            return ToolResult(self.name, "ok", as_text(result))
        except BaseException as error:  # the agent receives any error of a tool, and the rollout continues
            if is_callers_end(error):
                raise
            if limit.expired():
                return ToolResult(self.name, "timeout", f"error: {self.name} took longer than {self.timeout:g} s")
            return self._raised(error)

    def _raised(self, error: BaseException) -> ToolResult:
        return ToolResult(self.name, "error", f"error: {type(error).__name__}: {first_line(error)}")


async def call_tool(tools: Mapping[str, Tool], call: ToolCall, state: dict[str, Any]) -> ToolResult:
    """Run a call that an agent wrote. An unknown tool or a malformed call gives an error result."""
    if call.arguments is None:
        return ToolResult(call.name, "error", f"error: {call.error}")
    if call.name not in tools:
        names = f"there is {', '.join(tools)}{did_you_mean(call.name, list(tools))}"
        return ToolResult(call.name, "error", f"error: no tool {call.name[:64]!r}; {names}")
    return await tools[call.name](call.arguments, state)


def as_text(result: object) -> str:
    """Return a tool's result as text for an agent: a text unchanged, any other value as JSON.

    Bytes are read as UTF-8; other objects give their `str`. Raises TypeError for a result without a text: an iterator,
    or an object whose `str` is its address in memory.
    """
    if isinstance(result, bytes | bytearray):
        result = _as_json(result)
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=_as_json)
    return text.encode("utf-8", "replace").decode()  # no file can store halves of surrogate pairs


def _as_json(result: object) -> str:
    """Return the text of an object that JSON cannot represent."""
    if isinstance(result, bytes | bytearray):
        return result.decode("utf-8", "replace")
    bare = type(result).__str__ is object.__str__ and type(result).__repr__ is object.__repr__
    if bare or callable(result) or isinstance(result, Iterator | AsyncIterator | Awaitable):
        raise TypeError(f"expected the result to be a text, number, list or dict, got a {type(result).__name__}")
    return str(result)


def shortened(text: str, most: int) -> str:
    """Return `text` in at most `most` characters; a longer one is cut in its middle."""
    if len(text) <= most:
        return text
    left_out = "\n...\n"
    keep = max(0, most - len(left_out))
    return text[: keep - keep // 2] + left_out + text[len(text) - keep // 2 :]


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a `functools.partial`, which itself has no types."""
    return function.func if isinstance(function, functools.partial) else function


def _bound(function: Callable[..., Any]) -> set[str]:
    """Return the parameters that a `functools.partial` has bound but keeps in its signature."""
    return set(function.keywords) if isinstance(function, functools.partial) else set()


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _read(
    function: Callable[..., Any], called: Callable[..., Any], name: str, bound: set[str]
) -> tuple[str, dict[str, Any], Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """Return description, JSON schema and check of a function's arguments."""
    with needs("a team with tools", "tools"):
        import docstring_parser
        import pydantic
        from pydantic.json_schema import GenerateJsonSchema

    class PlainSchema(GenerateJsonSchema):
        """A schema without titles, which only repeat the names."""

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    # For an object, the docstring of `__call__` is for the model; that of its class is for its author.
    docstring = called.__doc__ if inspect.isfunction(called) else None
    doc = docstring_parser.parse(inspect.cleandoc(docstring or inspect.getdoc(_whole(function)) or ""))
    descriptions = {parameter.arg_name: parameter.description for parameter in doc.params}
    hints = typing.get_type_hints(called, include_extras=True)
    fields: dict[str, Any] = {}
    places: dict[str, str] = {}
    signature = inspect.signature(function).parameters
    if unknown := sorted(bound - set(signature)):
        raise ConfigError(f"tool {name}: has no parameter {unknown[0]!r}{did_you_mean(unknown[0], list(signature))}")
    for parameter in signature.values():
        if parameter.name in bound | _bound(function) | {STATE}:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"tool {name}: expected parameters that have names, got {parameter}")
        hint = hints.get(parameter.name, Any)
        try:
            pydantic.TypeAdapter(hint).json_schema()
        except pydantic.errors.PydanticUserError as error:
            shown = inspect.formatannotation(hint)
            raise ConfigError(
                f"tool {name}: {parameter.name}: expected a type that JSON can say, got {shown}"
            ) from error
        default = ... if parameter.default is parameter.empty else parameter.default
        described = pydantic.Field(default, description=descriptions.get(parameter.name), alias=parameter.name)
        places[parameter.name] = place = f"p{len(places)}"  # a parameter may be named `schema` or `_x`; a field may not
        fields[place] = (hint, described)
    model = pydantic.create_model(name, __config__=pydantic.ConfigDict(extra="forbid"), **fields)
    schema = model.model_json_schema(schema_generator=PlainSchema)
    schema.pop("title", None)

    def check(arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            values = model.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()]
            raise ValueError("; ".join(problems)) from None
        return {parameter: getattr(values, place) for parameter, place in places.items()}

    return "\n".join(filter(None, (doc.short_description, doc.long_description))), schema, check
