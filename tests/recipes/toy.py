"""The toy team's tasks, workflow and rewards."""

from creditflow import Task, outcome


def make_tasks(split, recipe):
    return [Task("toy", ({"role": "user", "content": f"Say {i}."},), i) for i in range(recipe["tasks"])]


async def solve(task, team):
    draft = await team.writer(task.text)
    return await team.critic(f"{task.text} {draft}")


def compute_decomposed_reward(trajectory):
    rewards = []
    for step in trajectory.steps:
        said = step.response if step.agent == "writer" else step.prompt + step.response
        rewards.append(sum(character.isascii() for character in said) / max(1, len(said)))
    return rewards


@outcome
def first_byte_is_printable(trajectory):
    return float(trajectory.answer[:1].isprintable())
