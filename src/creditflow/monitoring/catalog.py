"""Catalog of the engines' metrics, with unit and meaning: the one place that documents and checks their names.

A name in angle brackets is a placeholder for a name of the run: `<agent>`, `<function>`, `<policy>`, `<name>`. If
several policies are trained, the metrics of an update are prefixed with the policy's name: `<policy>/actor/entropy`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from creditflow.errors import ConfigError, did_you_mean

PER_UPDATE = ("actor/", "critic/")
"""Prefixes of the metrics that carry a policy's name if several are trained."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table in docs/reference/metrics.md."""

    name: str
    unit: str
    meaning: str
    engine: str = ""
    """The only engine with this metric, `local` or `verl`; empty for both."""


def _section(prefix: str, *rows: tuple[str, str, str] | tuple[str, str, str, str]) -> list[Metric]:
    return [Metric(f"{prefix}/{row[0]}", *row[1:]) for row in rows]


_OF_EVALUATION = (
    ("pass_at_1", "share", "mean over trajectories of whether the outcome reached the top of its range (avg@n)"),
    (
        "pass_at_<k>",
        "share",
        "unbiased pass@k, k = 2, 4, ... up to the trajectories of a task (arXiv 2107.03374, eq. 1)",
    ),
    ("trajectories", "trajectories", "that `pass_at_1` is the mean over"),
    ("outcome_mean", "outcome", "mean outcome, rescaled to [0, 1], of the trajectories that have one"),
    ("unscored_frac", "share", "trajectories without an outcome"),
    ("sub_reward/<agent>", "[0, 1]", "mean sub-reward"),
    ("sub_reward/<agent>/<stratum>", "[0, 1]", "the same, by stratum"),
    ("sub_reward_var/<agent>", "", "its variance"),
    ("step_error_rate", "share", "scored steps with a score short of its maximum"),
    ("step_error_rate/<agent>", "share", "the same, of an agent's steps"),
    ("pass_at_1_greedy", "share", "`pass_at_1` of one greedy trajectory of each task"),
    ("step_error_rate_greedy", "share", "`step_error_rate` of those"),
)

