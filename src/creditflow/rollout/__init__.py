"""Rollouts: workflows run as coroutines, their calls are batched per policy, and every call becomes a step.

This package has no rewards or training, and uses models only through the protocols of `client`.
"""

from typing import TYPE_CHECKING

from creditflow.lazy import attach
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
from creditflow.rollout.play import Play, Workflow, play_all, play_one, together
from creditflow.rollout.recorder import AgentSpec, Recorder, Reply, Sampling
from creditflow.rollout.replay import play_again
from creditflow.rollout.scheduler import Scheduler
from creditflow.rollout.team import Agent, Team

if TYPE_CHECKING:
    from creditflow.rollout.server import OpenAIServer as OpenAIServer

# Not in __all__: it needs creditflow[serve].
__getattr__ = attach(__name__, {"creditflow.rollout.server": ("OpenAIServer",)})

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
    "Play",
    "PolicyView",
    "Recorder",
    "Reply",
    "Sampling",
    "Scheduler",
    "Team",
    "Workflow",
    "play_again",
    "play_all",
    "play_one",
    "together",
]
