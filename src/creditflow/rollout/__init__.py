"""How a team plays: workflows run as coroutines, their calls are batched per policy, every call becomes a step.

This room knows nothing of rewards or training, and of models only what `ModelClient` says.
"""

from creditflow.rollout.client import Generation, GenerationRequest, ModelClient
from creditflow.rollout.play import Play, Workflow, play_all
from creditflow.rollout.scheduler import Scheduler
from creditflow.rollout.team import Agent, AgentSpec, Reply, Team

__all__ = [
    "Agent",
    "AgentSpec",
    "Generation",
    "GenerationRequest",
    "ModelClient",
    "Play",
    "Reply",
    "Scheduler",
    "Team",
    "Workflow",
    "play_all",
]
