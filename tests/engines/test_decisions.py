"""Values of single decisions: against known probabilities, and measured in training."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.credit import assign
from creditflow.data import Message, Trajectory, TrajectoryBatch
from creditflow.engines.common.components import Components, build_components
from creditflow.engines.local.decisions import (
    ChosenDecisions,
    MeasuredDecisions,
    MeasuringRollouts,
    choose_decisions,
    measure_decisions,
)
from creditflow.engines.local.fidelity import decision_candidates
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.trainer import train
from creditflow.engines.local.values import fidelity
from creditflow.errors import ConfigError, TooManyFailedScores
from creditflow.rollout import ChatClient, ChatReply, Rollout, run_rollouts
from creditflow.runs import Ledger
from tests.builders import batch_of, credit_options, examples, make_trajectory, step
from tests.paths import TOY

GOOD_DRAFT, RIGHT = 0.5, {"good": 0.9, "bad": 0.2}
"""The writer's probability of a good draft, and the critic's of a right answer for each draft."""


class ScriptedTeam(ChatClient):
    """Answers as writer or critic with fixed probabilities, from the call's seed."""

    def __init__(self) -> None:
        self.calls = 0

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: tuple[int, ...]
    ) -> ChatReply:
        self.calls += 1
        draw = np.random.default_rng(seed).random()
        if messages[0]["content"] == "Write.":
            text = "good" if draw < GOOD_DRAFT else "bad"
        else:
            text = "yes" if draw < RIGHT[messages[-1]["content"].split()[-1]] else "\x00"
        return ChatReply(text, "stop", 10, 3)

    async def aclose(self) -> None:
        """Close nothing."""


@pytest.fixture
def components() -> Components:
    built = build_components(load_recipe(TOY, ["reward.backend=inline"]), tasks=False)
    return replace(built, chat_clients={"default": ScriptedTeam()})


async def recorded_team(components: Components, n: int) -> list[Trajectory]:
    rollouts = MeasuringRollouts(components, PolicySet({}, {}, {}))
    task = build_components(load_recipe(TOY)).train_tasks[0]
    jobs = [Rollout(task, "u", f"t{k}", (0, k)) for k in range(n)]
    sampling = components.sampling
    trajectories = await run_rollouts(jobs, components.workflow, components.agents, rollouts.scheduler, sampling)
    await components.rewards.score(trajectories, outcome_only=True)
    return trajectories


async def measured(components: Components, trajectories: list[Trajectory], k: int, key: int) -> MeasuredDecisions:
    batch = TrajectoryBatch.from_trajectories(trajectories)
    rollouts = MeasuringRollouts(components, PolicySet({}, {}, {}))
    chosen = ChosenDecisions(np.arange(batch.n_steps), 1.0)
    async with components.rewards.open({}):
        return await measure_decisions(rollouts, batch, trajectories, chosen, k, (key,))


def true_values(trajectory: Trajectory) -> list[float]:
    draft = trajectory.steps[0].response
    before = GOOD_DRAFT * RIGHT["good"] + (1 - GOOD_DRAFT) * RIGHT["bad"]
    return [RIGHT[draft] - before, float(trajectory.steps[1].response == "yes") - RIGHT[draft]]


def test_values_approach_the_true_ones(components: Components) -> None:
    async def main() -> tuple[list[Trajectory], MeasuredDecisions]:
        trajectories = await recorded_team(components, 4)
        return trajectories, await measured(components, trajectories, 150, 1)

    trajectories, result = asyncio.run(main())
    true_D = np.array([value for one in trajectories for value in true_values(one)])
    z_D = (result.values.value_D - true_D) / result.values.error_D
    assert np.abs(z_D).max() < 4
    assert result.values.error_D.max() < 0.06
    assert (result.refused, result.failed) == (0, 0)
    # Both prefixes of each writer's step are continued, and one of each critic's step; the other is replayed once.
    assert result.continuations == 4 * (3 * 150 + 1)
    assert result.tokens == 3 * 4 * 150 * (1 + 2 + 1)  # three tokens a call
    best = fidelity(true_D, result.values)
    assert best.correlation.value > 0.7


