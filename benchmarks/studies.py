"""The studies of credit as data: arms, cases and seeds; `benchmarks.which_credit` trains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# ---- arms ----------------------------------------------------------------------------------------------------------


def _credit(*options: str) -> tuple[str, ...]:
    return tuple(f"algorithm.{option}" for option in options)


def rewards(
    weights: Sequence[float] = (1, 1, 1), wrong: str = "null", digits: str = "digits_right", more: Sequence[str] = ()
) -> str:
    """The recipe's reward functions from `benchmarks.cases`, and `more` entries.

    `digits`: the function that scores the executor.
    """
    args = f", args: {{wrong: {wrong}}}"
    entries = ["{fn: 'arithmetic_chain.py:answer_right'}"]
    for name, weight in zip(("plan_right", digits, "verdict_right"), weights, strict=True):
        given = "" if name == "digits_of_reference" else args
        entries.append(f"{{fn: 'benchmarks/cases.py:{name}'{given}, weight: {weight}}}")
    return f"reward.functions=[{', '.join([*entries, *more])}]"


_GAIN = "{fn: information_gain, args: {cue: ' =', limit: 10}}"
"""The recipe's vocabulary has `=` before results. Gains under its small models reach 10 nats per token."""

GRPO, OWN, MAPPO, MEAN = "grpo", "own", "mappo", "mean"
GAIN, GAIN_DECOUPLED = "information gain", "information gain, decoupled"
"""Names of arms; `MEAN`: the mean of the cases, in tables."""
_MEAN_REWARD = "{rule: identical, shared_reward: outcome_plus_mean_sub_reward}"
ARMS: Mapping[str, tuple[str, ...]] = {
    GRPO: _credit("propagation=identical", "group_by=task"),
    "identical, across tasks": _credit("propagation=identical", "group_by=agent"),
    "mean sub-reward": _credit(f"propagation={_MEAN_REWARD}", "group_by=task"),
    "own score": _credit("propagation={rule: own, w_o: 0}", "group_by=agent_turn"),
    OWN: _credit("propagation=own", "group_by=agent_turn"),
    **{
        f"own, {level}": _credit("propagation=own", f"group_by={level}")
        for level in ("agent", "task", "task_agent", "task_agent_state")
    },
    "threshold": _credit("propagation={rule: threshold, outcome_to: answer}", "group_by=agent_turn"),
    "threshold, freeze": _credit(
        "propagation={rule: threshold, outcome_to: answer, on_closed_gate: freeze}", "group_by=agent_turn"
    ),
    "discounted": _credit("propagation=discounted", "group_by=agent_turn"),
    "posterior": _credit("propagation=posterior", "group_by=agent_turn"),
    "decoupled": _credit("propagation=decoupled", "group_by=agent_turn"),
    "calibrated": _credit("propagation={rule: calibrated, w_m: 0}", "group_by=task_agent"),
    "calibrated + harm": _credit("propagation=calibrated", "group_by=task_agent"),
    **{name: _credit(f"preset={name}") for name in ("dr_mas", "magrpo", "at_grpo", "gigpo", "gagpo", "irc", "mt_grpo")},
    MAPPO: (*_credit("preset=mappo"), "critic.optim.lr=1.0e-3", "critic.cliprange_value=10"),
    GAIN: (*_credit("propagation=own", "group_by=agent_turn"), rewards((0, 0, 0), more=[_GAIN])),
    GAIN_DECOUPLED: (*_credit("propagation=decoupled", "group_by=agent_turn"), rewards((0, 0, 0), more=[_GAIN])),
}
"""Options of credit by name. `grpo`: the outcome to every step, compared with the other rollouts of the task, as in
verl, TRL and Agent Lightning. `mean sub-reward`: outcome + the trajectory's mean sub-reward, likewise. `own`: a step's
own score + outcome, compared across tasks by agent and turn, the default. `own score`: without the outcome.
`decoupled`: `own` in units of spread.
`information gain`: `own`, or `decoupled`, with the gain as every step's score."""
ONLY_IN: Mapping[str, Sequence[str]] = dict.fromkeys((GAIN, GAIN_DECOUPLED), ("outcome only",))
"""The cases of arms that replace the case's reward functions; any other arm is valid in all cases."""

# ---- cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A team and its scores."""

    recipe: str
    options: tuple[str, ...] = ()
    rates: str = ""
    """The group of cases that share the tuned rate of each arm; default: the cases of the recipe."""

    @property
    def group(self) -> str:
        return self.rates or self.recipe


_ALWAYS = (
    "trainer.val_before_train=false",
    "reward.backend=inline",
    "reward.cache_size=0",
    "guard.enable=false",
    "data.train_batch_size=8",
)
"""The guard would change the credit of an arm."""
_SMALL = (
    *_ALWAYS,
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.total_training_steps=48",
    "trainer.test_freq=4",
    "trainer.test_delay=36",
)
_CHAIN = (*_SMALL, "algorithm.strata=null", "data.val_max_samples=512")
"""Without strata: their labels are made with the true results, which no arm but `exact` may read."""
_SMOLLM2 = (
    *_ALWAYS,
    "algorithm.strata=null",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
    "trainer.total_training_steps=16",
    "trainer.test_freq=2",
    "trainer.test_delay=10",
    "data.val_max_samples=100",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
)
"""Every task has a greedy rollout besides: two samples of 100 tasks cost less than one sample of 200."""

