"""The reward functions `judge` and `judge_outcome`: what is to be judged goes in, a score comes out.

It must not know how a question travels or a reply is read (`clients`, `verdict`). Arguments are checked when a recipe
is loaded; connections and models are made at the first call.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from creditflow.errors import ModelError, did_you_mean
from creditflow.reward import local_model
from creditflow.reward.judge import verdict
from creditflow.reward.judge.clients import INSTALL, Client, Counts, Endpoint, JudgeError, Model
from creditflow.reward.judge.prompt import FIELDS, PAIR_FIELDS, Prompt, check_template
from creditflow.reward.judge.verdict import WINNER, Choices, Form, Scale, Verdict, VerdictError
from creditflow.reward.registry import builtin, outcome, reward
from creditflow.rollout.client import ModelClient
from creditflow.trajectory import Message, Score, Step, Trajectory

_GROUND_TRUTH = "ground_truth"
_NO_ANSWER = "the workflow returned no answer"
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_SECRET = re.compile(r"\b(?:sk-[-_A-Za-z0-9]{20}|AIza[-_A-Za-z0-9]{30}|(?:hf_|gsk_|xai-|gh[pousr]_)[A-Za-z0-9]{30})")
_OUR_FIELDS = ("messages", "model", "stream", "n")
"""Fields of a request that are not the recipe's to change: a verdict is read from one whole reply."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is judged."""

    trajectory: Trajectory
    response: str
    prompt: str = ""


