import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

from ray.exceptions import ActorDiedError

from creditflow.engines.verl.servers import ServedPolicy, Servers
from creditflow.errors import ConfigError, CreditflowError
from creditflow.rollout import GenerationRequest

EOS = 0


class Fleet:
    """Returns the given answers in order; raises those that are exceptions."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.asked.append((request_id, prompt_ids, sampling_params))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def output(*ids, version=3, stop="completed", logprobs=...):
    logprobs = [-1.0] * len(ids) if logprobs is ... else logprobs
    return SimpleNamespace(
        token_ids=list(ids), log_probs=logprobs, stop_reason=stop, extra_fields={"global_steps": version}
    )


def ask(fleet, temperature=1.0, max_tokens=4, versions=range(3, 4)):
    policy = ServedPolicy(fleet, SimpleNamespace(end_ids={EOS}), max_positions=64)
    params = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "logprobs": True}
    trajectory = Servers({"default": policy}, params, versions=versions, request_id="trajectory")
    request = GenerationRequest((1, 2), max_tokens, temperature, seed=(0,))
    return asyncio.run(trajectory.generate("default", request))


def test_response_of_several_versions_has_their_spans():
    spanned = output(5, 6, EOS, version=4)
    spanned.extra_fields["version_spans"] = [(0, 3), (2, 4)]
    generation = ask(Fleet(spanned), versions=range(3, 9))
    assert (generation.version, generation.version_spans) == (3, ((0, 3), (2, 4)))
    assert (generation.response_ids, generation.logprobs) == ((5, 6, EOS), (-1.0, -1.0, -1.0))
    with pytest.raises(CreditflowError, match="weights of version 3, expected at least 4"):
        ask(Fleet(spanned), versions=range(4, 9))


def test_spans_of_an_interrupted_response_leave_out_empty_parts():
    from creditflow.engines.verl.versions import version_spans

    assert version_spans([(0, 1), (3, 2), (2, 2), (0, 3), (1, 4)]) == [(0, 2), (5, 4)]
    assert version_spans([(0, 1), (0, 2)]) == [(0, 2)]


def test_call_uses_verls_sampling_and_its_own_length():
    fleet = Fleet(output(5, EOS))
    ask(fleet, max_tokens=7)
    params = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "logprobs": True, "max_tokens": 7}
    params["stop_token_ids"] = [EOS]
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 4}
    fleet.answers.append(output(5, EOS))
    ask(fleet, temperature=0.0)
    assert fleet.asked == [("trajectory", [1, 2], params), ("trajectory", [1, 2], params | greedy)]


@pytest.mark.parametrize(("ids", "reason"), [((5, 6, 7, 8), "length"), ((5, 6, 7, EOS), "stop")])
def test_full_response_without_end_token_is_cut_off(ids, reason):
    assert ask(Fleet(output(*ids))).finish_reason == reason


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (output(5, version=None), CreditflowError, "version None, expected 3"),
        (output(5, version=2), CreditflowError, "version 2, expected 3"),
        (output(stop="aborted"), CreditflowError, "aborted"),
        (output(stop="abort"), CreditflowError, "aborted"),
        (output(5, EOS, logprobs=None), CreditflowError, "expected 2 log-probabilities"),
    ],
)
def test_unusable_answer_fails_the_rollout(answer, error, message):
    with pytest.raises(error, match=message):
        ask(Fleet(answer))


def test_different_temperature_raises_config_error():
    with pytest.raises(ConfigError, match=r"temperature 0\.5"):
        ask(Fleet(), temperature=0.5)


def test_dead_server_fails_the_rollout():
    with pytest.raises(CreditflowError, match=r"policy default: a rollout server died.*run the same command again"):
        ask(Fleet(ActorDiedError()))
