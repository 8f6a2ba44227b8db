-- The tables of the index. `erring_agent` is the agent of a trajectory's first error, `largest` its largest advantage, up or down. A trajectory's number is its training step times 2^32 plus its first row in the step file.
CREATE TABLE trajectories (
    number BIGINT, training_step INTEGER, trajectory_id VARCHAR, uid VARCHAR, status VARCHAR, outcome DOUBLE,
    ended_right BOOLEAN, n_steps INTEGER, first_error INTEGER, erring_agent VARCHAR, task_key UBIGINT, largest DOUBLE
);
CREATE TABLE tasks (task_key UBIGINT, prompt VARCHAR);
-- For filters.
CREATE TABLE steps (number BIGINT, agent VARCHAR, sub_reward DOUBLE, gate_open BOOLEAN);
-- Sums over steps, for statistics. `assigned` steps have credit; `trainable` ones are also by a trained policy. The last turns share one row.
CREATE TABLE sums (
    training_step INTEGER, agent VARCHAR, turn INTEGER, n BIGINT, assigned BIGINT, scored BIGINT, wrong BIGINT,
    opened BIGINT, shut BIGINT, trainable BIGINT, trained BIGINT, sub_reward DOUBLE, threshold DOUBLE, credit DOUBLE,
    moved DOUBLE, withheld DOUBLE, advantage DOUBLE, wrong_trained BIGINT, wrong_raised BIGINT, right_trained BIGINT,
    right_lowered BIGINT
);
-- Numbers of trajectories of a task with a known outcome in which an agent acted: all, with an error of it, failed, both (joint), failed with the first error by it.
CREATE TABLE parts (
    training_step INTEGER, uid VARCHAR, agent VARCHAR, scored BOOLEAN, n BIGINT, erred BIGINT, failed BIGINT,
    joint BIGINT, first BIGINT
);
-- Steps by advantage, in bins of equal width on a logarithmic scale.
CREATE TABLE advantages (training_step INTEGER, agent VARCHAR, bin INTEGER, n BIGINT);
