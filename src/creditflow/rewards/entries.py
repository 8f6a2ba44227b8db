"""Load the reward functions in a recipe's `reward.functions`, and report errors in its entries."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import ConfigDict

from creditflow._utils.loading import load_object
from creditflow._utils.sections import OPTIONS, FromMapping, Text, checked
from creditflow.data import Step
from creditflow.errors import ConfigError, RewardError, did_you_mean, first_line
from creditflow.removed import removed_hint
from creditflow.rewards import registry
from creditflow.rewards.compose import call_here, sum_range
from creditflow.rewards.registry import REWARD_FUNCTIONS, Declared, Level, RewardFunction
from creditflow.rewards.signatures.base import ANSWER, Format, Signature, SignatureCall, by_position
from creditflow.rewards.signatures.libraries import SIGNATURES, recognised

_CALLED_AS = {"step": "(step, trajectory)", "trajectory": "(trajectory)", "outcome": "(trajectory)"}
_CALLED_AS_ANSWER = "(text, truth)"
_SUM = "sum"
"""The name of the ready-made weighted sum of several functions."""


@dataclass
class RewardFunctionConfig:
    """One entry of `reward.functions`."""

    __pydantic_config__: ClassVar[ConfigDict] = OPTIONS

    fn: Text
    """A built-in's name, `package.module:function`, or `file.py:function`."""
    level: Level | None = None
    """`step`, `trajectory` or `outcome`; default: as decorated, else from the function's parameters."""
    signature: Literal["verl", "verl_batch", "trl", "verifiers"] | None = None
    """Library that the function was written for: `verl`, `verl_batch`, `trl` or `verifiers`; default: from the names of
    its parameters."""
    format: Format | None = None
    """`text` or `messages`: prompts and completions for functions of TRL and verifiers; default: as the data set's
    prompts."""
    range: list[float] | None = None
    """Lowest and highest value of a function without a decorator; default: 0 and 1."""
    agent_match: Text | None = None
    """Regular expression (re.search) on the agent's name; default: every agent."""
    when: Text | None = None
    """`file.py:function` or `package.module:function` that selects the steps to score; default: all."""
    weight: float | None = None
    """Weight in the mean of a step's scores; 0: measured and reported, never part of credit."""
    name: Text | None = None
    """The function's name in metrics and files; default: as decorated, else the function's own."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function, or of a class's constructor."""
    timeout: float | None = None
    """Time limit of one call in seconds; default: as declared, else `reward.timeout`."""
    cache: bool = True
    """Whether a repeated call with the same inputs is answered from the cache."""


def load_reward_functions(
    entries: Sequence[RewardFunctionConfig],
    base: Path,
    agents: Sequence[str],
    shared: Mapping[str, Any] | None = None,
) -> tuple[RewardFunction, ...]:
    """Load the functions that `reward.functions` names, in its order.

    `base`: the folder for `file.py:function`. `agents`: the agents of the team. A function that matches none of them
    would score nothing, and is refused (without agents, this is not checked). `shared`: arguments for every function
    that has a parameter of that name and no value for it in its entry.
    A class is instantiated with the entry's args; a TypeError or ValueError from it is reported as an error of the
    recipe. The instance is then called (`async def __call__` for an async function). It may have
    `range`: a tuple that replaces the declared range;
    `when(step)`: selects the steps to score, and replaces the declared one;
    `file_arguments`: names of arguments that are files or folders; `base` is searched for them first;
    `text_arguments`: names of arguments that are texts, or files with a text; `base` is searched for files first;
    `inline = True`: calls stay in the manager's process, because it holds a model or a connection to the run;
    `connect(clients)`: receives the policies of the run by name (`rollout.ModelClient`) before the first call;
    `cache_key(step, trajectory)` (or `(trajectory)`): a text that holds everything that the score depends on; default:
    everything about the trajectory except ids and scores;
    `version_text`: text read from files, which becomes part of the version;
    `metrics()`: numbers by name since the previous call, reported as `reward/<function>/<name>` (for async functions
    and those with `inline`). Numbers from several processes are added up, so report sums and counts; for a name with
    `_max` in it, the largest is kept;
    `async aclose()`: awaited when the manager is closed.

    Raises RewardError, or ConfigError if a reference cannot be resolved.
    """
    where = _Where(base, tuple(agents), dict(shared or {}))
    functions = [_load(entry, f"reward.functions[{i}]", where) for i, entry in enumerate(entries)]
    _expect_different(functions, "reward.functions")
    return tuple(functions)