def test_values_depend_on_the_key_alone(components: Components) -> None:
    async def main() -> list[MeasuredDecisions]:
        trajectories = await recorded_team(components, 2)
        both, alone = trajectories, trajectories[1:]
        return [await measured(components, some, 5, key) for some, key in ((both, 1), (both, 1), (alone, 1), (both, 2))]

    one, same, alone, other = asyncio.run(main())
    np.testing.assert_array_equal(one.values.before_DK, same.values.before_DK)
    np.testing.assert_array_equal(one.values.before_DK[2:], alone.values.before_DK)
    assert (one.values.before_DK != other.values.before_DK).any()


def test_failing_continuations_are_counted(components: Components) -> None:
    async def main() -> MeasuredDecisions:
        trajectories = await recorded_team(components, 2)
        return await measured(replace(components, workflow=broken), trajectories, 2, 1)

    async def broken(task, team):
        await team.writer(task.text)
        raise OSError("the tool is gone")

    result = asyncio.run(main())
    # The critic's step is never reached, so its replay is refused; the workflow fails in all other continuations.
    assert (result.continuations, result.failed, result.refused) == (14, 12, 2)
    assert "the workflow ended before it" in result.first_refusal
    assert not np.isfinite(result.values.value_D).any()
    with pytest.raises(TooManyFailedScores, match=r"12 of 14 continuations failed.*the tool is gone"):
        result.expect_few_failures(0.5)
    result.expect_few_failures(0.9)


def test_values_need_an_outcome_function(components: Components) -> None:
    steps_only = load_recipe(TOY, ["reward.functions=[{fn: toy.py:compute_decomposed_reward}]"])
    built = replace(build_components(steps_only, tasks=False), chat_clients=components.chat_clients)
    trajectory = make_trajectory("p", [step("writer", 1.0)], outcome=1.0)
    with pytest.raises(ConfigError, match=r"reward.functions: expected an outcome function"):
        asyncio.run(measured(built, [trajectory], 2, 1))


lengths = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=6)


def batch_with(lengths: list[list[int]]) -> TrajectoryBatch:
    return batch_of(
        *(
            make_trajectory(f"p{n}", [step("a", 1.0, tokens=tokens) for tokens in own], outcome=1.0)
            for n, own in enumerate(lengths)
        )
    )


def expected_costs(lengths: list[list[int]], k: int) -> list[int]:
    """Tokens of k continuations from before and after each step."""
    return [k * (sum(own[t:]) + sum(own[t + 1 :])) for own in lengths for t in range(len(own))]


@examples(60)
@given(lengths, st.integers(2, 5), st.integers(0, 400), st.integers(1, 30), st.integers(0, 9))
def test_choice_keeps_the_budget_on_average(lengths, k, budget, most, seed) -> None:
    batch, cost = batch_with(lengths), expected_costs(lengths, k)
    candidate_S = np.arange(batch.n_steps) % 3 != 1
    chosen = choose_decisions(batch, candidate_S, k, most, budget, np.random.default_rng(seed))
    count, candidates = len(chosen.step_D), int(candidate_S.sum())
    assert len(set(chosen.step_D.tolist())) == count <= min(most, candidates)
    assert candidate_S[chosen.step_D].all()
    assert chosen.probability == count / candidates
    mean = np.mean([one for one, can in zip(cost, candidate_S, strict=True) if can])
    assert count * mean <= budget
    assert count == min(most, candidates) or (count + 1) * mean > 0.9 * budget


def test_choice_draws_candidates_with_the_stated_probability() -> None:
    batch = batch_with([[1, 9, 2], [3, 3], [7, 1, 1, 1]])
    drawn_S, times = np.zeros(batch.n_steps), 4000
    for seed in range(times):
        chosen = choose_decisions(
            batch, np.ones(batch.n_steps, dtype=bool), 2, 4, math.inf, np.random.default_rng(seed)
        )
        drawn_S[chosen.step_D] += 1
    assert chosen.probability == pytest.approx(4 / 9)
    nothing = choose_decisions(batch, np.zeros(batch.n_steps, dtype=bool), 2, 4, math.inf, np.random.default_rng(0))
    assert (len(nothing.step_D), nothing.probability) == (0, 0.0)
    assert np.abs(drawn_S / times - 4 / 9).max() < 4 * math.sqrt(4 / 9 * 5 / 9 / times)


