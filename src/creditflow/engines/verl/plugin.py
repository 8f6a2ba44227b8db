"""Credit inside verl's own program: an advantage estimator and trainer modes, for users who keep `main_ppo`.

* `algorithm.adv_estimator=creditflow`: one row a trajectory, whose turns are the runs of ones in the response mask.
* `trainer.v1.trainer_mode=credit_sync` (`credit_colocate_async`, `credit_separate_async`): also agent loops that return
  several rows for a trajectory. `extra_fields` of a row may have `agent`, `score` and `parents`.

`+algorithm.creditflow.*` has the options of credit under their names in a recipe, and those of `Settings`. The module
loads by itself with verl, as an entry point of `verl.plugins`, where creditflow is installed. Its import is light: it
registers when verl's own modules are imported.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib.machinery import ModuleSpec
from itertools import groupby, pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic_core import to_jsonable_python

from creditflow._utils.pins import difference
from creditflow._utils.sections import Section, Share, Text, checked, expected
from creditflow.credit import Assignment, CreditOptions, assign
from creditflow.credit.analysis.metrics import batch_stats
from creditflow.credit.history import History
from creditflow.credit.thresholds.base import Threshold
from creditflow.data import TRAJECTORY_STATUSES, Bools, Floats, Ints, Task, TrajectoryBatch
from creditflow.data.trajectory import content_text
from creditflow.errors import BatchError, ConfigError, InputError

if TYPE_CHECKING:
    from creditflow.runs import RunFolder

ESTIMATOR, PREFIX, KEY = "creditflow", "credit_", "algorithm.creditflow"
"""The estimator, the prefix of the trainer modes, and the section of options, under `+`."""
TESTED = {
    "0.9.0, 0.9.1 and 0.10.0.dev of August 2026": {
        "trainer/ppo/v1/agent_loop_tq.py: AgentLoopWorkerTQ._agent_loop_postprocess": "7d2cd70a1ab4",
        "trainer/ppo/v1/trainer_base.py: PPOTrainer._build_replay_buffer": "88d2519ad35c",
        "trainer/ppo/v1/trainer_base.py: PPOTrainer._compute_advantage": "f4630d6f903c",
    }
}
"""The methods of verl that a mode overrides or relies on, with the hashes of their source in the tested versions."""
_USE_MODE = f"set trainer.v1.trainer_mode={PREFIX}sync instead of algorithm.adv_estimator={ESTIMATOR}"
_SHARED = (
    *("data.train_files", "data.val_files", "data.train_batch_size", "data.seed", "actor_rollout_ref.model.path"),
    *("actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.temperature"),
)
"""verl's options that a run's folder has under the same name in a recipe: those with one meaning in both."""


class Entries(Section):
    """Entries of credit in a row's `extra_fields`."""

    agent: Text = "agent"
    score: list[Share | None] = Field(default_factory=list)
    """Scores of the first turns; None, and later turns, have none."""
    parents: list[int] | None = None
    """Indices of the outputs that the first turn read; None: the nearest earlier one with sampled tokens."""
    is_answer: bool = False
    """Whether the last turn is the answer of the trajectory. Without one, it is that of the last output."""

    @classmethod
    def checked(cls, values: Mapping[str, Any], key: str) -> Entries:
        """Read arrays, tensors and 32-bit scores, too. Raises ConfigError that names `key`."""
        given = {name: _plain(values[name]) for name in cls.model_fields if values.get(name) is not None}
        return checked(cls, given | {name: _list(given[name]) for name in ("score", "parents") if name in given}, key)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _list(value: Any) -> list[Any]:
    """A number or list as a list. Scores from 32 bits are rounded: 1.00000003."""
    items = [_plain(item) for item in (value if isinstance(value, list | tuple) else [value])]
    return [round(item, 6) if isinstance(item, float) else item for item in items]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A row of verl: a trajectory of one or several turns, or one call of a trajectory with several rows."""

    uid: str
    session: int
    """The rollout of the task `uid`."""
    index: int
    """The place in the list that the agent loop returned."""
    outcome: float
    entries: Entries = field(default_factory=Entries)
    cut: bool = False
    """Whether its response reaches verl's limit, so that its trajectory is truncated."""

    @classmethod
    def from_fields(cls, key: str, outcome: float, extra_fields: Any, cut: bool) -> Row:
        """The row of a key `uid_session_index`. Raises ConfigError for entries of a wrong type."""
        uid, session, index = key.rsplit("_", 2)
        extra = getattr(extra_fields, "data", extra_fields) or {}
        return cls(uid, int(session), int(index), outcome, Entries.checked(extra, f"row {key}: extra_fields"), cut)

    def __str__(self) -> str:
        return f"row {self.uid}_{self.session}_{self.index}"


