"""A taskset for the tests: a desk looks prices up for a simulated customer.

The customer, a role that the environment does not let learn, opens and asks again; the desk has one tool. Two rewards.
"""

import verifiers.v1 as vf

PRICES = {"tea": 3, "jam": 5, "rye": 4, "oil": 9, "egg": 2, "fig": 7}


class PriceData(vf.TaskData):
    item: str
    answer: str


class PriceTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, item: str) -> str:
        """The price of an item."""
        return str(PRICES.get(item, "unknown"))


class PriceTask(vf.Task[PriceData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0 / max(1, len(trace.last_reply.split()))

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class PriceConfig(vf.TasksetConfig):
    repeat: int = 4
    label: str = "shop"
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class PriceTaskset(vf.Taskset[PriceTask, PriceConfig]):
    @classmethod
    def toolsets(cls, config: PriceConfig) -> list[vf.Toolset]:
        return [PriceTools(config.tools)]

    def load(self):
        for number in range(self.config.repeat):
            for item, price in PRICES.items():
                yield PriceTask(
                    PriceData(
                        name=f"{self.config.label}-{item}-{number}",
                        prompt=f"price {item}",
                        system_prompt="desk",
                        item=item,
                        answer=str(price),
                    ),
                    self.config.task,
                )


class PriceEnvConfig(vf.EnvConfig):
    desk: vf.AgentConfig = vf.AgentConfig(max_turns=6)
    customer: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, max_turns=2)


class PriceEnv(vf.Env[PriceEnvConfig]):
    async def setup(self, agents):
        agents.customer.trainable = False

    async def run(self, task, agents):
        wish = vf.Task(vf.TaskData(idx=task.data.idx, system_prompt=f"customer {task.data.item}"))
        asked = type(task)(task.data.model_copy(update={"prompt": None}), task.config)
        async with (
            agents.customer.interaction(wish) as customer,
            agents.desk.interaction(asked) as desk,
        ):
            said = await customer.turn("hello")
            while not said.terminated:
                answer = await desk.turn(f"{said.last_reply} {task.data.item}")
                if answer.terminated:
                    break
                said = await customer.turn(answer.last_reply or "nothing")


__all__ = ["PriceEnv", "PriceTaskset"]

if __name__ == "__main__":
    PriceTools.run()
