"""How a team plays: workflows run as coroutines, their calls are batched per policy, every call becomes a step.

This room knows nothing of rewards or training, and of models only what the protocols of `client` say.
"""

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
from creditflow.rollout.recorder import AgentSpec, Reply
from creditflow.rollout.replay import play_again
from creditflow.rollout.scheduler import Scheduler
from creditflow.rollout.team import Agent, Team

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
    "Reply",
    "Scheduler",
    "Team",
    "Workflow",
    "play_again",
    "play_all",
    "play_one",
    "together",
]
