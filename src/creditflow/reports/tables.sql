-- The tables of the index: one row per trajectory and one per step of a run.
CREATE TABLE all_trajectories (
    training_step INTEGER, place INTEGER, trajectory_id VARCHAR, uid VARCHAR, status VARCHAR, outcome DOUBLE,
    ended_right BOOLEAN, n_steps INTEGER, first_error INTEGER, prompt VARCHAR, task_key UBIGINT, branch_of VARCHAR,
    n_branches INTEGER
);
CREATE TABLE all_steps (
    training_step INTEGER, trajectory_id VARCHAR, index INTEGER, agent VARCHAR, turn INTEGER, sub_reward DOUBLE,
    scored BOOLEAN, failed BOOLEAN, gate_open BOOLEAN, threshold DOUBLE, trained BOOLEAN, credit DOUBLE,
    withheld DOUBLE, advantage DOUBLE, ended_right BOOLEAN, wrong BOOLEAN, branch_of VARCHAR
);
-- Lists and sums read rollouts alone: a branch repeats the first steps of one.
CREATE VIEW trajectories AS SELECT * EXCLUDE (branch_of) FROM all_trajectories WHERE branch_of IS NULL;
CREATE VIEW steps AS SELECT * EXCLUDE (branch_of) FROM all_steps WHERE branch_of IS NULL;
