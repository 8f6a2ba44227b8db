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
Spec = tuple[str, float | None, tuple[int, ...], tuple[float, float]]
"""Agent, sub-reward, parents, and position in the picture."""

CHAIN: list[Spec] = [
    ("planner", 0.75, (), (0, 0)),
    ("executor", 0.25, (0,), (1, 0)),
    ("executor", 1.0, (1,), (2, 0)),
    ("verifier", None, (2,), (3, 0)),
]
GRAPH: list[Spec] = [
    ("planner", None, (), (0, 1)),
    ("executor", 1.0, (0,), (1, 2)),
    ("executor", 0.25, (0,), (1, 1)),
    ("executor", 0.75, (0,), (1, 0)),
    ("judge", 1.0, (1, 2, 3), (2, 1)),
]


def main() -> None:
    """Write chain.svg, its variants under other rules, and graph.svg beside this file."""
    own = {"outcome_to": "answer", "sub_reward_origin": 0.0}
    names = {"threshold": "chain", "own": "chain_own", "discounted": "chain_discounted"}
    made = {name: credit_options(propagation={"rule": rule, **own}, gamma=1.0) for rule, name in names.items()}
    made["chain_identical"] = credit_options(propagation="identical")
    for name, options in made.items():
        _draw(CHAIN, options, f"{name}.svg", (11.0, 1.9))
    _draw(GRAPH, made["chain"], "graph.svg", (8.5, 4.2))


def _assigned(steps: list[Spec], options: CreditOptions) -> Assignment:
    made = [
        Step(f"t.{i}", "t", i, agent, 0, parents, "", "", scores={} if r is None else {"f": Score(r)})
        for i, (agent, r, parents, _) in enumerate(steps)
    ]
    trajectories = Trajectory("t", "q", Task("picture", (), None), made, outcome=Score(1.0))
    return assign(TrajectoryBatch.from_trajectories([trajectories]), options)


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