def reward_functions_of(
    functions: Sequence[Callable[..., Any] | str], agents: Sequence[str]
) -> tuple[RewardFunction, ...]:
    """Make reward functions of Python functions, decorated or not, and of names and references as in a recipe.

    `agents`: see `load_reward_functions`. Raises RewardError.
    """
    where, loaded = _Where(Path(), tuple(agents), {}), []
    for i, function in enumerate(functions):
        if not isinstance(function, str) and not callable(function):
            raise RewardError(f"rewards[{i}]: expected a function, got {type(function).__name__}")
        fn = function if isinstance(function, str) else f"python:{getattr(function, '__qualname__', type(function))}"
        target = None if isinstance(function, str) else function
        loaded.append(_load(RewardFunctionConfig(fn), f"rewards[{i}]", where, target=target))
    _expect_different(loaded, "rewards")
    return tuple(loaded)


def _expect_different(functions: Sequence[RewardFunction], key: str) -> None:
    """Raise RewardError for two functions of one name or two outcome functions."""
    _refuse_same([function.name for function in functions], [f"{key}[{i}]" for i in range(len(functions))])
    outcomes = [function.name for function in functions if function.level == "outcome"]
    if len(outcomes) > 1:
        raise RewardError(f"{key}: expected at most one outcome function, got {', '.join(outcomes)}")


def _refuse_same(names: Sequence[str], keys: Sequence[str]) -> None:
    for i, name in enumerate(names):
        if (first := names.index(name)) != i:
            raise RewardError(f"{keys[i]}: the name {name!r} is taken by {keys[first]}; set `name` in one")


@dataclass(frozen=True, slots=True)
class _Where:
    """Inputs that are shared by all entries of a recipe."""

    base: Path
    agents: tuple[str, ...]
    shared: dict[str, Any]


def _load(
    entry: RewardFunctionConfig,
    key: str,
    where: _Where,
    part_of: Level | None = None,
    target: Callable[..., Any] | None = None,
) -> RewardFunction:
    """`part_of`: level of the sum, if the entry is a part of one. `target`: the function that `fn` names."""
    if entry.fn == _SUM:
        return _load_sum(entry, key, where, part_of)
    function = _find(entry.fn, where.base, key) if target is None else target
    args = {str(name): value for name, value in entry.args.items()}
    for name in args:
        if advice := removed_hint(f"argument {entry.fn}.{name}"):
            raise RewardError(f"{key} ({entry.fn}): unknown argument {name!r}{advice}")
    takes = {parameter.name for parameter in _parameters(function, key)}
    args = {name: value for name, value in where.shared.items() if name in takes} | args
    # The module of a file is named after the file's path.
    place = f"{getattr(function, '__module__', '')} {entry.fn}" if ":" in entry.fn else entry.fn
    version, identity = _version(function, args), _hash(place, args)
    decorated = registry.declared(function)
    instance: Any = None
    args |= _found_beside(function, args, where.base)
    if inspect.isclass(function):
        function, args = _make(function, args, f"{key} ({entry.name or entry.fn})"), {}
        instance = function
        if (read := getattr(instance, "version_text", None)) is not None:
            version = _hash(version, read)
        if hasattr(instance, "connect") and not getattr(instance, "inline", False):
            raise RewardError(f"{key}: a class with `connect` must say `inline = True`: policies stay in their process")
    declared, signature = _declared(decorated, entry, function, args, key)
    name = str(entry.name or declared.name or getattr(function, "__name__", type(function).__name__))
    key = f"{key} ({name})"
    when = getattr(instance, "when", declared.when)
    if part_of is not None and when is not None:
        raise RewardError(f"{key}: is declared with `when`, which belongs to the sum, not to a part of it")
    level = _level(entry.level or (part_of if declared.level == "answer" else None), declared, key)
    called_as = _CALLED_AS_ANSWER if declared.level == "answer" else _CALLED_AS[level]
    _check_call(function, called_as, args, key, signature)
    weight = _weight(declared.weight if entry.weight is None else entry.weight, entry, level, key, part_of)
    low, high = _range(getattr(instance, "range", declared.range) if entry.range is None else entry.range, key)
    timeout = declared.timeout if entry.timeout is None else entry.timeout
    if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
        raise RewardError(f"{key}: expected a timeout of more than 0 seconds, got {timeout}")

    pattern = declared.agent_match if entry.agent_match is None else entry.agent_match
    bound: Callable[..., Any] = functools.partial(function, **args) if args else function
    own_key = None
    if signature is not None:
        for name in signature.objects.intersection(args):
            if isinstance(reference := args[name], str):
                args[name] = load_object(reference, where.base, f"{key}.args.{name}")
        bound = SignatureCall(function, signature, args, entry.format, low)
        own_key = bound.cache_key if signature.offered is not None else None
        version = _hash(version, signature.name, entry.format)
    elif declared.level == "answer":
        bound = SignatureCall(functools.partial(by_position, bound), ANSWER, low=low)
        own_key = bound.cache_key
    return RewardFunction(
        name=name,
        level=level,
        call=bound,
        agent_match=_pattern(pattern, where.agents, key),
        when=_when(entry, when, level, where, key) if part_of is None else None,
        weight=weight,
        range=(low, high),
        version=version,
        identity=identity,
        is_async=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
        timeout=timeout,
        cache=entry.cache,
        inline=bool(getattr(instance, "inline", False)),
        cache_key=getattr(instance, "cache_key", None) or own_key,
        instance=instance,
        agents=where.agents,
        signature="" if signature is None else signature.name,
        declares_range=decorated is not None or hasattr(instance, "range") or entry.range is not None,
        read_truth=declared.read_truth,
    )