METRICS: list[Metric] = [
    *_section(
        "train", ("pass_at_1", "share", "trajectories of the training step whose outcome reached the top of its range")
    ),
    *_section("val", *_OF_EVALUATION),
    *_section(
        "actor",
        (
            "entropy",
            "nats/token",
            "mean entropy over trained tokens; where none had an advantage, estimated from the sampled ones",
        ),
        ("ppo_kl", "nats/token", "mean of old minus new log-probability: how far the updates of a step have moved"),
        ("pg_loss", "", "policy loss"),
        ("pg_clipfrac", "share", "tokens whose ratio was clipped"),
        ("pg_clipfrac_lower", "share", "tokens that dual clip bounded"),
        ("kl_loss", "nats/token", "KL to the reference, with `use_kl_loss`"),
        ("grad_norm", "", "norm of the gradient, before clipping"),
        ("lr", "", "learning rate"),
        ("skipped_updates", "updates", "left out because the gradient was not finite (local: share of the step's)"),
    ),
    *_section(
        "critic",
        ("vf_loss", "", "value loss"),
        ("vf_clipfrac", "share", "values that were clipped"),
        ("vpred_mean", "credit", "mean value"),
        ("vf_explained_var", "share", "variance of its returns that the critic explains"),
        ("credit_explained_var", "share", "variance of the credit itself that the critic explains"),
        ("grad_norm", "", "norm of the gradient, before clipping"),
        ("lr", "", "learning rate"),
        ("skipped_updates", "updates", "left out because the gradient was not finite"),
    ),
    *_section(
        "reward",
        ("<function>/mean", "own", "mean of its ok scores, in the function's own range"),
        ("<function>/sd", "own", "standard deviation of those"),
        ("<function>/failed_frac", "share", "scores that failed, time-outs included"),
        ("<function>/scores", "scores", "that it was to give"),
        ("<function>/timeouts", "calls", "timed out"),
        ("<function>/cached", "calls", "answered without being made"),
        ("<function>/latency_s", "s", "mean of a call that was made"),
        ("<function>/<name>", "", "what the function counts itself"),
        ("failed_frac", "share", "of all scores, those that failed"),
        ("error_rate", "share", "verdicts that failed or contradict the outcome, see below"),
        ("verdicts", "verdicts", "that `error_rate` is a share of"),
        (
            "judged_trajectories",
            "trajectories",
            "that those are of: verdicts of one trajectory stand and fall together",
        ),
        (
            "agreement",
            "share",
            "of pairs of a right and a wrong trajectory of one task, the right one scored better, see below",
        ),
        ("agreement_over", "tosses", "of a coin that would tell as much as those pairs"),
        ("sub_reward/<agent>", "[0, 1]", "mean sub-reward"),
        ("sub_reward/<agent>/<stratum>", "[0, 1]", "the same, by stratum"),
        ("sub_reward_var/<agent>", "", "its variance; at most 0.25"),
        ("step_error_rate", "share", "scored steps with a score short of its maximum"),
        ("step_error_rate/<agent>", "share", "the same, of an agent's steps"),
    ),
    *_section(
        "credit",
        ("mean/<agent>", "credit", "mean credit of trained steps"),
        ("share/<agent>", "share", "of all credit of trained steps, in absolute value, the agent's"),
        ("mis_credited/<agent>", "share", "trained, scored steps whose advantage has the wrong sign for their scores"),
        ("gated_off/<agent>", "share", "credit that came to the agent's gates, in absolute value, and was withheld"),
        ("reach/<agent>", "share", "trajectories in which any signal reaches the agent"),
        ("outcome_reach/<agent>", "share", "trajectories in which the outcome reaches it"),
    ),
    *_section(
        "propagation",
        ("pass_rate", "share", "open gates, of steps that a function was to score"),
        ("pass_rate/<agent>", "share", "the same, by agent"),
        ("moved", "share", "of credit, the part received from other steps; 0: the same credit as `none`"),
        ("forced_open/<agent>", "share", "gates that were opened to keep the threshold's floor"),
        ("threshold", "[0, 1]", "what an agent never seen gets"),
        ("threshold/<agent>", "[0, 1]", "the threshold in force"),
        ("threshold_lowered", "0 or 1", "`tuned`: it has been lowered"),
        ("threshold_spread/<agent>", "", "`noise`: the smoothed standard deviation within groups"),
        ("threshold_pass_rate/<agent>", "share", "`quantile`: smoothed, before the floor opens anything"),
        ("threshold_saturated/<agent>", "0 or 1", "`quantile`: no threshold in the range comes near the target"),
    ),
    *_section(
        "groups",
        ("singletons", "groups", "of one trajectory"),
        ("zero_variance", "groups", "whose credits are all the same"),
        ("no_baseline", "steps", "alone at every level"),
        ("masked_steps", "steps", "left out of training"),
        ("frozen_steps", "steps", "left out because they lie upstream of a failure"),
        ("alone/<agent>", "share", "trained steps that were alone at `group_by`"),
        ("tied/<agent>", "share", "trained steps of groups without variance"),
        ("frozen/<agent>", "share", "steps that are frozen"),
    ),
    *_section(
        "rollout",
        ("steps_per_trajectory", "steps", "mean"),
        ("tokens", "tokens", "of prompts and responses"),
        ("response_tokens", "tokens", "of responses"),
        ("failed_frac", "share", "trajectories that failed by no fault of the agents"),
        ("truncated_frac", "share", "trajectories that were cut short"),
        ("agent_error_frac", "share", "trajectories that the agents' own doing ended"),
        ("timeout_frac", "share", "rollouts that took longer than `rollout.timeout_s`"),
        ("tool_calls", "calls", "of tools, a trajectory; where there are any"),
        ("tool_failed_frac", "share", "of those, the ones that gave an error or took too long"),
        (
            "illegal_frac",
            "share",
            "steps of environments in which the agent chose no legal action; where there are any",
        ),
        ("gen_batches", "batches", "that dynamic sampling took", "local"),
        ("filtered_frac", "share", "trajectories that dynamic sampling left out", "local"),
        ("counterfactual_rollouts", "rollouts", "made to measure Shapley values", "local"),
        ("counterfactual_failed_frac", "share", "of those, that came to no outcome", "local"),
        ("lost_frac", "share", "trajectories that left no record", "verl"),
        ("replayed_rollouts", "rollouts", "made once more because rollout servers died", "verl"),
    ),
    *_section(
        "shadow",
        ("moved/<agent>", "share", "how different the shadow's credit is, `sum |c' - c| / sum (|c'| + |c|)`"),
        ("flipped/<agent>", "share", "steps whose advantage would have had the other sign"),
    ),
    *_section(
        "guard",
        ("on/<rule>", "0 or 1", "the rule fired, and has not recovered"),
        ("fallback", "0 or 1", "credit is the shared global reward for now"),
        ("rollbacks", "rollbacks", "to a checkpoint, so far"),
    ),
    *_section(
        "timing",
        ("step_s", "s", "a training step"),
        ("rollout_s", "s", "rollouts"),
        ("reward_s", "s", "scoring; verl: summed over the workers, beside rollouts"),
        ("reward_s/<function>", "s", "summed over the function's calls"),
        ("counterfactual_s", "s", "counterfactual rollouts", "local"),
        ("values_s", "s", "the critic's values"),
        ("propagation_s", "s", "credit and advantages"),
        ("update_s", "s", "updates of actors and critics"),
        ("ledger_s", "s", "writing the step file"),
        ("metrics_s", "s", "computing these metrics", "local"),
        ("<name>_s", "s", "verl's own clocks", "verl"),
    ),
    *_section(
        "memory",
        ("peak_gib", "GiB", "resident memory of the trainer's process, the step's highest"),
        ("cuda_peak_gib", "GiB", "of the device, the step's highest", "local"),
    ),
    *_section(
        "throughput",
        ("tokens_per_s", "tokens/s", "of prompts and responses, over the whole step", "local"),
        ("response_tokens_per_s", "tokens/s", "sampled, over the time of rollouts", "local"),
    ),
    *_section("endpoint", ("<policy>/<name>", "", "what a frozen model's client counted: requests, retries, tokens")),
]


