-- The tables of the index: one row per trajectory and one per step of a run.
CREATE TABLE trajectories (
    training_step INTEGER, place INTEGER, trajectory_id VARCHAR, uid VARCHAR, status VARCHAR, outcome DOUBLE,
    ended_right BOOLEAN, n_steps INTEGER, first_error INTEGER, prompt VARCHAR, task_key UBIGINT
);
CREATE TABLE steps (
    training_step INTEGER, trajectory_id VARCHAR, index INTEGER, agent VARCHAR, turn INTEGER, sub_reward DOUBLE,
    scored BOOLEAN, failed BOOLEAN, gate_open BOOLEAN, threshold DOUBLE, trained BOOLEAN, credit DOUBLE,
    withheld DOUBLE, advantage DOUBLE, ended_right BOOLEAN, wrong BOOLEAN
);