def _found_beside(function: object, args: Mapping[str, Any], base: Path) -> dict[str, str]:
    """The args that name files beside the recipe, with their paths."""
    paths: dict[str, str] = {}
    # os.path: pathlib raises for a text that is too long for a path
    for attribute, exists in (("file_arguments", os.path.exists), ("text_arguments", os.path.isfile)):
        for name in getattr(function, attribute, ()):
            value = args.get(name)
            if isinstance(value, str) and value.strip() and exists(beside := base / value):
                paths[name] = str(beside.resolve())
    return paths


def _declared(
    decorated: Declared | None,
    entry: RewardFunctionConfig,
    function: Callable[..., Any],
    args: Mapping[str, Any],
    key: str,
) -> tuple[Declared, Signature | None]:
    """The properties of a function, and its signature if it was written for another library."""
    if decorated is not None:
        _refuse_of_undecorated(entry, key, "the function has a decorator, which declares its parameters and range")
        return decorated, None
    signature = SIGNATURES[entry.signature] if entry.signature else recognised(_parameters(function, key), key)
    if entry.format is not None and (signature is None or signature.offered is not None):
        having = ", ".join(name for name, candidate in SIGNATURES.items() if candidate.offered is None)
        raise RewardError(f"{key}.format: expected it of functions with signature {having} only, got {entry.format!r}")
    if signature is not None:
        return Declared("answer"), signature  # it scores one text, as a comparison of an answer does
    return Declared(_level_by_parameters(function, entry, args, key)), None


def _refuse_of_undecorated(entry: RewardFunctionConfig, key: str, why: str) -> None:
    """Raise RewardError for options of functions without a decorator."""
    for name in ("signature", "format", "range"):
        if (value := getattr(entry, name)) is not None:
            raise RewardError(f"{key}.{name}: expected none, got {value!r}: {why}")


def _weight(weight: float, entry: RewardFunctionConfig, level: Level, key: str, part_of: Level | None) -> float:
    if not math.isfinite(weight) or (weight < 0 and part_of is None):
        raise RewardError(f"{key}: expected a weight of 0 or more, got {weight}")
    if part_of is not None and (entry.agent_match is not None or entry.when is not None):
        word = "agent_match" if entry.agent_match is not None else "when"
        raise RewardError(f"{key}: {word} belongs to the sum, not to a part of it")
    if part_of is None and level == "outcome" and (entry.agent_match is not None or weight != 1):
        raise RewardError(
            f"{key}: an outcome has no agent_match and no weight (the rule's w_o weighs it); "
            "to score an agent's steps, set level: step"
        )
    return float(weight)