def test_audit_candidates_are_trained_steps_with_an_outcome() -> None:
    trajectories = [
        make_trajectory(id, [step("planner", 1.0), step("executor", 0.5)], outcome)
        for id, outcome in (("t", 1.0), ("other", 0.0), ("unscored", None))
    ]
    a = assign(batch_of(*trajectories), credit_options())
    candidates = np.flatnonzero(decision_candidates(a, ["planner"]))
    assert [a.batch.step_ids[s] for s in candidates] == ["t.0", "other.0"]


def a_run(folder: Path, *overrides: str) -> Ledger:
    options = [f"trainer.default_local_dir={folder}", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    options += ["data.train_batch_size=4", "reward.backend=inline"]
    return Ledger.open(train(load_recipe(TOY, [*options, *overrides]), Reporter()).path)


AUDITED = ("audit.every=1", "audit.max_token_frac=0.9", "audit.continuations=2")


def measurements(ledger: Ledger) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if name.startswith(("audit/", "credit/fidelity"))}
        for row in ledger.metrics()
    ]


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return a_run(tmp_path_factory.mktemp("audited") / "run", *AUDITED)


def test_audit_changes_no_number_of_the_training(audited: Ledger, tmp_path: Path) -> None:
    plain = a_run(tmp_path / "plain")
    for recorded, other in zip(plain, audited, strict=True):
        assert recorded.assignment is not None
        assert other.assignment is not None
        np.testing.assert_array_equal(recorded.assignment.advantage.advantage_S, other.assignment.advantage.advantage_S)
    for row, same in zip(plain.metrics(), audited.metrics(), strict=True):
        assert row["actor/grad_norm"] == same["actor/grad_norm"]
        assert "timing/audit_s" in same
    assert not any(measurements(plain))


def test_audit_stays_within_its_share(audited: Ledger) -> None:
    generated = used = 0.0
    for row, own in zip(audited.metrics(), measurements(audited), strict=True):
        generated += row["rollout/response_tokens"]
        used += own["audit/tokens"]
        assert own["audit/tokens_frac"] == used / generated
        assert own["audit/tokens_frac"] <= 0.9
        assert own["audit/decisions"] >= 2
        assert own["audit/refused_frac"] == own["audit/failed_frac"] == 0
        assert -1 <= own["credit/fidelity"] <= 1


def test_audit_repeats_and_continues_its_account_after_a_resume(audited: Ledger, tmp_path: Path) -> None:
    a_run(tmp_path / "parts", *AUDITED, "trainer.total_training_steps=1")
    assert measurements(a_run(tmp_path / "parts", *AUDITED)) == measurements(audited)


def test_audit_in_a_fallback_measures_the_recipes_own_rule(tmp_path: Path) -> None:
    rule = "{metric: rollout/response_tokens, above: 0, window: 1, action: ACTION}"
    result = {}
    for action in ("warn", "fallback_identical"):
        ledger = a_run(tmp_path / action, *AUDITED, "audit.every=2", f"guard.rules.f={rule.replace('ACTION', action)}")
        before, result[action] = measurements(ledger)
        assert before == {}  # audit.every: 2
    assert result["fallback_identical"] == result["warn"]
    fallen = ledger.read(2).assignment
    assert fallen is not None
    assert fallen.options.propagation.name == "identical"
    assert fallen.options.propagation != load_recipe(TOY).config.credit.propagation


def test_audit_without_tokens_to_spend_measures_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = measurements(a_run(tmp_path / "run", "audit.every=2", "audit.max_token_frac=0.01"))
    assert result[1] == {
        f"audit/{name}": 0.0 for name in ("decisions", "refused_frac", "failed_frac", "tokens", "tokens_frac")
    }
    assert "no decision fits into audit.max_token_frac yet" in capsys.readouterr().err
