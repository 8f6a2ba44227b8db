"""Figure of a comparison: learning curves, and every arm's metrics before and after training.

Needs matplotlib (the `report` extra), which is imported only when a figure is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from creditflow.studies.comparison.results import ArmResult, spread

if TYPE_CHECKING:
    from creditflow.data import Floats

# Okabe and Ito's colours are distinct for colour-blind readers; line styles distinguish arms in black and white.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLES = ("-", "--", "-.", ":")
_SMOOTHING = 5
"""Training steps averaged in a point of a learning curve, since 16 tasks per step are noisy."""


def draw_comparison(path: Path, title: str, arms: Sequence[ArmResult]) -> None:
    """Write the figure of `arms` to `path` (a PNG)."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}):  # a name may contain "$"
        figure = Figure(figsize=(15, 4.8), layout="constrained")
        curves, passing, errors = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
        figure.suptitle(title)
        _draw_curves(curves, arms)
        _draw_ends(passing, arms, {"pass_at_1": "sampled", "pass_at_1_greedy": "greedy"})
        passing.set_title("pass@1 on validation tasks")
        passing.set_ylabel("share of trajectories that pass")
        _draw_ends(errors, arms, {"step_error_rate": "sampled"})
        errors.set_title("step error rate on validation tasks")
        errors.set_ylabel("share of scored steps that are wrong")
        figure.savefig(path, dpi=120, format="png")


def _draw_curves(axes: Any, arms: Sequence[ArmResult]) -> None:
    from matplotlib.ticker import MaxNLocator

    for i, arm in enumerate(arms):
        length = min(len(run.train_pass_at_1) for run in arm.runs)
        if not length:
            continue
        curves_RT = np.array([_smooth(np.array(run.train_pass_at_1[:length])) for run in arm.runs])
        steps_T, colour = np.arange(1, length + 1), COLOURS[i % len(COLOURS)]
        axes.plot(steps_T, curves_RT.mean(axis=0), STYLES[i % len(STYLES)], color=colour, label=arm.name, linewidth=2)
        if len(arm.runs) > 1:
            axes.fill_between(
                steps_T, curves_RT.min(axis=0), curves_RT.max(axis=0), color=colour, alpha=0.15, linewidth=0
            )
    several = any(len(arm.runs) > 1 for arm in arms)
    axes.set_title("pass@1 while training" + (" (line: mean, band: all seeds)" if several else ""))
    axes.set_xlabel("training step")
    axes.set_ylabel(f"share of trajectories that pass, mean of {_SMOOTHING} steps")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize="small", frameon=False)


def _draw_ends(axes: Any, arms: Sequence[ArmResult], metrics: dict[str, str]) -> None:
    width, several = 0.8 / len(metrics), len(arms[0].runs) > 1
    for m, (metric, decoding) in enumerate(metrics.items()):
        x_A = np.arange(len(arms)) + (m - (len(metrics) - 1) / 2) * width
        after = [arm.after(metric) for arm in arms]
        mean_A = np.mean(after, axis=1)
        axes.bar(
            x_A,
            mean_A,
            width * 0.92,
            color=[COLOURS[i % len(COLOURS)] for i in range(len(arms))],
            alpha=0.9 if m == 0 else 0.45,
            hatch="" if m == 0 else "//",
            edgecolor="white",
            yerr=[spread(values) for values in after] if several else None,
            error_kw={"capsize": 3, "ecolor": "#666666"},
            label=f"after, {decoding}" + (" (± 1 standard deviation over seeds)" if several else ""),
        )
        before = [arm.before_mean(metric) for arm in arms]
        label = None if m else "before training"
        axes.hlines(before, x_A - width / 2, x_A + width / 2, color="#888888", linewidth=2.5, label=label)
        for x, mean in zip(x_A, mean_A, strict=True):
            look = {"color": "black" if m else "white", "fontsize": 8}
            axes.text(x, 0, f" {mean:.3f}", rotation=90, ha="center", va="bottom", **look)
    axes.set_xticks(range(len(arms)), [arm.name for arm in arms], rotation=30, ha="right")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3)  # room for the legend
    axes.legend(loc="upper left", fontsize="x-small")


def _smooth(curve_T: Floats) -> Floats:
    """Trailing mean over the last _SMOOTHING points, or fewer at the start."""
    return np.array([curve_T[max(0, t + 1 - _SMOOTHING) : t + 1].mean() for t in range(len(curve_T))])
