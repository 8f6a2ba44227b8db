-- Adds step files to the index. Names in braces are filled in: source is the files as a table, credit_columns and
-- sub_reward are null in files without credit, and the columns of gates in files of a rule without gates; trained is null for steps of an untrained policy. A trajectory ended right if its outcome, rescaled from its range, is at
-- the maximum, as `trajectory.RIGHT` defines it. A step's index is its place in its trajectory, whose rows are adjacent.
CREATE OR REPLACE TEMP TABLE taken AS
SELECT * REPLACE (least(turn, {last_turn}) AS turn, CASE WHEN untrained THEN NULL ELSE trained END AS trained),
       sub_reward < 1 - 1e-9 AS wrong
FROM (
    SELECT {training_step}, {number} AS number, "index" AS position, agent, turn, {sub_reward} AS sub_reward,
           {credit_columns}, policy IN ('{untrained}') AS untrained
    FROM {source} WHERE "index" IS NOT NULL
);

CREATE OR REPLACE TEMP TABLE begun AS
SELECT {training_step}, {number} AS number, trajectory_id, uid, status, outcome,
       CASE WHEN outcome IS NOT NULL THEN
           (outcome - (outcome_score ->> '$.range[0]')::DOUBLE)
           / ((outcome_score ->> '$.range[1]')::DOUBLE - (outcome_score ->> '$.range[0]')::DOUBLE) >= 1 - 1e-9
       END AS ended_right,
       left(task ->> '$.prompt[-1].content', 200) AS prompt, hash(task) AS task_key
FROM {source} WHERE coalesce("index", 0) = 0;

INSERT INTO trajectories
WITH done AS (
    SELECT number, count(*) AS n_steps, min(position) FILTER (WHERE wrong) AS first_error,
           arg_min(agent, position) FILTER (WHERE wrong) AS erring_agent, max(abs(advantage)) FILTER (WHERE trained AND isfinite(advantage)) AS largest
    FROM taken GROUP BY number
)
SELECT b.number, b.training_step, b.trajectory_id, uid, status, outcome, ended_right, coalesce(n_steps, 0), first_error,
       erring_agent, task_key, largest
FROM begun b LEFT JOIN done USING (number)
ORDER BY b.number;

INSERT INTO tasks
SELECT task_key, any_value(prompt) FROM begun
WHERE prompt IS NOT NULL AND task_key NOT IN (SELECT task_key FROM tasks) GROUP BY task_key;

INSERT INTO steps SELECT number, agent, sub_reward, gate_open FROM taken;

INSERT INTO sums
SELECT training_step, agent, turn, count(*), count(scored), count(*) FILTER (WHERE scored),
       count(*) FILTER (WHERE wrong), count(*) FILTER (WHERE scored AND gate_open),
       count(*) FILTER (WHERE scored AND NOT gate_open), count(trained), count(*) FILTER (WHERE trained), sum(sub_reward),
       max(threshold), sum(credit) FILTER (WHERE trained), sum(abs(credit)) FILTER (WHERE trained),
       sum(abs(withheld)) FILTER (WHERE NOT isnan(withheld)), sum(advantage) FILTER (WHERE trained),
       count(*) FILTER (WHERE trained AND wrong), count(*) FILTER (WHERE trained AND wrong AND advantage > 0), count(*) FILTER (WHERE trained AND NOT wrong),
       count(*) FILTER (WHERE trained AND NOT wrong AND advantage < 0)
FROM taken GROUP BY training_step, agent, turn;

INSERT INTO parts
WITH acted AS (
    SELECT training_step, number, agent, coalesce(bool_or(scored), false) AS scored,
           coalesce(bool_or(wrong), false) AS erred
    FROM taken GROUP BY training_step, number, agent
)
SELECT a.training_step, uid, agent, bool_or(scored), count(ended_right), count(*) FILTER (erred AND ended_right IS NOT NULL),
       count(*) FILTER (NOT ended_right), count(*) FILTER (erred AND NOT ended_right),
       count(*) FILTER (agent IS NOT DISTINCT FROM erring_agent AND NOT ended_right)
FROM acted a JOIN trajectories p USING (number) GROUP BY ALL;

INSERT INTO advantages
SELECT training_step, agent, {bin}, count(*) FROM taken WHERE trained AND isfinite(advantage) GROUP BY ALL;
