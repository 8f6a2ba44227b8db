"""Looks on: turns what happened in a training step or an evaluation into named numbers. Changes nothing."""

from creditflow.monitor.evaluation import Evaluation
from creditflow.monitor.metrics import evaluation_metrics, passes, rollout_metrics, step_errors, sub_reward_metrics

__all__ = ["Evaluation", "evaluation_metrics", "passes", "rollout_metrics", "step_errors", "sub_reward_metrics"]
