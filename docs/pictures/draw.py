"""Draws the pictures of docs/concepts from assignments: `python docs/pictures/draw.py`.

No number is typed in.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

from creditflow import CreditOptions, Score, Step, Task, Trajectory, TrajectoryBatch, assign, credit_options
from creditflow.credit import Assignment

HALF = 0.31
"""Width of the space for a step."""
HERE = Path(__file__).parent
OPEN, CLOSED, PLAIN, BOX = "#1a7f37", "#cf222e", "#57606a", "#f6f8fa"
RAISED, LOWERED = "#2166ac", "#c35a00"
"""The colours of the report for advantages above and below 0."""
Spec = tuple[str, float | None, tuple[int, ...], tuple[float, float]]
"""Agent, sub-reward, parents, and position in the picture."""

CHAIN: list[Spec] = [
    ("planner", 0.75, (), (0, 0)),
    ("executor", 0.25, (0,), (1, 0)),
    ("executor", 1.0, (1,), (2, 0)),
    ("verifier", None, (2,), (3, 0)),
]
AGENTS = ("planner", "executor", "executor", "verifier")
ROLLOUTS: list[tuple[str, float, tuple[float | None, ...]]] = [
    ("task A, rollout 1", 1.0, (0.75, 0.25, 1.0, None)),
    ("task A, rollout 2", 0.0, (1.0, 1.0, 0.5, None)),
    ("task B, rollout 1", 1.0, (1.0, 0.25, 0.0, None)),
    ("task B, rollout 2", 0.0, (0.5, 0.0, 1.0, None)),
]
"""Name, outcome, and the sub-rewards of the steps of `AGENTS`."""
GRAPH: list[Spec] = [
    ("planner", None, (), (0, 1)),
    ("executor", 1.0, (0,), (1, 2)),
    ("executor", 0.25, (0,), (1, 1)),
    ("executor", 0.75, (0,), (1, 0)),
    ("judge", 1.0, (1, 2, 3), (2, 1)),
]


def main() -> None:
    """Write the pictures beside this file: the default, a chain under other rules, and a graph."""
    flow = {"outcome_to": "answer", "sub_reward_origin": 0.0}
    names = {"threshold": "chain", "discounted": "chain_discounted"}
    made = {name: credit_options(propagation={"rule": rule, **flow}, gamma=1.0) for rule, name in names.items()}
    made["chain_identical"] = credit_options(propagation="identical")
    for name, options in made.items():
        _draw(CHAIN, options, f"{name}.svg", (11.0, 1.9))
    _draw(GRAPH, made["chain"], "graph.svg", (8.5, 4.2))
    _compare("own.svg")


def _trajectory(name: str, outcome: float, steps: list[Spec]) -> Trajectory:
    made, turns = [], dict[str, int]()
    for i, (agent, r, parents, _) in enumerate(steps):
        turn = turns[agent] = turns.get(agent, -1) + 1
        scores = {} if r is None else {"f": Score(r)}
        made.append(Step(f"{name}.{i}", name, i, agent, turn, parents, "", "", scores=scores))
    return Trajectory(name, name.partition(",")[0], Task("picture", (), None), made, outcome=Score(outcome))


def _assigned(steps: list[Spec], options: CreditOptions) -> Assignment:
    return assign(TrajectoryBatch.from_trajectories([_trajectory("t", 1.0, steps)]), options)


def _compare(name: str) -> None:
    """Draw four rollouts under the default options: a row for each, a column for each agent and turn."""
    steps = {name: [(agent, r, (), (0, 0)) for agent, r in zip(AGENTS, r_S, strict=True)] for name, _, r_S in ROLLOUTS}
    trajectories = [_trajectory(name, outcome, steps[name]) for name, outcome, _ in ROLLOUTS]
    assigned = assign(TrajectoryBatch.from_trajectories(trajectories), credit_options())
    figure, axes = plt.subplots(figsize=(11.0, 5.6))
    for row, (label, outcome, r_S) in enumerate(ROLLOUTS):
        axes.text(-0.95, -row, f"{label}\noutcome {outcome:g}", ha="center", va="center", fontsize=9)
        for column, r in enumerate(r_S):
            s = row * len(AGENTS) + column
            credit, advantage = assigned.credit.total_S[s], assigned.advantage.advantage_S[s]
            colour, word = (RAISED, "raised") if advantage > 0 else (LOWERED, "lowered")
            scored = "not scored" if r is None else f"r = {r:g}"
            text = f"{AGENTS[column]}\n{scored}\nc = {credit:.3g}\nA = {advantage:+.2f}, {word}"
            box = {"boxstyle": "round", "fc": BOX, "ec": colour, "lw": 1.8}
            axes.text(column, -row, text, ha="center", va="center", fontsize=9, bbox=box)
    axes.set_xlim(-1.4, len(AGENTS) - 0.5)
    axes.set_ylim(0.5 - len(ROLLOUTS), 0.5)
    axes.axis("off")
    figure.savefig(HERE / name, bbox_inches="tight", metadata={"Date": None})


def _draw(steps: list[Spec], options: CreditOptions, name: str, size: tuple[float, float]) -> None:
    credit = _assigned(steps, options).credit
    gate_S = np.zeros_like(credit.own_S) if credit.gate_S is None else credit.gate_S
    figure, axes = plt.subplots(figsize=size)
    for k, (_, _, parents, (x, y)) in enumerate(steps):
        colour = PLAIN if credit.gate_open_S is None else OPEN if credit.gate_open_S[k] else CLOSED
        for parent in parents:
            to = steps[parent][3]
            passed = gate_S[k] * (credit.own_S[k] + credit.received_S[k]) / len(parents)
            axes.annotate(
                "",
                xy=(to[0] + HALF, to[1]),
                xytext=(x - HALF, y),
                arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.6, "ls": "-" if passed else ":"},
            )
            label = {"fc": "white", "ec": "none", "pad": 1}
            middle = ((x + to[0]) / 2, (y + to[1]) / 2)
            axes.text(*middle, f"{passed:.3g}", ha="center", va="center", color=colour, fontsize=9, bbox=label)
    for k, (agent, r, _, (x, y)) in enumerate(steps):
        scored, edge = "not scored" if r is None else f"r = {r:g}", PLAIN
        if credit.gate_open_S is not None:
            scored += "" if r is None else f", gate {'open' if credit.gate_open_S[k] else 'closed'}"
            edge = OPEN if credit.gate_open_S[k] else CLOSED
        text = f"{agent}\n{scored}\ne = {credit.own_S[k]:.3g}\nc = {credit.total_S[k]:.3g}"
        axes.text(
            x,
            y,
            text,
            ha="center",
            va="center",
            fontsize=9,
            bbox={"boxstyle": "round", "fc": BOX, "ec": edge, "lw": 1.4},
        )
    axes.set_xlim(-0.5, max(x for *_, (x, _) in steps) + 0.5)
    axes.set_ylim(-0.5, max(y for *_, (_, y) in steps) + 0.5)
    axes.axis("off")
    figure.savefig(HERE / name, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
