"""Trajectories for tests of reward functions."""

from creditflow.data import Step, Task, Trajectory

TASK = Task("test", ({"role": "user", "content": "How many?"},), "72")


def a_trajectory(name: str = "t", agents: str = "pev", **kwargs) -> Trajectory:
    """A chain of steps, one per letter, with two response tokens each."""
    steps = [
        Step(
            f"{name}/{i}", name, i, agent, agents[:i].count(agent), (i - 1,) if i else (), "prompt", f"response {i}",
            response_ids=(5, 6), response_mask=(1, 1), logprobs=(-1.0, -1.0),
        )
        for i, agent in enumerate(agents)
    ]  # fmt: skip
    return Trajectory(name, "u", TASK, steps, (len(steps) - 1,), **{"answer": "72", **kwargs})