def _when(
    entry: RewardFunctionConfig, declared: Callable[[Step], bool] | None, level: Level, where: _Where, key: str
) -> Callable[[Step], bool] | None:
    """The predicate that selects the steps to score; None: all of them."""
    if entry.when is None and declared is None:
        return None
    if level == "outcome":
        raise RewardError(f"{key}: an outcome is no step's: it has no `when`")
    when = declared if entry.when is None else load_object(entry.when, where.base, f"{key}.when")
    if not callable(when):
        raise RewardError(f"{key}.when: expected a function, {entry.when or repr(when)} is a {type(when).__name__}")
    _check_call(when, "(step)", {}, f"{key}.when")
    return cast(Callable[[Step], bool], when)


def _load_sum(entry: RewardFunctionConfig, key: str, where: _Where, part_of: Level | None) -> RewardFunction:
    if part_of is not None:
        raise RewardError(f"{key}: a part cannot be a sum; list its parts in the outer one")
    _refuse_of_undecorated(entry, key, "a sum has none of its own")
    if (level := entry.level or "step") == "trajectory":
        raise RewardError(f"{key}: expected level step or outcome of a sum, got {level!r}")
    name = str(entry.name or entry.fn)
    part_entries = entry.args.get("parts")
    if not isinstance(part_entries, list) or not part_entries or len(entry.args) > 1:
        raise RewardError(f"{key} ({name}): expected args with `parts` (a list of functions) and nothing else")
    keys = [f"{key}.args.parts[{i}]" for i in range(len(part_entries))]
    entries = [entry_of(part, at) for part, at in zip(part_entries, keys, strict=True)]
    parts = tuple(_load(part, at, where, level) for part, at in zip(entries, keys, strict=True))
    _refuse_same([part.name for part in parts], keys)
    for part, at in zip(parts, keys, strict=True):
        if (part.level == "outcome") is not (level == "outcome"):
            raise RewardError(f"{at} ({part.name}): is of level {part.level}, its sum of level {level}")
    function = RewardFunction(
        name=name,
        level=level,
        call=call_here,
        agent_match=_pattern(entry.agent_match, where.agents, key),
        when=_when(entry, None, level, where, key),
        weight=_weight(1.0 if entry.weight is None else entry.weight, entry, level, key, None),
        range=_range(sum_range(parts), f"{key} ({name})"),
        version=_hash([[part.version, part.weight] for part in parts]),
        is_async=True,
        parts=parts,
    )
    return replace(function, call=functools.partial(call_here, function))


def entry_of(value: Any, key: str) -> RewardFunctionConfig:
    """Parse an entry outside of a recipe's list, with the checks of its types and words. Raises RewardError."""
    if not isinstance(value, Mapping) or "fn" not in value:
        raise RewardError(f"{key}: expected a function {{fn: ..., args: ...}}, got {value!r}")
    try:
        return checked(Annotated[RewardFunctionConfig, FromMapping()], value, key)  # type: ignore[arg-type]
    except ConfigError as error:
        raise RewardError(str(error)) from error


