"""Credit for any trainer: NumPy arrays in, advantages out."""

import numpy as np

from creditflow import TrajectoryBatch, assign, credit_options

batch = TrajectoryBatch.from_arrays(
    trajectory_of_step=np.array([0, 0, 1, 1, 2, 2]),  # six steps of three trajectories
    group_of_trajectory=np.array([0, 0, 0]),  # three rollouts of one task
    agent_of_step=np.array([0, 1, 0, 1, 0, 1]),
    agent_names=("planner", "solver"),
    scores=np.array([[1.0], [1.0], [1.0], [0.0], [0.0], [0.0]]),  # one score per step; nan: none
    outcome=np.array([1.0, 0.0, 0.0]),
)
credit = assign(batch, credit_options(propagation="threshold"))
print(credit.advantage.advantage_S.round(3))
