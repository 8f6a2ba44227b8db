"""The sections `team` and `policies`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from creditflow._utils.sections import PolicySource, Section, Text, expected
from creditflow.config.model import ModelConfig
from creditflow.config.plugins import extensible

DEFAULT_POLICY = "default"
"""The policy of agents that name none, and the only policy of a recipe without `policies`."""


class EndpointConfig(Section):
    """An OpenAI-compatible server with a frozen model. A plain string is read as the `base_url`."""

    base_url: str = ""
    """Such as http://127.0.0.1:8000/v1."""
    model: Text | None = None
    """The server's name for the model; default: the policy's `model.path`."""
    api_key_env: str | None = None
    """The environment variable that holds the key, never the key itself; without it, the key sent is `none`."""
    timeout: PositiveFloat = 120.0
    """Seconds for one attempt."""
    max_retries: NonNegativeInt = 6
    """Retries after 5xx, broken connections and time-outs. Rate limits (429) do not count."""
    give_up_after: PositiveFloat = 600.0
    """Seconds since the call after which no attempt begins; also the longest wait for rate limits."""
    max_in_flight: PositiveInt = 256
    """Concurrent requests of each rollout process."""
    headers: dict[str, Text] = Field(default_factory=dict)
    """Sent with every request; must not hold API keys."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Extra fields of every request (`top_p`, `chat_template_kwargs`). They override creditflow's own (`max_tokens`,
    `temperature`, `seed`); null removes a field."""


@extensible("policies")
class PolicyConfig(Section):
    """A model that agents act through."""

    model: ModelConfig = ModelConfig()
    """Default: `actor_rollout_ref.model`."""
    lora_rank: NonNegativeInt | None = None
    """Default: `actor_rollout_ref.model.lora_rank`. All policies share the other adapter options of that section."""
    optim: dict[str, Any] = Field(default_factory=dict)
    """Overrides of `actor_rollout_ref.actor.optim` for this policy."""
    trainable: bool | None = None
    """Default: true; false for a model behind an endpoint, and for a policy that a plug-in provides."""
    endpoint: EndpointConfig | None = None
    """The server of a remote model. A policy with an endpoint is frozen: its responses cannot be trained on."""

    @property
    def source(self) -> tuple[str, PolicySource] | None:
        """The key and the section of the plug-in that provides the policy; None for a model or an endpoint."""
        return next(((key, section) for key, section in self if isinstance(section, PolicySource)), None)

    @property
    def trained(self) -> bool:
        """`trainable`, or its default."""
        return self.endpoint is None and self.source is None if self.trainable is None else self.trainable


class AgentConfig(Section):
    """One agent."""

    system: Text = ""
    """System prompt."""
    policy: Text = DEFAULT_POLICY
    """The name of the agent's policy in `policies`."""
    match: Text = ""
    """Regular expression. An HTTP call without another sign of its agent belongs to this agent if its system prompt
    matches. If no agent's `match` fits, it belongs to the agent with the longest `system` in the prompt."""
    tools: list[Any] = Field(default_factory=list)
    """The agent's tools: names of `creditflow.rollout.toolbox`, `file.py:function`, or `{fn, name, args, timeout}`."""


class TeamConfig(Section):
    """The agents and their workflow."""

    workflow: Annotated[str, expected("package.module:function, file.py:function or scheme://...")] = ""
    """`package.module:function` or `file.py:function`; or the address of a plug-in's workflow, such as
    `verifiers://taskset?option=value`."""
    agents: dict[str, AgentConfig] = Field(default_factory=dict)
    """The agents by name. Default for the address of a plug-in: its own, such as the roles of an environment."""
    ignored_fields: list[Text] = Field(default_factory=list)
    """Fields to ignore in HTTP calls. They would change sampling and are refused by default (`response_format`,
    `tool_choice`, `top_p`). A step's `info["ignored"]` lists the ignored fields of its call."""
