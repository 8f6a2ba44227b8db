"""The reward functions `judge` and `judge_outcome`: they send a text to a judge and return a score.

Connections are opened at the first call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from creditflow._utils.sections import expected
from creditflow.data import Message, Score, Step, Trajectory
from creditflow.errors import did_you_mean
from creditflow.rewards.builtin.judge import arguments, verdict
from creditflow.rewards.builtin.judge.arguments import ChoiceValues, Pairwise, Scale, Style
from creditflow.rewards.builtin.judge.clients import EndpointJudge, JudgeClient, JudgeError, ModelJudge
from creditflow.rewards.builtin.judge.verdict import JudgeVerdict, VerdictError
from creditflow.rewards.registry import builtin, outcome, reward
from creditflow.rewards.signatures.base import NO_ANSWER
from creditflow.rewards.support.arguments import (
    Above0,
    AtLeast0,
    OptionalName,
    Whole,
    WholeAbove0,
    check_arguments,
)
from creditflow.rewards.support.text import is_missing
from creditflow.rollout import endpoint as endpoints
from creditflow.rollout.client import ModelClient
from creditflow.rollout.endpoint import EndpointUsage

_GROUND_TRUTH = "ground_truth"


@builtin
@reward(name="judge", timeout=120)
class Judge:
    """The score of a step's response by a judge model, which follows a rubric.

    Give `endpoint` or `policy`, `rubric` or `template`, and at most one of `scale`, `choices` and `pairwise`.

    `endpoint`: The address of an OpenAI-compatible server (`http://host:8000/v1`).
    `model`: The model's name on the server.
    `api_key_env`: The name of an environment variable with the key, never the key itself; without it, the key `none` is
    sent.
    `policy`: The name of a policy of the run, used with its current weights.
    `rubric`: A text, or a file `*.md` or `*.txt`.
    `template`: The same, with `{rubric}`, `{task}`, `{prompt}`, `{response}`, `{reference}` in it, for pairs with
    `{first}` and `{second}`; default: a section for each.
    `reference`: A text that is shown to the judge: `ground_truth` or a field of the task's `extra_info`.
    `scale`: Lowest and highest number, rescaled to [0, 1]; default: `[1, 10]`.
    `choices`: Words with their values in [0, 1].
    `pairwise`: The response is compared with `ground_truth` or a field of `extra_info`: 1 if it is better, 0.5 for a
    tie, else 0; the mean over both orders of the two, since judges favour a position (arXiv 2306.05685, section 3.4).
    `format`: The verdict: a last line such as `Score: 7` or `Winner: A`, or an object `{"score": 7, "reason": ...}`.
    `max_characters`: Limit of each judged text; the middle of a longer one is left out.
    `max_tokens`: Limit of the reply; one that is cut off is `failed`.
    `temperature`: Sampling temperature of the judge.
    `seed`: Seed of the request; null: none is sent.
    `max_concurrency`: Requests at a time, or batch size of a policy; judges that share a policy use the smallest.
    `request_timeout`: Seconds for each try. This and the following are for an endpoint.
    `retries`: Further tries after 429, 5xx, a broken connection or a time-out.
    `backoff`: Seconds: the n-th wait is drawn from 0 to backoff * 2^(n-1), after the server's Retry-After.
    `give_up_after`: Seconds after which no try begins. With `request_timeout` it should stay below the entry's
    `timeout`, so that the reason given is the judge's.
    `request`: Other fields of the request; null removes one: `{max_tokens: null, max_completion_tokens: 800}`.
    `prices`: `{prompt: ..., completion: ...}` per million tokens, for the metric `cost`.

    Texts by others stand between tags with a mark that none of them holds. A reply without exactly one verdict on the
    scale is `failed`, and so is a judge that cannot be reached; a judge that does not answer in time is `timeout`.
    Redirects of an endpoint are not followed, and at most 2 MB of an answer are read.

    Range: 0 to 1. Cost: one request per step, two if pairwise; the metrics `reward/judge/...` have requests, tokens,
    cost and latency. Source: Zheng et al., Judging LLM-as-a-Judge, arXiv 2306.05685.
    """

    text_arguments = ("rubric", "template")
    connect: Callable[[Mapping[str, ModelClient]], None]
    """Receives the run's policies; present only if the judge is a policy of the run. Raises ValueError if the run has
    no policy of that name.
    """

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        model: str | None = None,
        api_key_env: str | None = None,
        policy: OptionalName = None,
        rubric: str | None = None,
        template: str | None = None,
        reference: OptionalName = None,
        scale: Scale = None,
        choices: ChoiceValues | None = None,
        pairwise: Pairwise = None,
        format: Style = "line",
        max_characters: WholeAbove0 = 20_000,
        max_tokens: WholeAbove0 = 512,
        temperature: AtLeast0 = 0.0,
        seed: Whole | None = 0,
        max_concurrency: WholeAbove0 = 64,
        request_timeout: Above0 = 30.0,
        retries: Whole = 4,
        backoff: AtLeast0 = 0.5,
        give_up_after: Above0 = 85.0,
        request: Annotated[Mapping[Any, Any] | None, expected("fields with their values")] = None,
        prices: Mapping[str, AtLeast0] | None = None,
    ) -> None:
        endpoints.refuse_secrets(locals())
        arguments.one_of(endpoint=endpoint, policy=policy)
        arguments.one_of(scale=scale, choices=choices, pairwise=pairwise, needed=False)
        check_arguments(Judge.__init__, locals())
        if prices is not None and set(prices) != {"prompt", "completion"}:
            raise ValueError(f"prices: expected {{prompt: ..., completion: ...}} per million tokens, got {prices!r}")

        self.style = format
        self.reference = reference
        self.against = None if pairwise is None else pairwise["against"]
        self.form = arguments.form_of(scale, choices, self.against is not None)
        self.prices = prices
        self.prompt = arguments.prompt_of(
            rubric, template, verdict.instruction(self.form, format), max_characters, self.against
        )
        if self.reference and self.against:
            raise ValueError("reference: where pairwise compares with a text, that is the reference")
        if self.prompt.template and ("{reference}" in self.prompt.template) != (self.reference is not None):
            raise ValueError("reference: expected both it and {reference} in the template, or neither")

        self.version_text = repr(self.prompt)
        self.policy = policy
        self.inline = endpoint is None
        self.client: JudgeClient
        if endpoint is not None:
            if not model:
                raise ValueError(f"model: expected the model's name as the endpoint knows it, got {model!r}")
            address, variable = endpoints.address_of(endpoint), endpoints.variable_name(api_key_env)
            endpoints.expect_packages()
            endpoints.expect_set(variable)
            self.client = EndpointJudge(
                url=address,
                model=model,
                api_key_env=variable,
                body=arguments.body_of(max_tokens, temperature, seed, format, request),
                max_concurrency=max_concurrency,
                request_timeout=request_timeout,
                retries=retries,
                backoff=backoff,
                give_up_after=give_up_after,
            )
            return
        for name, value in (("model", model), ("api_key_env", api_key_env), ("prices", prices), ("request", request)):
            if value is not None:
                raise ValueError(f"{name}: only an endpoint has one")
        self.connect = self._connect
        self.client = ModelJudge(str(policy), max_tokens, temperature, seed or 0, max_concurrency)

    def _connect(self, clients: Mapping[str, ModelClient]) -> None:
        assert self.policy is not None
        assert isinstance(self.client, ModelJudge)
        if self.policy not in clients:
            raise ValueError(
                f"judge: policy: {self.policy!r} is no policy of the run{did_you_mean(self.policy, clients)}; "
                f"there are {', '.join(clients) or 'none'}"
            )
        self.client.model = clients[self.policy]

    async def __call__(self, step: Step, trajectory: Trajectory) -> Score:
        """The score of the step's response."""
        return await self._judge(trajectory, step.response, step.prompt)

    def cache_key(self, step: Step, trajectory: Trajectory) -> str:
        """The questions, word for word, and the identity of the judge."""
        return self._key(trajectory, step.response, step.prompt)

    def metrics(self) -> dict[str, float]:
        """Counts and sums since the previous call.

        `requests`, `retries`, `answered`; for answered requests `latency_sum_s`, `latency_max_s`, `prompt_tokens` and
        `completion_tokens`; `replies_without_usage` if there were any; with prices, `cost` in their currency. Sums can
        be added up over processes; the mean latency is `latency_sum_s / answered`.
        """
        counts, self.client.counts = self.client.counts, EndpointUsage()
        return counts.metrics(self.prices)

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        await self.client.aclose()

    async def _judge(self, trajectory: Trajectory, response: str, prompt: str = "") -> Score:
        try:
            questions = self._questions(trajectory, response, prompt)
            # Wait for both orders, even if the first fails, so that no request is left running.
            verdicts = await asyncio.gather(*map(self._verdict, questions), return_exceptions=True)
        except JudgeError as error:
            return Score(0.0, status=error.status, reason=str(error))
        for answer in verdicts:
            if isinstance(answer, JudgeError | VerdictError):
                return Score(0.0, status=getattr(answer, "status", "failed"), reason=str(answer))
            if isinstance(answer, BaseException):
                raise answer
        return self._score([answer for answer in verdicts if isinstance(answer, JudgeVerdict)])

    def _score(self, verdicts: Sequence[JudgeVerdict]) -> Score:
        if self.against is None:
            return Score(verdicts[0].value, reason=verdicts[0].reason)
        first, second = verdicts
        half = verdict.REASON_CHARACTERS // 2 - len("as A:  ")
        reason = f"as A: {first.reason[:half]} as B: {second.reason[:half]}"
        return Score((first.value + 1.0 - second.value) / 2, reason=reason)

    async def _verdict(self, messages: Sequence[Message]) -> JudgeVerdict:
        return verdict.read(await self.client.ask(messages), self.form, self.style)

    def _questions(self, trajectory: Trajectory, response: str, prompt: str) -> list[list[Message]]:
        """One question, or one for each order of two responses. Raises JudgeError if the task lacks a text."""
        material = {"task": trajectory.task.text}
        if prompt:
            material["prompt"] = prompt
        if self.against is not None:
            other = _from_task(trajectory, self.against)
            pairs = ((response, other), (other, response))
            return [self.prompt.messages({**material, "first": first, "second": second}) for first, second in pairs]
        if self.reference is not None:
            material["reference"] = _from_task(trajectory, self.reference)
        return [self.prompt.messages({**material, "response": response})]

    def _key(self, trajectory: Trajectory, response: str, prompt: str = "") -> str:
        try:
            questions: Any = self._questions(trajectory, response, prompt)
        except JudgeError as error:
            questions = str(error)
        return json.dumps([self.client.identity(), questions])


@builtin
@outcome(name="judge_outcome", timeout=120)
class JudgeOutcome(Judge):
    """The score of a trajectory's answer by a judge model, as its outcome; without an answer 0, and no request.

    Its arguments are those of `judge`.
    Range: 0 to 1. Cost: one request, two if pairwise. Source: as for `judge`.
    """

    async def __call__(self, trajectory: Trajectory) -> Score:  # type: ignore[override]
        """The score of the trajectory's answer."""
        if trajectory.answer is None:
            return Score(0.0, reason=NO_ANSWER)
        return await self._judge(trajectory, trajectory.answer)

    def cache_key(self, trajectory: Trajectory) -> str:  # type: ignore[override]
        """See `judge`."""
        return NO_ANSWER if trajectory.answer is None else self._key(trajectory, trajectory.answer)


def _from_task(trajectory: Trajectory, name: str) -> str:
    task = trajectory.task
    value = task.ground_truth if name == _GROUND_TRUTH else task.extra_info.get(name)
    if is_missing(value):
        raise JudgeError(f"the task has no {name}" + ("" if name == _GROUND_TRUTH else " in its extra_info"))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
