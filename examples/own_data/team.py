"""A planner and a solver of word problems."""

from creditflow import Task, Team, Trajectory, outcome


async def solve(task: Task, team: Team) -> str:
    """Return the solver's answer, which follows the plan."""
    plan = await team.planner(task.text)
    return await team.solver(f"{task.text}\nPlan: {plan}", parents=[plan])


@outcome
def right(trajectory: Trajectory) -> float:
    """Compare the answer with the truth."""
    return float((trajectory.answer or "").strip() == trajectory.task.ground_truth)
