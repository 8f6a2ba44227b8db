"""Figure of a simulation. Computes nothing. Needs matplotlib (the `report` extra)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from creditflow.data import Floats
from creditflow.reports.comparison_plot import COLOURS, STYLES
from creditflow.studies.simulation import SimulatedCredit, SimulatedTeam


def draw_simulation(
    path: Path,
    team: SimulatedTeam,
    results: Sequence[SimulatedCredit],
    moved_K: Floats,
    signals: Sequence[tuple[float, float]],
    noises: Sequence[tuple[float, float, float]],
    names: tuple[str, str],
) -> None:
    """Write a PNG: blame and wrong outputs by step, wrong signs by rule, and signal by threshold and by noise.

    `names`: the rule with gates and the baseline rule, whose signals `noises` holds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(19, 4.6), layout="constrained")
    axes = figure.subplots(1, 4)
    shape = team.graph if team.parents is None else "graph of a file"
    figure.suptitle(f"{shape} of {team.n_steps} steps, error {team.error:g}, scorer noise {team.noise:g}")
    places = np.arange(1, team.n_steps + 1)

    for i, one in enumerate(results):
        look = {"color": COLOURS[i], "linestyle": STYLES[i % len(STYLES)], "linewidth": 2}
        axes[0].plot(places, one.amplification_K, label=f"blame, {one.rule}", **look)
    axes[0].plot(places, moved_K, ":", color="grey", linewidth=2, label="wrong outputs")
    axes[0].set(title="what an error moves", xlabel="step at which it is", ylabel="times its own blame; outputs")
    axes[0].set_yscale("log")
    axes[0].legend()

    axes[1].bar([one.rule for one in results], [one.wrong_way for one in results], color=COLOURS[: len(results)])
    axes[1].set(title="advantages of the wrong sign", ylabel="share of steps", ylim=(0, None))

    axes[2].plot(*zip(*signals, strict=True), color=COLOURS[3], linewidth=2)
    axes[2].set(title=f"{names[0]} rule", xlabel="threshold", ylabel="correlation of advantage and doing right")

    noise, rule, shared = zip(*noises, strict=True)
    axes[3].plot(noise, rule, color=COLOURS[3], linewidth=2, label=names[0])
    axes[3].plot(noise, shared, "--", color=COLOURS[0], linewidth=2, label=names[1])
    axes[3].set(title="break-even of scorer noise", xlabel="share of verdicts that are mistaken", ylabel="correlation")
    axes[3].legend()
    figure.savefig(path, dpi=120, format="png")