@builtin
@reward(name="judge", timeout=120)
class Judge:
    """What a judge model makes of a step's response, by a rubric.

    Who judges is one of
    `endpoint`: the address of an OpenAI-compatible server (`http://host:8000/v1`), with `model`, and `api_key_env`: the
    name of an environment variable, never the key itself (without it, the key sent is `none`);
    `path`: a Hugging Face folder (safetensors), loaded on `device` of this process at the first call;
    `policy`: the name of a policy of the run, as it is at that moment.

    What it is asked:
    `rubric`: text, or a file *.md or *.txt. `template`: the same, with {rubric}, {task}, {prompt}, {response},
    {reference} in it; else there is a section for each. Texts by others are fenced, and cut to `max_characters` each.
    `reference`: `ground_truth` or a field of the task's `extra_info` that the judge is shown.
    `scale`: [lowest, highest], a number is asked for, and rescaled to [0, 1]; default [1, 10]. Or `choices`: words with
    their values in [0, 1]. Or `pairwise: {against: ground_truth}` (or a field of `extra_info`): which is better, the
    response or that; 1, 0.5 for a tie, or 0, mean over both orders of the two, since judges favour a position
    (arXiv 2306.05685, section 3.4). Its template has {first} and {second}.
    `format`: `line` (a last line `Score: N`; `Winner: A`) or `json` ({"score": N, "reason": ...}).

    How: `max_tokens` of the reply; `temperature`; `seed` (null: none is sent); `max_concurrency`: requests at a time,
    or of a model of this process in one batch; and of an endpoint `request_timeout` per try, `retries` with `backoff`
    seconds and jitter, `give_up_after` seconds (no try begins later; with `request_timeout` it should stay below the
    entry's `timeout`, so that the reason given is the judge's), `request`: other fields of the request (null takes one
    out: {max_tokens: null, max_completion_tokens: 800}), `prices`: {prompt, completion} per million tokens, for `cost`.

    Range: 0 to 1. Cost: one request a step, two where pairwise; `metrics` tells requests, tokens, cost and latency.
    A reply without exactly one verdict on the scale is `failed`, as is a judge that cannot be asked; one that does not
    answer in time is `timeout`. Source: Zheng et al., Judging LLM-as-a-Judge, arXiv 2306.05685.
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        model: str | None = None,
        api_key_env: str | None = None,
        path: str | None = None,
        device: str = "auto",
        policy: str | None = None,
        rubric: str | None = None,
        template: str | None = None,
        reference: str | None = None,
        scale: Sequence[float] | None = None,
        choices: Mapping[str, float] | None = None,
        pairwise: Mapping[str, str] | None = None,
        format: str = "line",
        max_characters: int = 20_000,
        max_tokens: int = 512,
        temperature: float = 0.0,
        seed: int | None = 0,
        max_concurrency: int = 64,
        request_timeout: float = 30.0,
        retries: int = 4,
        backoff: float = 0.5,
        give_up_after: float = 85.0,
        request: Mapping[str, Any] | None = None,
        prices: Mapping[str, float] | None = None,
    ) -> None:
        _refuse_secrets(locals())
        _one_of(endpoint=endpoint, path=path, policy=policy)
        _one_of(scale=scale, choices=choices, pairwise=pairwise, needed=False)
        for name, value, least in (
            ("max_characters", max_characters, 1),
            ("max_tokens", max_tokens, 1),
            ("max_concurrency", max_concurrency, 1),
            ("retries", retries, 0),
        ):
            _whole(name, value, least)
        if seed is not None:
            _whole("seed", seed, 0)
        _number("temperature", temperature, 0)
        _number("backoff", backoff, 0)
        _number("request_timeout", request_timeout, 0, above=True)
        _number("give_up_after", give_up_after, 0, above=True)
        if format not in ("line", "json"):
            raise ValueError(f"format: expected 'line' or 'json', got {format!r}")

        self.style = format
        self.reference = _word("reference", reference)
        self.against = _against(pairwise)
        self.form = _form(scale, choices, self.against is not None)
        self.prices = _prices(prices)
        self.prompt = _prompt(rubric, template, verdict.instruction(self.form, format), max_characters, self.against)
        if self.reference and self.against:
            raise ValueError("reference: where pairwise compares with a text, that is the reference")
        if self.prompt.template and ("{reference}" in self.prompt.template) != (self.reference is not None):
            raise ValueError("reference: expected both it and {reference} in the template, or neither")

        self.version_text = repr(self.prompt)
        self.policy: str | None = _word("policy", policy)
        self.here = endpoint is None
        self.client: Client
        if endpoint is not None:
            self.client = Endpoint(
                url=_url(endpoint),
                model=_needed("model", model),
                api_key_env=_variable(api_key_env),
                body=_body(max_tokens, temperature, seed, format, request),
                max_concurrency=max_concurrency,
                request_timeout=request_timeout,
                retries=retries,
                backoff=backoff,
                give_up_after=give_up_after,
            )
            return
        for name, given in (("model", model), ("api_key_env", api_key_env), ("prices", prices), ("request", request)):
            if given is not None:
                raise ValueError(f"{name}: only an endpoint has one")
        get = self._the_policy
        if path is not None:
            if temperature:
                raise ValueError("temperature: a judge from a folder answers greedily, so it must be 0")
            get = _Folder(Path(path), device).get
        self.client = Model(path or str(policy), get, max_tokens, temperature, seed or 0, max_concurrency)

    def connect(self, clients: Mapping[str, ModelClient]) -> None:
        """The policies of the run. Raises ValueError where the judge's is none of them."""
        if self.policy is None or not isinstance(self.client, Model):
            return
        if self.policy not in clients:
            raise ValueError(
                f"judge: policy: {self.policy!r} is no policy of the run{did_you_mean(self.policy, clients)}; "
                f"there are {', '.join(clients) or 'none'}"
            )
        self.client.known = clients[self.policy]

    async def _the_policy(self) -> ModelClient:
        assert isinstance(self.client, Model)
        if self.client.known is None:
            raise JudgeError(f"policy {self.policy}: the run handed over no policies")
        return self.client.known

    async def __call__(self, step: Step, trajectory: Trajectory) -> Score:
        """The score of the step's response."""
        return await self._judge(_Subject(trajectory, step.response, step.prompt))

    def cache_key(self, step: Step, trajectory: Trajectory) -> str:
        """The questions, word for word, whom they are put to and how it is sampled."""
        return self._key(_Subject(trajectory, step.response, step.prompt))

    def metrics(self) -> dict[str, float]:
        """Since last asked: requests, retries, prompt_tokens, completion_tokens, latency_mean_s and latency_max_s (of
        the answered requests), replies_without_usage where there were any; with prices, cost in their currency.
        """
        counts, self.client.counts = self.client.counts, Counts()
        return counts.metrics(self.prices)

    async def aclose(self) -> None:
        """Close what was opened in this event loop."""
        await self.client.aclose()

    async def _judge(self, subject: _Subject) -> Score:
        try:
            asked = self._questions(subject)
            # Both orders to the end, even where the first fails: neither must be left running behind.
            found = await asyncio.gather(*(self._verdict(messages) for messages in asked), return_exceptions=True)
        except JudgeError as error:
            return Score(0.0, status=error.status, reason=str(error))
        for one in found:
            if isinstance(one, JudgeError):
                return Score(0.0, status=one.status, reason=str(one))
            if isinstance(one, VerdictError):
                return Score(0.0, status="failed", reason=str(one))
            if isinstance(one, BaseException):
                raise one
        return self._score([one for one in found if isinstance(one, Verdict)])

    def _score(self, verdicts: Sequence[Verdict]) -> Score:
        if self.against is None:
            return Score(verdicts[0].value, reason=verdicts[0].reason)
        first, second = verdicts
        half = verdict.REASON_CHARACTERS // 2 - len("as A:  ")
        reason = f"as A: {first.reason[:half]} as B: {second.reason[:half]}"
        return Score((first.value + 1.0 - second.value) / 2, reason=reason)

    async def _verdict(self, messages: Sequence[Message]) -> Verdict:
        return verdict.read(await self.client.ask(messages), self.form, self.style)

    def _questions(self, subject: _Subject) -> list[list[Message]]:
        """One question; where two are compared, one for each order. Raises JudgeError where the task lacks a text."""
        about = {"task": subject.trajectory.task.text}
        if subject.prompt:
            about["prompt"] = subject.prompt
        if self.against is not None:
            other = _from_task(subject.trajectory, self.against)
            pairs = ((subject.response, other), (other, subject.response))
            return [self.prompt.messages({**about, "first": first, "second": second}) for first, second in pairs]
        if self.reference is not None:
            about["reference"] = _from_task(subject.trajectory, self.reference)
        return [self.prompt.messages({**about, "response": subject.response})]

    def _key(self, subject: _Subject) -> str:
        try:
            questions: Any = self._questions(subject)
        except JudgeError as error:
            questions = str(error)
        return json.dumps([self.client.identity(), questions])


