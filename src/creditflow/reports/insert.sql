-- Adds step files to the index. Names in braces are filled in: source is the files as a table, credit_columns and
-- sub_reward are null in files without credit. A trajectory ended right if its outcome, rescaled from its range, is at
-- the maximum, as `trajectory.RIGHT` defines it.
CREATE TEMP TABLE taken AS
SELECT {training_step}, file_row_number AS place, trajectory_id, uid, status,
       outcome, "index" AS position, agent, turn, {sub_reward} AS sub_reward, {credit_columns},
       CASE WHEN coalesce("index", 0) = 0 AND outcome IS NOT NULL THEN
           (outcome - (outcome_score ->> '$.range[0]')::DOUBLE)
           / ((outcome_score ->> '$.range[1]')::DOUBLE - (outcome_score ->> '$.range[0]')::DOUBLE) >= 1 - 1e-9
       END AS ended_right,
       CASE WHEN coalesce("index", 0) = 0 THEN left(task ->> '$.prompt[-1].content', 200) END AS prompt,
       CASE WHEN coalesce("index", 0) = 0 THEN hash(task) END AS task_key,
       CASE WHEN coalesce("index", 0) = 0 THEN {branch_of} END AS branch_of
FROM {source};

INSERT INTO all_trajectories
WITH found AS (
    SELECT training_step, min(place) AS place, trajectory_id, any_value(uid), any_value(status), any_value(outcome),
           any_value(ended_right), count(position), min(position) FILTER (WHERE sub_reward < 1 - 1e-9),
           any_value(prompt), any_value(task_key), any_value(branch_of) AS branch_of
    FROM taken GROUP BY training_step, trajectory_id
), branches AS (
    SELECT training_step, branch_of AS trajectory_id, count(*) AS n FROM found WHERE branch_of IS NOT NULL GROUP BY ALL
)
SELECT f.*, coalesce(b.n, 0) FROM found f
LEFT JOIN branches b ON f.training_step = b.training_step AND f.trajectory_id = b.trajectory_id;

INSERT INTO all_steps
SELECT t.training_step, t.trajectory_id, position, agent, turn, sub_reward, scored, failed, gate_open, threshold,
       trained, credit, withheld, advantage, p.ended_right, sub_reward < 1 - 1e-9, p.branch_of
FROM taken t JOIN all_trajectories p ON t.training_step = p.training_step AND t.trajectory_id = p.trajectory_id
WHERE position IS NOT NULL;

DROP TABLE taken;
