"""`creditflow why` on the ledgers of small real runs: its terms sum to the advantage in the loss."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from creditflow.credit import explain
from creditflow.engines.local import actor
from creditflow.reports.text import plain
from creditflow.runs import Ledger, RunFolder
from tests.cli.commands import creditflow, refused, toy_run

PPO = ("algorithm.adv_estimator=gae", "algorithm.outcome_to=answer")
KL = ("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.01")
FIRST_KEYS = ("algorithm.threshold_share=true", "reward.decomp_granularity=agent", *KL)
"""Keys of the first recipes, beside the toy's `reward_decomp`, `propagation_threshold` and `error_minimization`."""
MANY = ("recipe.tasks=20", "data.train_batch_size=20", "actor_rollout_ref.actor.ppo_mini_batch_size=20")


class Seen:
    """Recorder of each response token's advantage in the loss, update by update."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[dict[int, float]] = []
        tensors_of, update = actor.tensors_of, actor.Actor.update

        def of_tokens(columns, token_at, like):
            tensors = tensors_of(columns, token_at, like)
            of_loss = tensors[2].double().numpy().ravel()
            self.steps[-1].update(zip(token_at.ravel().tolist(), of_loss.tolist(), strict=True))
            return tensors

        def of_update(*args, **kwargs):
            self.steps.append({})
            return update(*args, **kwargs)

        monkeypatch.setattr(actor, "tensors_of", of_tokens)
        monkeypatch.setattr(actor.Actor, "update", of_update)


def a_run(folder: Path, *overrides: str) -> Ledger:
    return Ledger.open(toy_run(folder, "trainer.test_freq=-1", *overrides))


@pytest.mark.parametrize("estimator", [(), PPO], ids=["grpo", "gae"])
def test_terms_of_random_steps_sum_to_the_loss_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimator: tuple[str, ...]
) -> None:
    seen = Seen(monkeypatch)
    ledger = a_run(tmp_path / "run", *MANY, *FIRST_KEYS, *estimator)
    assert ledger.metrics()[-1]["actor/kl_loss"] > 0
    assert len(seen.steps) == len(ledger.steps) == 2
    recorded = list(ledger)
    every = [(k, s) for k, of in enumerate(recorded) for s in range(of.batch.n_steps)]
    in_loss = 0
    for k, s in random.Random(1).sample(every, 150):
        batch, assignment = recorded[k].batch, recorded[k].assignment
        assert assignment is not None
        start, stop = batch.token_offsets[s : s + 2]
        sampled = np.flatnonzero(batch.response_mask[start:stop]).tolist()
        for token in sampled:
            explanation = explain(assignment, s, token)
            assert explanation.replay() == explanation.advantage == assignment.token_advantages()[start + token]
            if explanation.terms:
                values = [part.value for part in explanation.terms]
                assert math.fsum([*values, explanation.rounding]) == explanation.advantage
            if (at := start + token) in seen.steps[k]:
                in_loss += 1
                assert np.float32(explanation.advantage) == seen.steps[k][at]
            else:
                assert explanation.advantage == 0.0  # updates skip tokens without an advantage
    assert in_loss > 100


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return a_run(tmp_path_factory.mktemp("why") / "run")


def why(*arguments: object) -> list[str]:
    result = creditflow("why", *arguments)
    assert result.exit_code == 0, result.stderr
    return result.stdout.splitlines()


def test_why_ends_with_the_recorded_advantage(ledger: Ledger) -> None:
    for recorded in ledger:
        assert recorded.assignment is not None
        for s in (0, 7, 15):
            lines = why(ledger.path, recorded.batch.step_ids[s], "--exact")
            assert lines[-1] == f"= {float(recorded.assignment.advantage.advantage_S[s])!r}"
            parts = [float(line.split()[-1]) for line in lines[lines.index("", lines.index("") + 1) + 2 : -1]]
            assert math.fsum(parts) == recorded.assignment.advantage.advantage_S[s]


def test_tree_contains_each_functions_raw_score(ledger: Ledger) -> None:
    batch = ledger.read(2).batch
    lines = why(ledger.path, batch.step_ids[1])
    assert lines[0].startswith(
        f"step {batch.step_ids[1]}: critic, turn 0, step 1 of trajectory {batch.trajectory_ids[0]}"
    )
    assert any(line.startswith("advantage = weight * ((credit - baseline) / divisor) = ") for line in lines)
    for name in batch.raw_scores[1]:
        assert any(f"# of {name}: " in line for line in lines), name


def test_token_option_explains_one_token(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run", *PPO)
    recorded = ledger.read(2)  # not step 1: a new critic has the same value everywhere
    assert recorded.assignment is not None
    advantage_T = recorded.assignment.token_advantages()
    lines = [why(ledger.path, recorded.batch.step_ids[0], "--token", j, "--exact") for j in (0, 1)]
    assert [of_token[-1] for of_token in lines] == [f"= {float(advantage_T[j])!r}" for j in (0, 1)]
    assert advantage_T[0] != advantage_T[1]
    assert "expected one of its sampled tokens, got token 99" in refused(
        "why", ledger.path, recorded.batch.step_ids[0], "--token", 99
    )


def test_json_output_ends_with_the_recorded_advantage(ledger: Ledger) -> None:
    recorded = ledger.read(1)
    assert recorded.assignment is not None
    facts = json.loads("".join(why(ledger.path, recorded.batch.step_ids[3], "--json")))
    assert facts["training_step"] == 1
    assert facts["rule"] == recorded.assignment.options.propagation.spec()
    assert facts["advantage"] == recorded.assignment.advantage.advantage_S[3] == facts["operations"][-1]["value"]


def test_trajectory_output_marks_the_first_error(ledger: Ledger) -> None:
    for recorded in ledger:
        assignment = recorded.assignment
        assert assignment is not None
        for n in range(recorded.batch.n_trajectories):
            lines = why(ledger.path, "--trajectory", recorded.batch.trajectory_ids[n])
            steps = np.flatnonzero(recorded.batch.trajectory_of_step == n)
            assert lines[1].startswith("rule: {rule: threshold, w_r: 1.0, ")
            assert len(lines) == 7 + len(steps)
            wrong = [s for s in steps if assignment.rewards.scored_S[s] and assignment.rewards.sub_reward_S[s] < 1]
            marked = [s for s, line in zip(steps, lines[-len(steps) :], strict=True) if line.endswith("<- first error")]
            assert marked == wrong[:1]


def test_unknown_step_or_run_is_refused_in_one_line(ledger: Ledger, tmp_path: Path) -> None:
    assert refused("why", tmp_path, "1") == f"{tmp_path}: expected the folder of a run, with a run.json in it"
    example = ledger.read(2).batch.step_ids[0]
    assert refused("why", ledger.path, "0-1-0-0/99") == (
        f"{ledger.path}: expected the id of a step, such as {example!r}; there is no '0-1-0-0/99'"
    )
    for more in ([example], ["--json"], ["--token", 0], ["--exact"]):
        message = refused("why", ledger.path, "--trajectory", "t", *more)
        assert message == "--trajectory: takes neither STEP nor --token, --json or --exact"
    RunFolder.create(tmp_path, {}, "")
    assert refused("why", tmp_path, "0-1-0-0/0") == f"{tmp_path}: no training step is on record yet"


def test_why_of_a_run_lists_notable_steps_and_explains_one(ledger: Ledger) -> None:
    assignment = ledger.read(2).assignment
    assert assignment is not None
    lines = why(ledger.path)
    largest = max(range(16), key=lambda s: abs(assignment.advantage.advantage_S[s]))
    explained = why(ledger.path, assignment.batch.step_ids[largest])
    at = lines.index("the largest advantage, up or down:") + 1
    assert lines[at : at + len(explained)] == explained
    assert explained[-1] == f"= {assignment.advantage.advantage_S[largest]:.4g}"
    assert lines[0] == "training step 2: 16 steps of 8 trajectories"
    assert lines[1].startswith("rule: {rule: threshold, w_r: 1.0, ")
    listed = {line.split()[0]: line for line in lines[4 : lines.index("", 3)]}
    trained = [
        (assignment.advantage.advantage_S[s], assignment.batch.step_ids[s])
        for s in range(16)
        if assignment.groups.trained_S[s]
    ]
    for (advantage, id), words in ((max(trained), "the highest advantage"), (min(trained), "the lowest advantage")):
        assert words in listed[id]
        assert f"{advantage:+.3f}" in listed[id]
    for id in listed:
        assert why(ledger.path, id)[0].startswith(f"step {id}: ")


def test_why_shows_each_part_in_reward_and_in_advantage(ledger: Ledger) -> None:
    assignment = ledger.read(2).assignment
    assert assignment is not None
    for s in np.flatnonzero(assignment.groups.trained_S & ~assignment.groups.tied_S)[:4].tolist():
        lines = why(ledger.path, assignment.batch.step_ids[s], "--exact")
        rows = {line.split()[0]: line.split()[-2:] for line in lines[-8:-1] if line}
        factor = assignment.advantage.weight_S[s] / assignment.advantage.divisor_S[s]
        assert rows["own"] == [f"{assignment.credit.own_S[s]:+.6g}", f"{factor * assignment.credit.own_S[s]:+}"]
        assert rows["baseline"] == [
            f"{-assignment.advantage.baseline_S[s]:+.6g}",
            f"{-factor * assignment.advantage.baseline_S[s]:+}",
        ]
        assert any(line.startswith("units: ") for line in lines)


def test_posterior_names_the_origin_of_its_probability(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run", "algorithm={propagation: posterior}")
    assignment = ledger.read(2).assignment
    assert assignment is not None
    assert assignment.fit is not None
    text = "\n".join(why(ledger.path, assignment.batch.step_ids[0]))
    rates = assignment.fit.facts["model"]["agents"]["writer"]
    place = np.digitize(assignment.rewards.sub_reward_S[0], [1e-6, 0.5, 1.0 - 1e-6])
    assert f"harmless: by the rates learned so far, {rates['harm']:.0%} of the steps of writer do harm." in text
    assert f"comes from {rates['scores'][0][place]:.0%} of the steps that do harm" in text


def test_plain_escapes_control_characters() -> None:
    assert plain("a\x1b[2Jb\nc\u202e") == "a\\x1b[2Jb\\nc\\u202e"
    assert plain("x" * 1_000_000, 5) == "xxxxx... (1,000,000 characters)"
