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


def of_group(steps, one, *keys):
    return [other for other in steps if all(other[key] == one[key] for key in keys)]


def outcomes_of_task(steps, outcome, one):
    """The outcomes of the task's trajectories, one for each."""
    return [outcome[n] for n in sorted({other["trajectory"] for other in of_group(steps, one, "task")})]


def magrpo(steps, outcome):
    """MAGRPO (arXiv 2508.04652): the return minus the group's mean, without division."""
    values = [(outcome[one["trajectory"]], one) for one in steps]
    return [normalised(value, outcomes_of_task(steps, outcome, one), scaled=False) for value, one in values]


def dr_mas(steps, outcome):
    """Dr. MAS (arXiv 2602.08847, eq. 5): normalised over all of the agent's steps in the task's group."""
    return [
        normalised(
            outcome[one["trajectory"]], [outcome[s["trajectory"]] for s in of_group(steps, one, "task", "agent")]
        )
        for one in steps
    ]


def at_grpo(steps, outcome, alpha=1.0):
    """AT-GRPO (arXiv 2510.11062): team and local reward, normalised over equal task, agent and turn."""
    mixed = {id(one): alpha * outcome[one["trajectory"]] + one["reward"] for one in steps}
    groups = [(one, of_group(steps, one, "task", "agent", "turn")) for one in steps]
    return [normalised(mixed[id(one)], [mixed[id(s)] for s in group]) for one, group in groups]


def returns(steps, outcome, gamma, rewards=None):
    """`G_t = e_t + gamma * sum of share * G_k` over children; the outcome is at the trajectory's last step."""
    rewards = [one["reward"] for one in steps] if rewards is None else rewards
    made = [0.0] * len(steps)
    for s in reversed(range(len(steps))):
        one = steps[s]
        last = s + 1 == len(steps) or steps[s + 1]["trajectory"] != one["trajectory"]
        made[s] = rewards[s] + (outcome[one["trajectory"]] if last else 0.0)
        made[s] += gamma * sum(share * made[k] for k, share in zip(one["children"], one["shares"], strict=True))
    return made


def compared(steps, values, *keys):
    """Each value, normalised over all steps with equal keys."""
    at = {id(one): value for one, value in zip(steps, values, strict=True)}
    return [normalised(at[id(one)], [at[id(s)] for s in of_group(steps, one, *keys)]) for one in steps]


def episodes(steps, outcome):
    """Each step's outcome, normalised over the task's trajectories."""
    return [normalised(outcome[one["trajectory"]], outcomes_of_task(steps, outcome, one)) for one in steps]


def weighted(one, other, weight=1.0, other_weight=1.0):
    return [weight * a + other_weight * b for a, b in zip(one, other, strict=True)]


def gigpo(steps, outcome, gamma=0.95, weight=1.0):
    """GiGPO (arXiv 2505.10978, eq. 3 and 5 to 8): compared episodes, and returns compared at equal states."""
    anchored = compared(steps, returns(steps, outcome, gamma), "task", "agent", "state")
    return weighted(episodes(steps, outcome), anchored, 1.0, weight)


def mt_grpo(steps, outcome, weight=1.0):
    """MT-GRPO (arXiv 2505.11821): normalised rewards of this turn and later ones, and the normalised outcome."""
    turns = compared(steps, [one["reward"] for one in steps], "task", "agent", "turn")
    later = returns(steps, [0.0] * len(outcome), 1.0, turns)
    return weighted(later, episodes(steps, outcome), 1.0, weight)


def gagpo(steps, outcome, gamma=0.99, lam=0.95, prior=0.0):
    """GAGPO (arXiv 2605.13217): GAE with mean returns of equal states, normalised over the task's steps.

    `prior`: the number of steps that the mean of the same agent and turn counts for in a value.
    """
    paid = returns(steps, outcome, 0.0)
    at = {id(one): value for one, value in zip(steps, returns(steps, outcome, gamma), strict=True)}
    values = []
    for one in steps:
        same = [at[id(s)] for s in of_group(steps, one, "task", "agent", "state")]
        wider = statistics.fmean(at[id(s)] for s in of_group(steps, one, "task", "agent", "turn"))
        values.append((sum(same) + prior * wider) / (len(same) + prior))
    made = [0.0] * len(steps)
    for s in reversed(range(len(steps))):
        ahead = zip(steps[s]["children"], steps[s]["shares"], strict=True)
        made[s] = paid[s] - values[s] + gamma * sum(share * (values[k] + lam * made[k]) for k, share in ahead)
    return compared(steps, made, "task")


def irc(steps, outcome, gamma=0.9, weight=0.3):
    """IRC (arXiv 2604.02869): returns of scores weighted by their correlation with the outcome, by turn."""
    rewards = []
    for one in steps:
        pairs = [(s["reward"], outcome[s["trajectory"]]) for s in of_group(steps, one, "agent")]
        rewards.append(statistics.correlation(*zip(*pairs, strict=True)) * one["reward"])
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