@dataclass(frozen=True, slots=True)
class Names:
    """The names that a recipe defines: the possible values of the placeholders."""

    agents: Sequence[str] = ()
    functions: Sequence[str] | None = None
    """None if not known yet."""
    policies: Sequence[str] = ()
    rules: Sequence[str] = ()
    engine: str = ""
    """`local` or `verl`; empty for the metrics of both."""

    def expand(self, placeholder: str) -> Sequence[str] | None:
        """The possible values of a placeholder; None if any value fits."""
        known = {"agent": self.agents, "function": self.functions, "policy": self.policies, "rule": self.rules}
        return known.get(placeholder)


def described(name: str, names: Names) -> Metric | None:
    """The catalog entry of a full metric name, or None. `*` fits any name in its position."""
    policy, _, rest = name.partition("/")
    if (policy == "*" or policy in names.policies) and rest.startswith(PER_UPDATE):
        name = rest
    # Without an engine, entries of both engines are candidates.
    here = [entry for entry in METRICS if not names.engine or entry.engine in ("", names.engine)]
    return next((entry for entry in here if _fits(entry.name, name, names)), None)


def expect_known(metric: str, names: Names, key: str) -> Metric:
    """The catalog entry of `metric`. Raises ConfigError with the nearest known name for an unknown metric."""
    found = described(metric, names)
    if found is None:
        raise ConfigError(f"{key}: unknown metric {metric!r}{did_you_mean(metric, _spelled_out(names))}")
    return found


def _fits(pattern: str, name: str, names: Names) -> bool:
    parts, said = pattern.split("/"), name.split("/")
    if len(parts) != len(said):
        return False
    for part, word in zip(parts, said, strict=True):
        blank = re.fullmatch(r"(.*)<(\w+)>(.*)", part)
        if blank is None:
            if part != word:
                return False
            continue
        before, placeholder, after = blank.groups()
        if not (word.startswith(before) and word.endswith(after) and len(word) > len(before) + len(after)):
            return False
        filling = word[len(before) : len(word) - len(after)]
        known = names.expand(placeholder)
        if placeholder == "k" and not filling.isdigit():
            return False
        if filling != "*" and known is not None and filling not in known:
            return False
    return True


def _spelled_out(names: Names) -> list[str]:
    """Every metric name of the catalog, with the recipe's names filled in."""
    found: list[str] = []
    for entry in METRICS:
        blank = re.search(r"<(\w+)>", entry.name)
        known = names.expand(blank[1]) if blank else None
        found += [entry.name.replace(blank[0], word, 1) for word in known or ()] if blank else [entry.name]
        found += [entry.name] if blank else []
    if len(names.policies) > 1:
        found += [f"{policy}/{name}" for policy in names.policies for name in found if name.startswith(PER_UPDATE)]
    return found


def matching(metric: str, names_in_metrics: Iterable[str]) -> list[str]:
    """The names that match `metric`, which may contain `*`, with or without a policy's prefix."""
    pattern = re.escape(metric).replace(r"\*", "[^/]+")
    if metric.startswith(PER_UPDATE):
        pattern = f"(?:[^/]+/)?{pattern}"
    found = re.compile(pattern)
    return [name for name in names_in_metrics if found.fullmatch(name)]


def undescribed(metrics: Mapping[str, float], names: Names) -> list[str]:
    """The metric names missing from the catalog; a test checks that no engine writes such a metric of ours."""
    return [name for name in metrics if described(name, names) is None]


def as_markdown() -> str:
    """The table of docs/reference/metrics.md."""
    rows = ["| metric | unit | meaning |", "| --- | --- | --- |"]
    rows += [
        f"| `{entry.name}` | {entry.unit} | {entry.meaning}{f' ({entry.engine} only)' if entry.engine else ''} |"
        for entry in METRICS
    ]
    return "\n".join(rows) + "\n"