@builtin
@outcome(name="judge_outcome", timeout=120)
class JudgeOutcome(Judge):
    """The same of a whole trajectory's answer, as its outcome; where there is none, 0 without asking.

    Its arguments are those of `judge`.
    Range: 0 to 1. Cost: one request, two where pairwise. Source: as of `judge`.
    """

    async def __call__(self, trajectory: Trajectory) -> Score:  # type: ignore[override]
        """The score of the trajectory's answer."""
        if trajectory.answer is None:
            return Score(0.0, reason=_NO_ANSWER)
        return await self._judge(_Subject(trajectory, trajectory.answer))

    def cache_key(self, trajectory: Trajectory) -> str:  # type: ignore[override]
        """As of `judge`."""
        return _NO_ANSWER if trajectory.answer is None else self._key(_Subject(trajectory, trajectory.answer))


class _Folder:
    """The model in a folder, loaded in a thread when it is first wanted, once for all who wait."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.model: ModelClient | None = None
        self.loading: asyncio.Task[ModelClient] | None = None
        try:
            local_model.check_folder(folder)
        except ModelError as error:
            raise ValueError(f"path: {error}") from error

    async def get(self) -> ModelClient:
        if self.model is None:
            if self.loading is None or self.loading.cancelled():
                self.loading = asyncio.create_task(self._load())
            # Shielded: a caller whose time is up must not stop the load that the others wait for.
            self.model = await asyncio.shield(self.loading)
        return self.model

    async def _load(self) -> ModelClient:
        return await asyncio.to_thread(local_model.load, self.folder, self.device)


def _from_task(trajectory: Trajectory, name: str) -> str:
    task = trajectory.task
    value = task.ground_truth if name == _GROUND_TRUTH else task.extra_info.get(name)
    if value is None:
        raise JudgeError(f"the task has no {name}" + ("" if name == _GROUND_TRUTH else " in its extra_info"))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# ---- arguments: each of these raises ValueError, which becomes the recipe's fault


def _refuse_secrets(args: Mapping[str, Any]) -> None:
    """A recipe is copied into the folder of every run: a key in it would be too. The message does not repeat it."""
    for name, value in args.items():
        if name != "self" and _SECRET.search(str(value)):
            raise ValueError(
                f"{name}: this looks like a key; put it into an environment variable, named by api_key_env"
            )


def _one_of(needed: bool = True, **options: object) -> None:
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1 or (needed and not given):
        raise ValueError(f"expected one of {', '.join(options)}, got {' and '.join(given) or 'none'}")


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected a whole number of {least} or more, got {value!r}")


def _number(name: str, value: object, least: float, *, above: bool = False) -> float:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if usable and isinstance(value, int | float) and (value > least or (value == least and not above)):
        return float(value)
    raise ValueError(f"{name}: expected a number {'above' if above else 'of at least'} {least:g}, got {value!r}")


def _word(name: str, value: object) -> str | None:
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f"{name}: expected a name, got {value!r}")
    return value


def _needed(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: expected the model's name as the endpoint knows it, got {value!r}")
    return value


def _url(endpoint: object) -> str:
    """The address, which is shown in reasons and metrics; so it may hold no credentials."""
    parts = urlsplit(endpoint if isinstance(endpoint, str) else "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("endpoint: expected an address such as http://127.0.0.1:8000/v1")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValueError("endpoint: expected an address without user, password, query or fragment; keys: api_key_env")
    if any(importlib.util.find_spec(module) is None for module in ("openai", "tenacity")):
        raise ValueError(INSTALL)
    return str(endpoint).rstrip("/")


def _variable(name: object) -> str | None:
    """The value is not repeated in the message: it may be the key itself."""
    if name is None:
        return None
    if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
        raise ValueError("api_key_env: expected the name of an environment variable, in capitals, never the key itself")
    if not os.environ.get(name):
        raise ValueError(f"api_key_env: the environment variable {name} is not set")
    return name


def _form(scale: Any, choices: Any, pairwise: bool) -> Form:
    if pairwise:
        return WINNER
    if choices is not None:
        return _choices(choices)
    given = [1, 10] if scale is None else scale
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != 2:
        raise ValueError(f"scale: expected [lowest, highest], got {given!r}")
    low, high = (_number("scale", one, -1e9) for one in given)
    if not low < high <= 1e9:
        raise ValueError(f"scale: expected [lowest, highest] between -1e9 and 1e9, got {given!r}")
    return Scale(low, high)


def _choices(choices: Any) -> Choices:
    if not isinstance(choices, Mapping) or len(choices) < 2:
        raise ValueError(f"choices: expected two or more words with their values, got {choices!r}")
    values = {str(word): _number(f"choices.{word}", value, 0) for word, value in choices.items()}
    if len({word.casefold() for word in values}) < len(values):
        raise ValueError("choices: two of the words differ in case only")
    for word, value in values.items():
        if value > 1:
            raise ValueError(f"choices.{word}: expected a value in [0, 1], got {value:g}")
        try:
            same = verdict.read(f"Score: {word}", Choices(values), "line").value == value
        except VerdictError:
            same = False
        if not same:
            raise ValueError(f"choices: {word!r} cannot be read from a line; take a plain word")
    return Choices(values)


def _against(pairwise: Any) -> str | None:
    if pairwise is None:
        return None
    if not isinstance(pairwise, Mapping) or set(pairwise) != {"against"}:
        raise ValueError(f"pairwise: expected {{against: ground_truth}} or a field of extra_info, got {pairwise!r}")
    return _word("pairwise.against", pairwise["against"] or "")


def _prompt(
    rubric: str | None, template: str | None, instruction: str, max_characters: int, against: str | None
) -> Prompt:
    if rubric is None and template is None:
        raise ValueError("rubric: expected a text that says what is good (or a template with that in it)")
    criteria = "" if rubric is None else _text("rubric", rubric)
    if template is None:
        return Prompt(criteria, instruction, None, max_characters)
    needed, known = (("response",), FIELDS) if against is None else (("first", "second"), PAIR_FIELDS)
    text = _text("template", template)
    check_template(text, (*needed, "rubric") if rubric is not None else needed, known)
    return Prompt(criteria, instruction, text, max_characters)


def _text(name: str, given: object) -> str:
    """A text, or what the file *.md or *.txt holds."""
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{name}: expected a text, or a file *.md or *.txt, got {given!r}")
    if not re.fullmatch(r"\S+\.(?:md|txt)", given):
        return given.strip()
    try:
        return Path(given).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: cannot read the file {given}: {error}") from error


def _body(
    max_tokens: int, temperature: float, seed: int | None, style: str, request: Mapping[str, Any] | None
) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    if style == "json":
        body["response_format"] = {"type": "json_object"}
    if request is not None and not isinstance(request, Mapping):
        raise ValueError(f"request: expected fields with their values, got {request!r}")
    for name, value in (request or {}).items():
        if name in _OUR_FIELDS:
            raise ValueError(f"request.{name}: is not to be changed here")
        body[str(name)] = value
    return {name: value for name, value in body.items() if value is not None}


def _prices(prices: Any) -> dict[str, float] | None:
    if prices is None:
        return None
    if not isinstance(prices, Mapping) or set(prices) != {"prompt", "completion"}:
        raise ValueError(f"prices: expected {{prompt: ..., completion: ...}} per million tokens, got {prices!r}")
    return {name: _number(f"prices.{name}", value, 0) for name, value in prices.items()}
