"""Figure of reliability curves. Computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from creditflow.studies.calibration import Calibration


def draw_calibration(path: Path, results: Sequence[Calibration]) -> None:
    """Write a figure with one panel per agent and function: success rate by score, and the steps in each bin."""
    from matplotlib.figure import Figure

    columns = min(len(results), 4)
    rows = -(-len(results) // columns)
    figure = Figure(figsize=(3.1 * columns, 3.0 * rows))
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for panel in panels.flat[len(results) :]:
        panel.set_visible(False)
    for panel, one in zip(panels.flat, results, strict=False):
        score, right, steps = zip(*one.curve, strict=True)
        panel.plot([0, 1], [0, 1], color="0.8", linewidth=0.8)
        panel.bar(score, [count / one.steps for count in steps], width=0.06, color="0.88")
        panel.plot(score, right, "o-", color="#1f77b4", markersize=4, linewidth=1.2)
        if one.threshold == one.threshold:
            panel.axvline(one.threshold, color="#d95f02", linewidth=1, linestyle="--")
        panel.set_title(f"{one.agent}: {one.name}\nAUC {one.auc:.2f}", fontsize=9)
        panel.set_xlim(-0.05, 1.05)
        panel.set_ylim(0, 1.02)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("score (bars: share of the steps; dashed: the threshold that separates best)", fontsize=8)
    figure.supylabel("share of trajectories that ended right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
