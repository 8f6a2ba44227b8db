"""Noise on scores, for ablations: a share of them is replaced by its opposite."""

from __future__ import annotations

import hashlib

from creditflow.data import Step, Trajectory


def flipped(right: bool, step: Step, trajectory: Trajectory, share: float) -> float:
    """The score 1 or 0, or its opposite for a `share` in [0, 1] of the responses.

    Chosen by a hash of task, agent, prompt and response, so that a repeated call returns the same score.
    """
    key = "\n".join((trajectory.task.text, step.agent, step.prompt, step.response))
    place = int(hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()[:12], 16) / 16**12
    return float(right != (place < share))
