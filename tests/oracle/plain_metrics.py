"""Metrics of trajectories, computed object by object: slow, obvious, without code of `creditflow.monitoring`."""

from collections import defaultdict
from itertools import combinations

RIGHT = 1.0 - 1e-9


def mean(values):
    return sum(values) / len(values)


def rescaled(score, step=None):
    """The score rescaled to [0, 1]; a token score counts as its mean over the sampled tokens, else over all."""
    value = score.value
    if isinstance(value, tuple):
        sampled = [v for v, m in zip(value, step.response_mask, strict=True) if m]
        value = mean(sampled or value)
    low, high = score.range
    return (value - low) / (high - low)


def ok_scores(step):
    return [score for score in step.scores.values() if score.status == "ok"]


def sub_reward(step):
    """The weighted mean of the step's ok scores; the plain mean if all weights are 0; None without ok scores."""
    scores = ok_scores(step)
    if not scores:
        return None
    weights = [score.weight for score in scores]
    if not any(weights):
        weights = [1.0] * len(scores)
    return sum(rescaled(s, step) * w for s, w in zip(scores, weights, strict=True)) / sum(weights)


def is_wrong(step):
    """Whether any ok score of the step is below the maximum; None without ok scores."""
    return any(rescaled(score, step) < RIGHT for score in ok_scores(step)) if ok_scores(step) else None


def rollout_metrics(trajectories):
    n = len(trajectories)
    steps = [step for t in trajectories for step in t.steps]
    return {
        "rollout/steps_per_trajectory": len(steps) / n,
        "rollout/response_tokens": sum(len(step.response_ids) for step in steps),
        "rollout/tokens": sum(len(step.response_ids) + len(step.prompt_ids) for step in steps),
        "rollout/failed_frac": sum(t.status == "failed" for t in trajectories) / n,
        "rollout/truncated_frac": sum(t.status == "truncated" for t in trajectories) / n,
        "rollout/agent_error_frac": sum("agent_error" in t.info for t in trajectories) / n,
        "rollout/timeout_frac": sum("timed_out" in t.info for t in trajectories) / n,
    }


def sub_reward_metrics(trajectories):
    steps_of = defaultdict(list)
    for trajectory in trajectories:
        for step in trajectory.steps:
            if ok_scores(step):
                steps_of[step.agent].append(step)
    metrics = {}
    for agent, steps in steps_of.items():
        values = [sub_reward(step) for step in steps]
        metrics[f"reward/sub_reward/{agent}"] = mean(values)
        metrics[f"reward/sub_reward_var/{agent}"] = mean([(value - mean(values)) ** 2 for value in values])
        implied = mean(values) * (1 - mean(values)) if {*values} <= {0, 1} else 0
        metrics[f"reward/sub_reward_excess_var/{agent}"] = metrics[f"reward/sub_reward_var/{agent}"] - implied
        metrics[f"reward/step_error_rate/{agent}"] = mean([is_wrong(step) for step in steps])
        for stratum in {step.stratum for step in steps} - {None}:
            of_stratum = [sub_reward(step) for step in steps if step.stratum == stratum]
            metrics[f"reward/sub_reward/{agent}/{stratum}"] = mean(of_stratum)
    if steps_of:
        metrics["reward/step_error_rate"] = mean([is_wrong(step) for steps in steps_of.values() for step in steps])
    return metrics


def error_metrics(trajectories):
    verdicts = wrong = judged = 0
    for trajectory in trajectories:
        if trajectory.status == "failed":
            continue
        per_step = [[(s, step) for s in step.scores.values() if s.weight > 0] for step in trajectory.steps]
        given = [pair for pairs in per_step for pair in pairs]
        verdicts += len(given)
        judged += len(given) > 0
        failed = [score for score, _ in given if score.status != "ok"]
        wrong += len(failed)
        if failed or not given or not all(per_step):
            continue
        for value, steps in sides(trajectory).items():
            values = [rescaled(score, step) for score, step in given if step in steps]
            if value is not None and ((value >= RIGHT and max(values) < 0.5) or (value < 0.5 and min(values) >= RIGHT)):
                wrong += len(values)
    if not verdicts:
        return {}
    metrics = {"reward/error_rate": wrong / verdicts, "reward/verdicts": verdicts, "reward/judged_trajectories": judged}
    return metrics | agreement(trajectories)


