"""Rollouts: workflows run as coroutines, their calls are batched per policy, and every call becomes a step.

This package has no rewards or training, and uses models only through the protocols of `client`.
"""

from typing import TYPE_CHECKING

from creditflow._utils.lazy import attach
from creditflow.rollout.client import (
    ChatClient,
    ChatReply,
    Generation,
    GenerationRequest,
    Generator,
    ModelClient,
    PolicyView,
)
from creditflow.rollout.frozen import FrozenModel
from creditflow.rollout.recorder import AgentSpec, Recorder, Reply, Sampling
from creditflow.rollout.runner import Rollout, Workflow, run_rollout, run_rollouts, together
from creditflow.rollout.scheduler import Scheduler
from creditflow.rollout.team import Agent, Team

if TYPE_CHECKING:
    from creditflow.rollout.http.server import OpenAIServer as OpenAIServer

# Not in __all__: it needs creditflow[serve].
__getattr__ = attach(__name__, {"creditflow.rollout.http.server": ("OpenAIServer",)})

__all__ = [
    "Agent",
    "AgentSpec",
    "ChatClient",
    "ChatReply",
    "FrozenModel",
    "Generation",
    "GenerationRequest",
    "Generator",
    "ModelClient",
    "PolicyView",
    "Recorder",
    "Reply",
    "Rollout",
    "Sampling",
    "Scheduler",
    "Team",
    "Workflow",
    "run_rollout",
    "run_rollouts",
    "together",
]
