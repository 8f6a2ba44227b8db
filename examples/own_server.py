"""The OpenAI-compatible server in your own program, without a recipe.

    python examples/own_server.py MODEL        any causal LM with a chat template, by its folder

Each rollout gets a URL and a key; the calls to that URL become its steps.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from openai import AsyncOpenAI

from creditflow import Task, Trajectory
from creditflow.engines.local.policy import Policy, pick_device
from creditflow.rollout import AgentSpec, OpenAIServer, Recorder, Sampling, Scheduler

AGENTS = {"writer": AgentSpec(system="You write one line."), "editor": AgentSpec(system="You make a line better.")}


async def run(server: OpenAIServer, scheduler: Scheduler, question: str, seed: int) -> Trajectory:
    """Run one rollout; concurrent rollouts share batches of generation."""
    messages = ({"role": "user", "content": question},)
    trajectory = Trajectory(id=f"trajectory {seed}", uid=question, task=Task("own", messages, None))
    recorder = Recorder(AGENTS, trajectory, scheduler, Sampling(max_tokens=16), (seed,))
    session = server.open(recorder)
    try:
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            draft = await client.chat.completions.create(
                model="writer", messages=[{"role": "user", "content": question}]
            )
            said = draft.choices[0].message.content or ""
            await client.chat.completions.create(model="editor", messages=[{"role": "user", "content": said}])
    finally:
        session.close()  # its key is no longer valid
        await recorder.close()
    return trajectory


async def main(model: Path) -> list[Trajectory]:
    """Run two rollouts of each of two tasks."""
    scheduler = Scheduler({"default": Policy.load(model, pick_device("auto"))})
    server = OpenAIServer().start()
    try:
        questions = ["A line about rain.", "A line about snow."] * 2
        return await asyncio.gather(*(run(server, scheduler, text, seed) for seed, text in enumerate(questions)))
    finally:
        await asyncio.to_thread(server.stop)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for made in asyncio.run(main(Path(sys.argv[1]))):
        for step in made.steps:
            print(
                f"{step.id}  {step.agent}  parents {step.parents}  {len(step.response_ids)} tokens: {step.response!r}"
            )
