"""Published rules of credit by their formulas, in plain loops over trajectories: slow, obvious and independent.

A step is a dict with `trajectory`, `task`, `agent`, `turn`, `state`, `reward` (its own score), `tokens` (the sampled
ones), `children` (indices into the list of steps) and `shares` (one for each child). `outcome[trajectory]` is the
trajectory's reward. Standard deviations have n - 1 in the denominator, and 1e-6 is added to them, as in verl. Every
function returns one advantage per step.
"""

import statistics

EPSILON = 1e-6


def normalised(value, values, scaled=True):
    """`(value - mean) / (std + epsilon)`; 0 for a group of one or of equal values."""
    if len(values) < 2 or max(values) - min(values) < 1e-9:
        return 0.0
    return (value - statistics.fmean(values)) / (statistics.stdev(values) + EPSILON if scaled else 1.0)


def of_group(steps, step, *keys):
    return [other for other in steps if all(other[key] == step[key] for key in keys)]


def outcomes_of_task(steps, outcome, step):
    """The outcomes of the task's trajectories, one for each."""
    return [outcome[n] for n in sorted({other["trajectory"] for other in of_group(steps, step, "task")})]


def magrpo(steps, outcome):
    """MAGRPO (arXiv 2508.04652): the return minus the group's mean, without division."""
    values = [(outcome[step["trajectory"]], step) for step in steps]
    return [normalised(value, outcomes_of_task(steps, outcome, step), scaled=False) for value, step in values]


def dr_mas(steps, outcome):
    """Dr. MAS (arXiv 2602.08847, eq. 5): normalised over all of the agent's steps in the task's group."""
    return [
        normalised(
            outcome[step["trajectory"]], [outcome[s["trajectory"]] for s in of_group(steps, step, "task", "agent")]
        )
        for step in steps
    ]


def at_grpo(steps, outcome, alpha=1.0):
    """AT-GRPO (arXiv 2510.11062): team and local reward, normalised over equal task, agent and turn."""
    mixed = {id(step): alpha * outcome[step["trajectory"]] + step["reward"] for step in steps}
    groups = [(step, of_group(steps, step, "task", "agent", "turn")) for step in steps]
    return [normalised(mixed[id(step)], [mixed[id(s)] for s in group]) for step, group in groups]


def returns(steps, outcome, gamma, rewards=None):
    """`G_t = e_t + gamma * sum of share * G_k` over children; the outcome is at the trajectory's last step."""
    rewards = [step["reward"] for step in steps] if rewards is None else rewards
    sums = [0.0] * len(steps)
    for s in reversed(range(len(steps))):
        step = steps[s]
        last = s + 1 == len(steps) or steps[s + 1]["trajectory"] != step["trajectory"]
        sums[s] = rewards[s] + (outcome[step["trajectory"]] if last else 0.0)
        sums[s] += gamma * sum(share * sums[k] for k, share in zip(step["children"], step["shares"], strict=True))
    return sums


def compared(steps, values, *keys):
    """Each value, normalised over all steps with equal keys."""
    at = {id(step): value for step, value in zip(steps, values, strict=True)}
    return [normalised(at[id(step)], [at[id(s)] for s in of_group(steps, step, *keys)]) for step in steps]


def episodes(steps, outcome):
    """Each step's outcome, normalised over the task's trajectories."""
    return [normalised(outcome[step["trajectory"]], outcomes_of_task(steps, outcome, step)) for step in steps]


def weighted(first, second, weight=1.0, other_weight=1.0):
    return [weight * a + other_weight * b for a, b in zip(first, second, strict=True)]


def gigpo(steps, outcome, gamma=0.95, weight=1.0):
    """GiGPO (arXiv 2505.10978, eq. 3 and 5 to 8): compared episodes, and returns compared at equal states."""
    anchored = compared(steps, returns(steps, outcome, gamma), "task", "agent", "state")
    return weighted(episodes(steps, outcome), anchored, 1.0, weight)


def mt_grpo(steps, outcome, weight=1.0):
    """MT-GRPO (arXiv 2505.11821): normalised rewards of this turn and later ones, and the normalised outcome."""
    turns = compared(steps, [step["reward"] for step in steps], "task", "agent", "turn")
    later = returns(steps, [0.0] * len(outcome), 1.0, turns)
    return weighted(later, episodes(steps, outcome), 1.0, weight)


def decoupled(steps, outcome, w_r):
    """Scores, with the standard deviation of outcomes over the agent's steps, and outcomes; the sum is normalised."""
    totals = []
    for step in steps:
        of_agent = of_group(steps, step, "agent")
        scores, outcomes = [s["reward"] for s in of_agent], [outcome[s["trajectory"]] for s in of_agent]
        ratio = statistics.stdev(outcomes) / statistics.stdev(scores)
        totals.append(w_r * ratio * step["reward"] + outcome[step["trajectory"]])
    return compared(steps, totals, "agent")


def gagpo(steps, outcome, gamma=0.99, lam=0.95, prior=0.0):
    """GAGPO (arXiv 2605.13217): GAE with mean returns of equal states, normalised over the task's steps.

    `prior`: the number of steps that the mean of the same agent and turn counts for in a value.
    """
    paid = returns(steps, outcome, 0.0)
    at = {id(step): value for step, value in zip(steps, returns(steps, outcome, gamma), strict=True)}
    values = []
    for step in steps:
        same = [at[id(s)] for s in of_group(steps, step, "task", "agent", "state")]
        wider = statistics.fmean(at[id(s)] for s in of_group(steps, step, "task", "agent", "turn"))
        values.append((sum(same) + prior * wider) / (len(same) + prior))
    advantages = [0.0] * len(steps)
    for s in reversed(range(len(steps))):
        ahead = zip(steps[s]["children"], steps[s]["shares"], strict=True)
        advantages[s] = (
            paid[s] - values[s] + gamma * sum(share * (values[k] + lam * advantages[k]) for k, share in ahead)
        )
    return compared(steps, advantages, "task")


def irc(steps, outcome, gamma=0.9, weight=0.3):
    """IRC (arXiv 2604.02869): returns of scores weighted by their correlation with the outcome, by turn."""
    rewards = []
    for step in steps:
        pairs = [(s["reward"], outcome[s["trajectory"]]) for s in of_group(steps, step, "agent")]
        rewards.append(statistics.correlation(*zip(*pairs, strict=True)) * step["reward"])
    turns = compared(steps, returns(steps, outcome, gamma, rewards), "task", "agent", "turn")
    return weighted(turns, episodes(steps, outcome), 1.0, weight)


def mappo(values, outcomes, gamma, lam):
    """Whitened GAE on chains; `values`: those of each trajectory's steps, with one token each."""
    flat = []
    for of_steps, outcome in zip(values, outcomes, strict=True):
        advantages, following = [], (0.0, 0.0)
        for t in reversed(range(len(of_steps))):
            value, advantage = following
            reward = outcome if t == len(of_steps) - 1 else 0.0
            advantage = reward + gamma * value - of_steps[t] + gamma * lam * advantage
            advantages.append(advantage)
            following = (of_steps[t], advantage)
        flat += advantages[::-1]
    mean = sum(flat) / len(flat)
    variance = sum((a - mean) ** 2 for a in flat) / (len(flat) - 1)
    return [(a - mean) / (variance + 1e-8) ** 0.5 for a in flat]