_SUMS = "reasoning-gym://chain_sum?min_terms=4&max_terms=5&min_digits=2&max_digits=2&match=%5E%5B%5E-%5D*%24"
_QWEN = (
    *_SMOLLM2,
    "actor_rollout_ref.model.path=models/qwen2.5-coder-0.5b",
    "actor_rollout_ref.model.lora_rank=16",
    f"data.train_files='{_SUMS}&size=2000'",
    f"data.val_files='{_SUMS}&size=100'",
    "actor_rollout_ref.rollout.val_kwargs.n=1",
)
"""Right in about a third of the rollouts before training; with the recipe's own sums two thirds are right."""


def _chain(*options: str, rates: str = "") -> Case:
    return Case("arithmetic_chain", (*_CHAIN, *options), rates)


_AGENTS = "planner: {system: plan}, executor: {system: exec}, verifier: {system: check}"
CHAIN_CASES: Mapping[str, Case] = {
    "exact": _chain(rewards()),
    "executor alone": _chain(rewards((0, 1, 0))),
    "outcome only": _chain(rewards((0, 0, 0)), rates="outcome only"),
    "inheriting": _chain(rewards((0, 1, 0), digits="digits_of_reference")),
    "saboteur": _chain(
        rewards((0, 1, 0)),
        "team.workflow='benchmarks/cases.py:solve_sabotaged'",
        f"team.agents={{{_AGENTS}, saboteur: {{system: exec, policy: frozen}}}}",
        "policies={default: {}, frozen: {trainable: false}}",
    ),
    "noise 20 %": _chain(rewards(wrong="binary20")),
    "noise 35 %": _chain(rewards(wrong="binary35")),
    "judge": _chain(rewards(wrong="judge")),
}
"""In order: every step is scored exactly; planner and verifier are unscored; no step is scored; the executor is scored
by the story's own chain at that place, so that its scores inherit upstream errors; planner and verifier are unscored,
and an untrained agent replaces one result in ten; the scores of all agents are binary and inverted at random, 20 % and
35 % of them; a lenient judge grades all agents (`benchmarks.cases`). `outcome only` has rates of its own: arms that are
valid there alone can be tuned on no other case."""


@dataclass(frozen=True)
class Study:
    """Cases and arms that are compared on the same seeds."""

    cases: Mapping[str, Case]
    arms: Sequence[str]
    """The arms that are trained by default."""
    rates: Mapping[str, tuple[float, ...]]
    """The first learning rates to try, by group of cases."""
    tuning_cases: Sequence[str]
    by_seed: str = ""
    """An option with the seed in it, `{seed}`."""
    tuning_options: tuple[str, ...] = ("recipe.val_split=tune",)
    """Evaluate other tasks than those that are reported."""
    seeds: Sequence[int] = range(20, 30)
    tuning_seeds: Sequence[int] = (100, 101)
    rates_of: str = ""
    """The study with the tuned rates; default: this one."""
    rate: str = ""
    """The rate of all arms, without tuning."""

    def cases_of(self, arm: str) -> list[str]:
        """The cases in which an arm is valid."""
        return [case for case in self.cases if case in ONLY_IN.get(arm, self.cases)]


_FINAL = (GRPO, "mean sub-reward", "own score", OWN, "threshold, freeze", "decoupled", GAIN, GAIN_DECOUPLED)
STUDIES: Mapping[str, Study] = {
    "small": Study(
        {**CHAIN_CASES, "tool_chain": Case("tool_chain", (*_SMALL, "data.val_max_samples=256"))},
        _FINAL,
        {**dict.fromkeys(("arithmetic_chain", "outcome only"), (1e-4, 2e-4, 4e-4)), "tool_chain": (3e-4, 6e-4, 1.2e-3)},
        ("executor alone", "outcome only", "noise 35 %", "judge", "tool_chain"),
        by_seed="recipe.warmup_seed={seed}",
    ),
    "sums": Study(
        {"sums": Case("sums_team", _SMOLLM2)},
        (GRPO, "mean sub-reward", OWN, "threshold"),
        {"sums_team": (1e-5, 2e-5, 4e-5)},
        ("sums",),
    ),
    "logic": Study(
        {"logic": Case("logic_team", (*_SMOLLM2, "actor_rollout_ref.rollout.val_kwargs.n=4"))},
        (GRPO, OWN),
        {},
        (),
        rates_of="sums",
    ),
    "qwen": Study(
        {"sums of 4 and 5 terms": Case("sums_team", _QWEN)},
        (GRPO, OWN),
        {},
        (),
        seeds=range(20, 23),
        rate="1.0e-04",
    ),
}