def sides(trajectory):
    """The steps of a trajectory by the outcome of their agent, rescaled to [0, 1]; None for no ok outcome."""
    steps_of = defaultdict(list)
    for step in trajectory.steps:
        outcome = trajectory.outcomes.get(step.agent, trajectory.outcome)
        steps_of[rescaled(outcome) if outcome is not None and outcome.status == "ok" else None].append(step)
    return steps_of


def agreement(trajectories):
    wins, pairs, variance = 0.0, 0, 0.0
    for group in trajectories_by_task(trajectories):
        right, wrong = [], []
        for trajectory in group:
            for value, steps in sides(trajectory).items():
                scored = [m for step in steps if (m := paid_mean(step)) is not None]
                if trajectory.status == "failed" or not scored or value is None:
                    continue
                if value >= RIGHT:
                    right.append(mean(scored))
                elif value < 0.5:
                    wrong.append(mean(scored))
        for one in right:
            for other in wrong:
                close = abs(one - other) < 1e-12
                wins += 0.5 if close else float(one > other)
        pairs += len(right) * len(wrong)
        variance += len(right) * len(wrong) * (len(right) + len(wrong) + 1) / 12
    if not pairs:
        return {}
    return {"reward/agreement": wins / pairs, "reward/agreement_over": 0.25 / (variance / pairs**2)}


def paid_mean(step):
    paid = [(rescaled(s, step), s.weight) for s in step.scores.values() if s.weight > 0 and s.status == "ok"]
    return sum(v * w for v, w in paid) / sum(w for _, w in paid) if paid else None


def passes(trajectory):
    outcome = trajectory.outcome
    return outcome is not None and outcome.status == "ok" and rescaled(outcome) >= RIGHT


def trajectories_by_task(trajectories):
    group = defaultdict(list)
    for trajectory in trajectories:
        group[trajectory.uid].append(trajectory)
    return list(group.values())


def evaluation_metrics(trajectories, n):
    passed = [[passes(trajectory) for trajectory in group] for group in trajectories_by_task(trajectories)]
    metrics = {"pass_at_1": mean([mean(group) for group in passed]), "trajectories": len(trajectories)}
    for k in sorted({2**i for i in range(1, 11) if 2**i < n} | {n}) if n > 1 else []:
        metrics[f"pass_at_{k}"] = mean([share_of_draws(group, k) for group in passed])
    ok = [rescaled(t.outcome) for t in trajectories if t.outcome is not None and t.outcome.status == "ok"]
    if ok:
        metrics["outcome_mean"] = mean(ok)
    metrics["unscored_frac"] = 1 - len(ok) / len(trajectories)
    return metrics | {key.removeprefix("reward/"): v for key, v in sub_reward_metrics(trajectories).items()}


def share_of_draws(group, k):
    """The share of draws of k trajectories with a pass; 1 if fewer than k trajectories did not pass."""
    if len(group) - sum(group) < k:
        return 1.0
    return mean([any(draw) for draw in combinations(group, k)])


def evaluation(sampled, greedy, n):
    """(metrics, sampled, greedy, step_errors), the fields of `Evaluation`."""
    metrics, of_greedy = evaluation_metrics(sampled, n), evaluation_metrics(greedy, 1)
    for key in ("pass_at_1", "step_error_rate"):
        if key in of_greedy:
            metrics[f"{key}_greedy"] = of_greedy[key]
    errors = []
    for group in trajectories_by_task(sampled):
        wrong = [is_wrong(step) for trajectory in group for step in trajectory.steps if ok_scores(step)]
        errors.append((sum(wrong), len(wrong)))
    shares = [
        [mean([passes(trajectory) for trajectory in group]) for group in trajectories_by_task(all)]
        for all in (sampled, greedy)
    ]
    return metrics, *shares, errors
