"""Figure of an audit: agreement of each rule's credit with counterfactual values. Computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from creditflow.studies.audit import Agreement


def draw_audit(path: Path, results: Sequence[Agreement]) -> None:
    """Write a figure with one panel per measure and one row per rule, with 95 % intervals."""
    from matplotlib.figure import Figure

    panels = {
        "credit, all agents": [one.credit for one in results],
        "advantage, all agents": [one.advantage for one in results],
        **{f"advantage, {name}": [one.by_agent[name] for one in results] for name in results[0].by_agent},
        "within trajectories": [one.within for one in results],
    }
    size = (2.3 * len(panels) + 1.5, 0.38 * len(results) + 1.3)
    figure = Figure(figsize=size)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axis, (title, shares) in zip(axes[0], panels.items(), strict=True):
        axis.axvline(0.5 if title == "within trajectories" else 0.0, color="0.6", linewidth=0.8)
        for row, share in enumerate(shares):
            axis.plot([share.low, share.high], [row, row], color="#1f77b4", linewidth=1.4)
            axis.plot([share.value], [row], "o", color="#1f77b4", markersize=4)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.grid(axis="x", color="0.92")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_yticks(range(len(results)), [one.rule for one in results], fontsize=8)
    axes[0][0].invert_yaxis()
    words = (
        "rank correlation with Shapley values, 95 % intervals (within trajectories: share of pairs in the right order)"
    )
    figure.supxlabel(words, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