TwoNumbers = Annotated[list[float], Field(min_length=2, max_length=2), expected("two numbers such as [-1,1]")]


class Settings(Section):
    """Options of this module in `+algorithm.creditflow`, beside those of credit."""

    outcome_range: TwoNumbers = Field(default_factory=lambda: [0.0, 1.0])
    """The lowest and the highest possible reward of a trajectory."""
    turn_scores: bool = False
    """Estimator: rewards at the tokens of a turn before the last are its score. A mode reads `extra_fields`."""
    folder: Annotated[Text, Field(min_length=1)] | None = None
    """Mode: a new folder for `creditflow why` and `creditflow report`, with every step and its terms."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of rows as the steps of a batch. R rows, L tokens in a row, T sampled tokens."""

    batch: TrajectoryBatch
    token_T: tuple[Ints, Ints]
    """Row and column [T] of each sampled token, in the order of the batch."""

    @classmethod
    def from_rows(cls, rows: Sequence[Row], mask_RL: Bools, outcome_range: Sequence[float]) -> Turns:
        """Build the batch. A row without sampled tokens has no turns.

        The parent of a turn is the one before it in its row; the first turn has the last turn of each row in `parents`.
        Raises BatchError, among others for parents that do not exist and outcomes outside the range.
        """
        in_order = sorted(range(len(rows)), key=lambda r: (rows[r].uid, rows[r].session, rows[r].index))
        last = {(rows[r].uid, rows[r].session): rows[r] for r in in_order}
        order = np.array([r for r in in_order if mask_RL[r].any()], dtype=np.int64)
        mask_RL = mask_RL[order]
        start_RL = mask_RL & ~np.pad(mask_RL, ((0, 0), (1, 0)))[:, :-1]
        row_S = np.nonzero(start_RL)[0]
        first_R = np.searchsorted(row_S, np.arange(len(order) + 1)).tolist()
        turns = {rows[r]: range(*bounds) for r, bounds in zip(order.tolist(), pairwise(first_R), strict=True)}
        trajectories = [list(part) for _, part in groupby(turns, key=lambda row: (row.uid, row.session))]
        row_T, column_T = np.nonzero(mask_RL)
        batch = TrajectoryBatch.from_arrays(
            trajectory_of_step=[n for n, part in enumerate(trajectories) for row in part for _ in turns[row]],
            group_of_trajectory=[part[0].uid for part in trajectories],
            outcome=[_outcome(last[part[0].uid, part[0].session], outcome_range) for part in trajectories],
            outcome_range=(outcome_range[0], outcome_range[1]),
            agent_of_step=[row.entries.agent for row, steps in turns.items() for _ in steps],
            scores=(scores := _scores(turns)),
            score_names=None if scores is None else ("score",),
            is_answer=[row.entries.is_answer and s == steps[-1] for row, steps in turns.items() for s in steps],
            edges=_edges(rows, turns),
            token_offsets=np.append(np.flatnonzero(start_RL[mask_RL]), len(row_T)),
            response_mask=np.ones(len(row_T), dtype=np.bool_),
        )
        cut_N = [any(row.cut for row in part) for part in trajectories]
        status_N = np.where(cut_N, TRAJECTORY_STATUSES.index("truncated"), batch.status_of_trajectory)
        return cls(replace(batch, status_of_trajectory=status_N), (order[row_T], column_T))

    def spread(self, column_T: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """[R, L] the values of the sampled tokens in verl's rows, 0 elsewhere."""
        column_RL = np.zeros(shape, np.float32)
        column_RL[self.token_T] = column_T
        return column_RL


def _scores(turns: Mapping[Row, range]) -> Floats | None:
    """[S] the scores of the turns, NaN for turns without one; None if no turn has a score."""
    scores: list[float | None] = []
    for row, steps in turns.items():
        score = row.entries.score
        if len(score) > len(steps):
            raise BatchError(f"{row}: extra_fields.score: expected at most {len(steps)} for turns, got {len(score)}")
        scores += [*score, *[None] * (len(steps) - len(score))]
    score_S: Floats = np.array(scores, dtype=np.float64)
    return None if np.isnan(score_S).all() else score_S


def _edges(rows: Sequence[Row], turns: Mapping[Row, range]) -> NDArray[np.int64]:
    """[E, 2] child and parent of the turns. A parent without turns passes nothing on."""
    edges: list[tuple[int, int]] = []
    turns_at = {(row.uid, row.session, row.index): turns.get(row, range(0)) for row in rows}
    before: Row | None = None
    for row, steps in turns.items():
        edges += [(s, s - 1) for s in steps[1:]]
        parents = row.entries.parents
        if parents is None:
            parents = [before.index] if before and (before.uid, before.session) == (row.uid, row.session) else []
        for parent in dict.fromkeys(parents):
            if parent >= row.index or (row.uid, row.session, parent) not in turns_at:
                raise BatchError(
                    f"{row}: extra_fields.parents: expected indices, below {row.index}, of the outputs that its agent "
                    f"loop returned, got {parent!r}"
                )
            edges += [(steps[0], s) for s in turns_at[row.uid, row.session, parent][-1:]]
        before = row
    return np.array(edges, dtype=np.int64).reshape(-1, 2)


def _outcome(row: Row, bounds: Sequence[float]) -> float:
    """The outcome of a row. A bound that was rounded to 32 bits is the bound again."""
    if not math.isfinite(row.outcome):
        raise BatchError(f"{row}: expected a finite reward, got {row.outcome}")
    close = [bound for bound in bounds if math.isclose(row.outcome, bound, rel_tol=1e-6, abs_tol=1e-6)]
    if not close and not bounds[0] <= row.outcome <= bounds[1]:
        raise BatchError(f"{row}: reward {row.outcome} is not in {list(bounds)}; set +{KEY}.outcome_range=[LOW,HIGH]")
    return float(close[0]) if close else row.outcome


@dataclass(slots=True)
class Credit:
    """Options of credit and their state: threshold and history."""

    options: CreditOptions
    settings: Settings
    threshold: Threshold
    history: History = field(default_factory=History)

    @classmethod
    def from_config(cls, algorithm: Any, *, mode: bool) -> Credit:
        """Read verl's section `algorithm`, for a trainer mode or for the estimator.

        Raises ConfigError for unknown and unusable options, as for a recipe.
        """
        from creditflow.config import credit_options

        keys, own = _options(algorithm)
        settings = checked(Settings, own, KEY)
        low, high = settings.outcome_range
        try:
            options = credit_options(**keys)
        except ConfigError as error:  # it names keys of a recipe
            raise ConfigError(str(error).replace("algorithm.", f"{KEY}.")) from error
        verls, rejects = algorithm.get("adv_estimator"), (algorithm.get("rollout_correction") or {}).get("rollout_rs")
        if algorithm.get("use_kl_in_reward"):
            wrong = "use_kl_in_reward: not in credit; set actor_rollout_ref.actor.use_kl_loss=true"
        elif not low < high:
            wrong = f"creditflow.outcome_range: expected the lowest reward first, got [{low:g},{high:g}]"
        elif options.group_by == "task_agent_state":
            wrong = "creditflow.group_by: prompts are not known here; set task_agent_turn"
        elif "max_version_lag" in keys:
            wrong = "creditflow.max_version_lag: the versions of the policy are not known here; leave it out"
        elif mode and str(verls) not in ("gae", "grpo", ESTIMATOR):
            wrong = f"adv_estimator: a mode reads {KEY}.adv_estimator in place of {verls}; set grpo"
        elif mode and settings.turn_scores:
            wrong = "creditflow.turn_scores: a mode reads scores from extra_fields; leave it out"
        elif not mode and options.estimator.critic:
            wrong = f"creditflow.adv_estimator: {options.adv_estimator} reads a critic; {_USE_MODE}"
        elif not mode and settings.folder:
            wrong = f"creditflow.folder: an estimator does not know the training step; {_USE_MODE}"
        elif not mode and options.mask_truncated:
            wrong = f"creditflow.mask_truncated: an estimator does not know which responses are cut; {_USE_MODE}"
        elif not mode and rejects:
            wrong = f"rollout_correction.rollout_rs: rejected tokens would look like turns; {_USE_MODE}"
        else:
            return cls(options, settings, options.propagation.make_threshold())
        raise ConfigError(f"algorithm.{wrong}")

    def assign(self, turns: Turns, values_T: Floats | None = None) -> Assignment:
        """Assign credit, and learn from the batch."""
        batch, threshold, history = turns.batch, self.threshold, self.history
        assignment = assign(batch, self.options, values_T=values_T, threshold=threshold, history=history)
        self.threshold.update(batch_stats(assignment))
        self.history = assignment.history_after
        return assignment


def _options(algorithm: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of credit in verl's section `algorithm`, and those of `Settings`."""
    from omegaconf import OmegaConf

    section: Any = OmegaConf.to_container(OmegaConf.create({KEY: algorithm.get("creditflow") or {}}), resolve=True)
    section = checked(dict[str, Any], section[KEY], KEY)
    return section, {name: section.pop(name) for name in Settings.model_fields if name in section}


_CREDITS: dict[str, Credit] = {}
"""The state of the estimator, by its options. A process trains one run."""


def advantages(token_level_rewards: Any, response_mask: Any, config: Any = None, index: Any = (), **_: Any) -> Any:
    """verl's estimator: `token_level_rewards` and `response_mask` [R, L], `index` [R] the task of each row.

    The outcome is the sum of the rewards from the start of the last turn on. Returns advantages, and once more as
    returns. Raises ConfigError for options that need a trainer mode, and BatchError, among others for more rows of a
    task than `rollout.n`: verl does not tell which rows of a list belong together.
    """
    import torch
    from omegaconf import OmegaConf

    config = {} if config is None else config
    key = repr(config.get("creditflow"))
    credit = _CREDITS[key] = _CREDITS.get(key) or Credit.from_config(config, mode=False)
    mask_RL, reward_RL = response_mask.bool().cpu().numpy(), token_level_rewards.double().cpu().numpy()
    root = config._get_root() if OmegaConf.is_config(config) else OmegaConf.create()
    n, rows_of = OmegaConf.select(root, "actor_rollout_ref.rollout.n"), Counter(np.array(index)[mask_RL.any(axis=1)])
    if n and (more := next((f"{rows} rows of task {uid}" for uid, rows in rows_of.items() if rows > n), None)):
        raise BatchError(f"{more}, but actor_rollout_ref.rollout.n={n}; if agent loops return lists, {_USE_MODE}")
    scored = credit.settings.turn_scores
    rows = [_row_of_rewards(str(uid), r, reward_RL[r], mask_RL[r], scored) for r, uid in enumerate(index)]
    turns = Turns.from_rows(rows, mask_RL, credit.settings.outcome_range)
    column = torch.from_numpy(turns.spread(credit.assign(turns).token_advantages(), mask_RL.shape))
    column = column.to(token_level_rewards.device)
    return column, column


def _row_of_rewards(uid: str, r: int, reward_L: Floats, mask_L: Bools, scored: bool) -> Row:
    """The row of a trajectory with rewards at its tokens."""
    starts = np.flatnonzero(mask_L & ~np.append(False, mask_L[:-1]))
    *before, outcome = [float(part.sum()) for part in np.split(reward_L, starts[1:])]
    if any(before) and not scored:
        raise BatchError(f"row {r}: rewards at tokens before the last turn; +{KEY}.turn_scores=true makes them scores")
    return Row(uid, r, 0, outcome, Entries.checked({"score": before} if scored else {}, f"row {r}: turn_scores"))


class CreditMode:
    """A mix-in for verl's trainers: credit instead of the advantages of `_compute_advantage`."""

    config: Any
    tokenizer: Any
    trainer_mode: str
    use_critic: bool
    global_steps: int
    parameter_sync_step: int

    def __init__(self, config: Any) -> None:
        from omegaconf import open_dict

        root = Path(str(sys.modules["verl"].__file__)).parent
        if differs := difference(root, TESTED):
            raise ConfigError(f"trainer.v1.trainer_mode: this verl {differs}; install one of these versions")
        self.credit = Credit.from_config(config.algorithm, mode=True)
        with open_dict(config):  # verl compares the name of the mode, and derives the critic from the estimator
            config.trainer.v1.trainer_mode = config.trainer.v1.trainer_mode.removeprefix(PREFIX)
            config.algorithm.adv_estimator = "gae" if self.credit.options.estimator.critic else "grpo"
        super().__init__(config)  # type: ignore[call-arg]
        if (path := self.credit.settings.folder) is not None and not _resumes(config.trainer):
            _expect_no_steps(Path(path))  # before models are loaded
        if path is not None and self.parameter_sync_step > 1:
            raise ConfigError(
                f"{KEY}.folder: needs trainer.v1.{self.trainer_mode}.parameter_sync_step=1 (a file a step)"
            )

    def on_init_end(self) -> None:
        """Open the folder: verl has loaded its checkpoint, and no rollout has begun."""
        super().on_init_end()  # type: ignore[misc]
        path = self.credit.settings.folder
        self._folder = None if path is None else run_folder(Path(path), self.config, self.global_steps)
        if self._folder is not None:  # the texts of tokens in the report
            self.tokenizer.save_pretrained(self._folder.path / "tokenizer")

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Write advantages and returns to the rows, after verl's own work: rollout correction and its weights."""
        import torch
        import transfer_queue as tq
        from verl.workers.utils.padding import response_to_nested

        from creditflow.engines.verl.rows import write

        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        names = ["response_mask", "rm_scores", "extra_fields", *(["values"] if self.use_critic else [])]
        data = tq.kv_batch_get(**where, select_fields=names)
        batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        kept = tq.kv_batch_get(**where, select_fields=["response_mask"])["response_mask"]

        mask_RL = data["response_mask"].to_padded_tensor(0).bool().numpy()
        outcome_R = [float(reward_L.sum()) for reward_L in data["rm_scores"].unbind()]
        most = self.config.actor_rollout_ref.rollout.response_length
        cut_R = [len(mask_L) >= most for mask_L in data["response_mask"].unbind()]
        rows = list(map(Row.from_fields, batch.keys, outcome_R, data["extra_fields"], cut_R))
        turns = Turns.from_rows(rows, mask_RL, self.credit.settings.outcome_range)
        values_T = data["values"].to_padded_tensor(0).double().numpy()[turns.token_T] if self.use_critic else None
        assignment = self.credit.assign(turns, values_T)
        self._record(assignment, turns, metrics, where)

        kept_RL = kept.to_padded_tensor(0)

        def nested(column_T: Floats) -> Any:
            return response_to_nested(torch.from_numpy(turns.spread(column_T, mask_RL.shape)) * kept_RL, kept)

        advantages = nested(assignment.token_advantages())
        returns = advantages if assignment.returns_T is None else nested(assignment.returns_T)
        return write(batch, {"advantages": advantages, "returns": returns})

    def _record(self, assignment: Assignment, turns: Turns, metrics: dict[str, Any], where: Mapping[str, Any]) -> None:
        """Add the metrics of credit, and write the step file."""
        from creditflow.engines.common.metrics import step_metrics
        from creditflow.engines.verl.rows import numbers
        from creditflow.monitoring.metrics import evaluation_metrics

        metrics.update(step_metrics(assignment.batch, None, assignment, self.credit.threshold))
        ended = evaluation_metrics(assignment.batch, n=1)
        metrics.update({f"train/{name}": ended[name] for name in ("pass_at_1", "outcome_mean")})
        rollouts = self.config.actor_rollout_ref.rollout.n * len(assignment.batch.group_names)
        metrics["rollout/lost_frac"] = 1 - assignment.batch.n_trajectories / rollouts
        if self._folder is not None:
            self._folder.write_steps(self.global_steps, self._recorded(turns, where), assignment)
            self._folder.append_metrics(self.global_steps, numbers(metrics))

    def _recorded(self, turns: Turns, where: Mapping[str, Any]) -> TrajectoryBatch:
        """The batch with tasks, texts and tokens, and ids that are unique in the run.

        The prompt of a turn is all text before it in its row. The answer is the response of the last answer step.
        """
        import transfer_queue as tq

        sampled = self.config.actor_rollout_ref.rollout.calculate_log_probs
        log_probs = "rollout_log_probs" if sampled else "old_log_probs"
        data = tq.kv_batch_get(**where, select_fields=["prompts", "responses", log_probs, *_TASK])
        batch, (row_T, column_T) = turns.batch, turns.token_T
        prompts: list[str] = []
        responses: list[str] = []
        row, text, end = -1, "", 0
        for first, last in pairwise(batch.token_offsets.tolist()):
            if row_T[first] != row:
                row, end = int(row_T[first]), 0
                response = data["responses"][row].tolist()
                text = self.tokenizer.decode(data["prompts"][row].tolist())
            begin = int(column_T[first])
            prompts.append(text + self.tokenizer.decode(response[end:begin]))
            end = int(column_T[last - 1]) + 1
            responses.append(self.tokenizer.decode(response[begin:end], skip_special_tokens=True))
            text = prompts[-1] + self.tokenizer.decode(response[begin:end])
        trajectory_ids = tuple(f"{self.global_steps:06d}-{n}" for n in range(batch.n_trajectories))
        places = zip(batch.trajectory_of_step.tolist(), batch.index_of_step.tolist(), strict=True)
        answer_S = np.flatnonzero(batch.is_answer_step)
        answer_N = list(dict(zip(batch.trajectory_of_step[answer_S], answer_S.tolist(), strict=True)).values())
        row_N = row_T[batch.token_offsets[answer_N]].tolist()
        return replace(
            batch,
            trajectory_ids=trajectory_ids,
            tasks=tuple(_task({name: data[name][row] for name in _TASK if name in data}) for row in row_N),
            answers=tuple(responses[s] for s in answer_N),
            step_ids=tuple(f"{trajectory_ids[n]}/{i}" for n, i in places),
            prompts=tuple(prompts),
            responses=tuple(responses),
            policy_version=np.full(batch.n_steps, self.global_steps - 1),
            response_ids=data["responses"].to_padded_tensor(0).int().numpy()[turns.token_T],
            logprobs=data[log_probs].to_padded_tensor(0).double().numpy()[turns.token_T],
        )


_TASK = ("data_source", "raw_prompt", "reward_model")
"""Columns of verl's data sets; a custom data set may lack some."""


def _task(columns: Mapping[str, Any]) -> Task:
    """The task of a row for the record, whatever the columns hold."""
    plain = to_jsonable_python(dict(columns), bytes_mode="base64", fallback=lambda v: getattr(v, "tolist", v.__str__)())
    messages, truth = plain.get("raw_prompt"), plain.get("reward_model")
    messages = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    prompt = [{"role": str(of.get("role")), "content": content_text(of.get("content"))} for of in messages]
    truth = truth.get("ground_truth") if isinstance(truth, dict) else None
    return Task(str(plain.get("data_source", "")), tuple(prompt), truth)


def run_folder(path: Path, config: Any, step: int) -> RunFolder:
    """The folder of a new run, or of one that goes on after training step `step`."""
    from omegaconf import OmegaConf

    from creditflow.config import recipe_of_dict
    from creditflow.engines.common.run import run_facts
    from creditflow.engines.verl.configuration import nested
    from creditflow.runs import RunFolder

    credit = {"algorithm": _options(config.algorithm)[0]}
    recipe = recipe_of_dict(credit, path.name, path)
    facts = run_facts(recipe, "verl's own program", ("torch", "verl"), verl=OmegaConf.to_container(config))
    known = nested(credit | {key: value for key in _SHARED if (value := OmegaConf.select(config, key)) is not None})
    facts |= {"config": OmegaConf.to_container(known), "seed": OmegaConf.select(known, "data.seed")}
    try:
        if not (path / "run.json").exists():
            return RunFolder.create(path, facts, OmegaConf.to_yaml(known))
        folder, before = RunFolder.open(path), json.loads((path / "run.json").read_text())
    except InputError as error:  # it names the option of a recipe
        raise ConfigError(str(error).replace("trainer.default_local_dir", f"{KEY}.folder")) from error
    if step == 0:
        _expect_no_steps(path)
    if before.get("verl", {}).get("algorithm") != json.loads(json.dumps(facts["verl"]))["algorithm"]:
        raise ConfigError(f"{KEY}.folder: {path} belongs to a run with other options of algorithm; name another folder")
    folder.rewind(step)
    return folder


def _expect_no_steps(path: Path) -> None:
    if any(path.glob("steps/*")):
        raise ConfigError(f"{KEY}.folder: {path} has steps of an earlier run, and this one begins; name another folder")


def _resumes(trainer: Any) -> bool:
    """Whether verl will load a checkpoint."""
    from creditflow.engines.verl.recipe import LATEST

    saved = trainer.resume_mode == "auto" and (Path(trainer.default_local_dir) / LATEST).exists()
    return saved or bool(trainer.resume_mode == "resume_path")


def check_options(config: Any) -> None:
    """Raise ConfigError for wrong options of credit, and for those that neither a mode nor the estimator reads."""
    from omegaconf import OmegaConf

    mode = str(OmegaConf.select(config, "trainer.v1.trainer_mode"))
    is_mode = mode.startswith(PREFIX) and OmegaConf.select(config, "trainer.use_v1", default=True)
    if is_mode or config.algorithm.adv_estimator == ESTIMATOR:
        credit = Credit.from_config(config.algorithm, mode=is_mode)
        if credit.options.estimator.critic and OmegaConf.select(config, "critic.enable") is False:
            raise ConfigError(f"critic.enable: expected null, since {KEY}.adv_estimator reads a critic")
    elif "creditflow" in config.algorithm:
        raise ConfigError(
            f"{KEY}: without effect; set trainer.v1.trainer_mode={PREFIX}sync (and trainer.use_v1=true, verl's "
            f"default) or algorithm.adv_estimator={ESTIMATOR}"
        )


class _AfterImport:
    """A finder, first in `sys.meta_path`, that calls the function of a module when it has been imported."""

    def __init__(self, functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self.functions = functions

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.functions:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self.functions[name](module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _add_estimator(core_algos: Any) -> None:
    if hasattr(core_algos, "register_adv_est"):
        core_algos.register_adv_est(ESTIMATOR)(advantages)


def _add_modes(trainers: Any) -> None:
    known = getattr(sys.modules.get("verl.trainer.ppo.v1.trainer_base"), "TRAINER_REGISTRY", {})
    for name in known.keys() & {"sync", "colocate_async", "separate_async"}:
        mode = type(f"Credit_{name}", (CreditMode, known[name]), {})
        trainers.register_trainer(f"{PREFIX}{name}")(mode)


def _add_check(configs: Any) -> None:
    """Extend verl's check of the configuration, with which `main_ppo` begins."""
    if not hasattr(configs, "validate_config"):
        return

    @wraps(verls := configs.validate_config)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> None:
        check_options(config)
        verls(config, *args, **kwargs)

    configs.validate_config = validate_config


def _register() -> None:
    functions = {
        "verl.trainer.ppo.core_algos": _add_estimator,
        "verl.trainer.ppo.v1": _add_modes,
        "verl.utils.config": _add_check,
    }
    others = (finder for finder in sys.meta_path if type(finder).__name__ != _AfterImport.__name__)  # of a reload
    sys.meta_path[:] = [_AfterImport(functions), *others]
    for name, function in functions.items():
        if name in sys.modules:
            function(sys.modules[name])


_register()
