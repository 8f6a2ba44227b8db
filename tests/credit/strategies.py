"""Random trajectories and options for properties of credit: small graphs of every shape, with every kind of failure.

Values come from coarse grids, so that no value is within rounding of a threshold or a tie by accident.
"""

from contextlib import contextmanager

from hypothesis import strategies as st

from creditflow.data import Score
from tests.builders import credit_options, make_trajectory, step, unregister

eighths = st.integers(0, 8).map(lambda k: k / 8)

RULES = ("identical", "uniform", "own", "discounted", "threshold")
LEARNING = ("calibrated", "posterior", "decoupled")
"""Rules that learn from the batch, which the oracle does not compute."""

CHOICES = {
    "propagation": (*RULES, "threshold", "threshold", "threshold"),
    "adv_estimator": ("grpo", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"),
    "decomp_granularity": ("step", "step", "token_level", "token_level", "agent", "trajectory"),
    "on_closed_gate": ("cut", "freeze"),
    "outcome_to": ("all", "answer"),
    "sub_reward_origin": (0.0, 0.5, 1.0),
    "propagation_threshold": (0.1, 0.3, 0.5, 0.9, 1.0, -0.5),
    "group_by": ("task", "task_agent", "task_agent_turn", "task_agent_state", "agent", "agent_turn"),
    "gamma": (0.0, 0.5, 0.99, 1.0),
    "lam": (0.0, 0.5, 1.0),
    "gamma_token": (1.0, 1.0, 0.5),
    "lam_token": (1.0, 0.5, 0.0),
    "w_r": (0.0, 1.0, 1.0, 2.0),
    "w_o": (0.0, 1.0, 0.5),
    "reward_decomp": (True, True, True, True, False),
    "norm_adv_by_std_in_grpo": (True, False),
    "shared_reward": ("outcome", "outcome_plus_mean_sub_reward"),
    "mask_truncated": (False, True),
}
"""Choices of each option. A repeated choice is drawn with a higher probability."""


@contextmanager
def registered(registry, *names):
    """Remove the entries `names` at the end."""
    try:
        yield
    finally:
        for name in names:
            unregister(registry, name)


class Draw:
    """Choices from random bytes: one byte for each choice, and the first choice after the last byte.

    A single draw of bytes is much faster than a draw for every choice. Failing examples still shrink, towards the first
    choices.
    """

    def __init__(self, made):
        self.bytes = iter(made)

    def one_of(self, *choices):
        return choices[next(self.bytes, 0) % len(choices)]

    def eighth(self):
        return self.one_of(*range(9)) / 8

    def one_in(self, n):
        return self.one_of(*range(n)) == n - 1

    def part(self, n):
        """A Draw from the next `n` bytes; later choices do not depend on the number of bytes that it uses."""
        return Draw(bytes(next(self.bytes, 0) for _ in range(n)))


def drawn_from(n, make):
    """A strategy for the results of `make` on a Draw from `n` bytes."""
    return st.binary(min_size=n, max_size=n).map(lambda made: make(Draw(made)))


def make_options(choose, demanding=False, **fixed_values):
    chosen = dict(fixed_values)
    for key, choices in CHOICES.items():
        if key not in fixed_values:
            suiting = [c for c in choices if demanding or c != "gae"]
            chosen[key] = choose.one_of(*suiting)
        elif isinstance(fixed_values[key], tuple):
            chosen[key] = choose.one_of(*fixed_values[key])
    if chosen["propagation"] == "decoupled" and chosen["adv_estimator"] in ("reinforce_plus_plus", "gae"):
        chosen["adv_estimator"] = "grpo"  # it needs groups
    if chosen["propagation"] in LEARNING and chosen["decomp_granularity"] == "token_level":
        chosen["decomp_granularity"] = "step"
    return credit_options(**chosen)


def options(demanding=False, **fixed_values):
    """Options; without `demanding`, only those that need no critic. A fixed tuple is a choice."""
    return drawn_from(len(CHOICES), lambda choose: make_options(choose, demanding, **fixed_values))


def scores(choose, failures=True, tokens=0):
    """Scores by name; a score of a step with `tokens` may have one value for each token."""
    named = {}
    for name in choose.one_of(("f",), ("f",), ("f",), (), ("f", "g"), ("m",), ("f", "m")):
        weight = 0.0 if name == "m" else choose.one_of(1.0, 0.5, 3.0)
        low, high = choose.one_of((0.0, 1.0), (0.0, 1.0), (-1.0, 3.0))
        by_token = tokens > 0 and choose.one_of(False, True)
        values = tuple(low + (high - low) * choose.eighth() for _ in range(tokens if by_token else 1))
        went_wrong = failures and choose.one_in(5)
        status = choose.one_of("failed", "timeout") if went_wrong else "ok"
        named[name] = Score(values if by_token else values[0], (low, high), weight, status)
    return named


def graph(choose, n):
    """The parents of each of `n` steps."""
    shape = choose.one_of("any", "chain", "any", "fan_out", "any", "fan_in", "diamond", "roots", "linked")
    if shape == "any":
        parents_of = []
        for index in range(n):
            some = {choose.one_of(*range(index)) for _ in range(choose.one_of(0, 1, 1, 2, 3))} if index else ()
            parents_of.append(tuple(sorted(some)))
    else:
        parents_of = {
            "chain": lambda: [(index - 1,) for index in range(n)],
            "fan_out": lambda: [(0,) for _ in range(n)],
            "fan_in": lambda: [()] * (n - 1) + [tuple(range(n - 1))],
            "diamond": lambda: [(0,)] * (n - 1) + [tuple(range(1, n - 1)) or (0,)],
            "roots": lambda: [() if index % 2 == 0 else (index - 1,) for index in range(n)],
            "linked": lambda: [tuple(range(index)) for index in range(n)],
        }[shape]()
        parents_of[0] = ()
    return parents_of


BYTES_OF_A_STEP = 36


def make_trajectories(choose, mishaps=True, max_trajectories=5, max_steps=6):
    with_tokens = not choose.one_in(4)
    agents = choose.one_of("a", "ab", "abc")
    policies = choose.one_of(["p"], ["p"], ["p", "p", "p", "q"])
    versions = choose.one_of([0], [0], [0, 0, 0, 1])
    strata = choose.one_of([None], ["good", "bad", None])
    tasks = choose.one_of(["q0"], ["q0", "q0", "q1"])
    alike = choose.one_of(True, False)
    competing = choose.one_in(3)
    n_trajectories = choose.one_of(*range(1, max_trajectories + 1), *range(2, max_trajectories + 1))

    made, first = [], None
    for n in range(n_trajectories):
        n_steps = choose.one_of(*range(1, max_steps + 1), *range(2, max_steps + 1))
        cast = [choose.one_of(*agents) for _ in range(max_steps)]
        parents_of = graph(choose.part(5 * max_steps), max_steps)
        first = first or (cast, parents_of)
        if alike:
            cast, parents_of = first
        steps = [
            make_step(choose.part(BYTES_OF_A_STEP), agent, parents, with_tokens, mishaps)
            for agent, parents in zip(cast[:n_steps], parents_of[:n_steps], strict=True)
        ]
        for made_step in steps:
            made_step.more |= {
                "policy": choose.one_of(*policies),
                "policy_version": choose.one_of(*versions),
                "stratum": choose.one_of(*strata),
            }
        status = choose.one_of("ok", "ok", "ok", "ok", "ok", "failed", "truncated") if mishaps else "ok"
        outcome = choose.eighth()
        if mishaps:
            outcome = choose.one_of(outcome, outcome, outcome, outcome, None, outcome, "failed", outcome)
        answers = choose.one_of((), (), (0,), tuple(range(n_steps)))
        task = choose.one_of(*tasks)
        outcomes = outcomes_of_agents(choose.part(12), agents, mishaps) if competing else {}
        made.append(
            make_trajectory(f"t{n}", steps, outcome, task, status=status, answer_steps=answers, outcomes=outcomes)
        )
    return made


def outcomes_of_agents(choose, agents, mishaps):
    """Outcomes for some of the agents."""
    outcomes = {}
    for agent in agents:
        value = Score(2 * choose.eighth() - 1, (-1.0, 1.0))
        value = choose.one_of(value, value, None, value, "failed") if mishaps else choose.one_of(value, value, None)
        if value is not None:
            outcomes[agent] = value
    return outcomes


def make_step(choose, agent, parents, with_tokens, mishaps):
    mask = [choose.one_of(1, 1, 1, 0) for _ in range(choose.one_of(1, 2, 3, 4, 0))] if with_tokens else []
    more = {"tokens": len(mask), "response_mask": tuple(mask)}
    return step(agent, scores(choose, mishaps, len(mask)), parents, prompt=choose.one_of("x", "y"), **more)


def bytes_of_trajectories(max_trajectories, max_steps):
    return 9 + max_trajectories * (20 + max_steps * (10 + BYTES_OF_A_STEP))


def trajectories(mishaps=True, max_trajectories=5, max_steps=6):
    """One to `max_trajectories` trajectories. `mishaps`: with failed scores and trajectories.

    In most batches the trajectories are similar, like those of one team; otherwise few steps would share a group.
    """
    return drawn_from(
        bytes_of_trajectories(max_trajectories, max_steps),
        lambda choose: make_trajectories(choose, mishaps, max_trajectories, max_steps),
    )


def make_situation(choose, **fixed_values):
    chosen = make_options(choose.part(len(CHOICES)), demanding=True, **fixed_values)
    trajectories = make_trajectories(choose.part(bytes_of_trajectories(5, 6)))
    if chosen.adv_estimator != "gae":
        return trajectories, chosen, None
    n = sum(len(s.response_ids) for t in trajectories for s in t.steps)
    return trajectories, chosen, [choose.one_of(*range(17)) / 8 - 1 for _ in range(n)]


def situations(**fixed_values):
    """Any (trajectories, options, a critic's values or None)."""
    n = len(CHOICES) + bytes_of_trajectories(5, 6) + 5 * 6 * 4
    return drawn_from(n, lambda choose: make_situation(choose, **fixed_values))