def _make(cls: Callable[..., Any], args: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """Instantiate a class that a recipe names; errors in its arguments are reported as errors of the recipe."""
    _check_call(cls, "()", args, key)
    try:
        instance: Callable[..., Any] = cls(**args)
    except (TypeError, ValueError, ConfigError) as error:
        raise RewardError(f"{key}: {first_line(error)}") from error
    if not callable(instance):
        raise RewardError(f"{key}: expected a class with __call__, {type(instance).__name__} has none")
    return instance


def _range(declared: Sequence[float], key: str) -> tuple[float, float]:
    low, high = declared if len(declared) == 2 else (math.nan, math.nan)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise RewardError(f"{key}: expected a range (low, high) of finite numbers with low < high, got {declared}")
    return float(low), float(high)


def _find(fn: str, base: Path, key: str) -> Callable[..., Any]:
    if ":" not in fn:
        if fn in REWARD_FUNCTIONS:
            return REWARD_FUNCTIONS[fn]
        names = sorted({*REWARD_FUNCTIONS.names(), _SUM})
        hint = removed_hint("reward.functions.fn", fn) or did_you_mean(fn, names)
        raise RewardError(
            f"{key}.fn: no ready-made reward function {fn!r}{hint}. Ready-made are {', '.join(names)}. For yours, "
            "write `file.py:function` or `package.module:function`"
        )
    function = load_object(fn, base, f"{key}.fn")
    if not callable(function):
        raise RewardError(f"{key}.fn: expected a function, {fn} is a {type(function).__name__}")
    if isinstance(function, functools.partial):
        vars(function).pop("__wrapped__", None)  # of update_wrapper; it hides bound arguments from `signature`
    return cast(Callable[..., Any], function)


def _level_by_parameters(
    function: Callable[..., Any], entry: RewardFunctionConfig, args: Mapping[str, Any], key: str
) -> Level:
    """The level of a function without a decorator: `(trajectory)` scores trajectories, `(step, trajectory)` steps."""
    needed = [
        p.name
        for p in _parameters(function, key)
        if p.default is p.empty and p.name not in args and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(needed) == 1:
        return "outcome" if entry.level == "outcome" else "trajectory"
    if len(needed) == 2:
        return "step"
    raise RewardError(
        f"{key}: {entry.fn} has no decorator, so it must take (trajectory) or (step, trajectory); "
        f"it takes ({', '.join(needed)}); if it was written for verl, TRL or verifiers, set `signature`"
    )


def _level(level: Level | None, declared: Declared, key: str) -> Level:
    if declared.level == "answer":
        if level == "trajectory":
            raise RewardError(f"{key}: scores one text, so its level is outcome or step, not trajectory")
        return level or "outcome"
    if level is not None and level != declared.level:
        raise RewardError(f"{key}: the recipe says level {level}, the function is of level {declared.level}")
    return declared.level


def _check_call(
    function: Callable[..., Any], called_as: str, args: Mapping[str, Any], key: str, signature: Signature | None = None
) -> None:
    """Refuse a call that does not fit, and unknown arguments, now: they would fail at the first call, minutes later.

    `called_as`: the positional parameters. With a `signature`, its arguments are passed by name instead.
    """
    n = 0 if signature or called_as == "()" else called_as.count(",") + 1
    parameters = _parameters(function, key)
    options = [p.name for p in parameters[n:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [name for name in args if name not in options]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        takes = f"it takes {', '.join(options)}" if options else "it takes none"
        raise RewardError(f"{key}: unknown argument {unknown[0]!r}{did_you_mean(unknown[0], options)}; {takes}")
    named = [p.name for p in parameters if signature is not None and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if signature is not None and signature.offered is not None:
        named = [name for name in named if name in signature.offered]
    try:
        inspect.signature(function).bind(*[None] * n, **{**dict.fromkeys(named), **args})
    except TypeError as error:
        how = called_as if signature is None else f"{signature.form} by name"
        raise RewardError(f"{key}: is called as {how} and its args, but that does not fit it: {error}") from error


def _parameters(function: Callable[..., Any], key: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError as error:  # some functions written in C have no signature
        raise RewardError(f"{key}: cannot see which parameters it takes; wrap it in a Python function") from error


def _pattern(pattern: str | None, agents: Sequence[str], key: str) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise RewardError(f"{key}: agent_match {pattern!r} is not a regular expression: {error}") from error
    if agents and not any(compiled.search(agent) for agent in agents):
        names = f"{', '.join(agents)}{did_you_mean(pattern, agents)}"
        raise RewardError(f"{key}: agent_match {pattern!r} matches none of the team's agents: {names}")
    return compiled


def _version(function: Callable[..., Any], args: Mapping[str, Any]) -> str:
    if isinstance(function, functools.partial):
        return _hash(_version(function.func, args), function.args, function.keywords)
    if inspect.isclass(function):
        things: list[Any] = [cls for cls in inspect.getmro(function) if cls is not object]
    else:
        things = [function if inspect.isroutine(function) else type(function)]
    return _hash([_source(part) for part in things], args)


def _source(part: Any) -> str:
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):  # typed at a prompt, or written in C
        return f"{part.__module__}.{part.__qualname__}"


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(_ordered(parts), default=repr).encode()).hexdigest()[:12]


def _ordered(value: object) -> object:
    """The value in a form that is independent of the order of its keys, which may be of any type."""
    if isinstance(value, Mapping):
        return sorted(([repr(key), _ordered(item)] for key, item in value.items()), key=lambda pair: str(pair[0]))
    return [_ordered(item) for item in value] if isinstance(value, list | tuple) else value
