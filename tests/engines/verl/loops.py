"""A verl user's own agent loop of two agents: one output for each call."""

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register


@register("planner_solver")
class PlannerSolver(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        question, plan, outputs = kwargs["raw_prompt"][-1]["content"], "", []
        for agent in ("planner", "solver"):
            messages = [{"role": "user", "content": f"{agent}: {question}\n{plan}"}]
            prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            out = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt, sampling_params=sampling_params
            )
            ids = out.token_ids[: self.rollout_config.response_length]
            plan = self.tokenizer.decode(ids)
            own = {"agent": agent, "turn_scores": [], "tool_rewards": []}
            if agent == "planner":
                own["score"] = min(1.0, sum(c.isalpha() for c in plan) / 8)
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=prompt,
                    response_ids=ids,
                    response_mask=[1] * len(ids),
                    response_logprobs=out.log_probs[: len(ids)],
                    num_turns=2,
                    metrics=AgentLoopMetrics(),
                    extra_fields={**out.extra_fields, **own},
                )
            )
        return outputs
