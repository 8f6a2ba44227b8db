"""Credit inside verl's own program: an advantage estimator and trainer modes, for users who keep `main_ppo`.

    VERL_USE_EXTERNAL_MODULES=creditflow.engines.verl.plugin python -m verl.trainer.main_ppo ...

* `algorithm.adv_estimator=creditflow`: one row a trajectory, whose turns are the runs of ones in the response mask.
* `trainer.v1.trainer_mode=credit_sync` (`credit_colocate_async`, `credit_separate_async`): also agent loops that return
  several rows for a trajectory. `extra_fields` of a row may have `agent`, `score` and `parents`.

`+algorithm.creditflow.*` has the options of credit under their names in a recipe, and those of `Settings`. The module
also loads by itself with verl, as an entry point of `verl.plugins`. Its import is light: it registers when verl's own
modules are imported.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import groupby, pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from creditflow._utils.pins import changed_methods
from creditflow.credit import Assignment, CreditOptions, assign
from creditflow.credit.analysis.metrics import batch_stats
from creditflow.credit.history import History
from creditflow.credit.thresholds.base import Threshold
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.errors import BatchError, ConfigError

if TYPE_CHECKING:
    from creditflow.runs import RunFolder

ESTIMATOR, PREFIX, KEY = "creditflow", "credit_", "algorithm.creditflow"
"""The estimator, the prefix of the trainer modes, and the section of options, under `+`."""
TESTED = {
    version: {
        "trainer/ppo/v1/agent_loop_tq.py: AgentLoopWorkerTQ._agent_loop_postprocess": "1cf327379b02",
        "trainer/ppo/v1/trainer_base.py: PPOTrainer._build_replay_buffer": "88aadd393f4b",
        "trainer/ppo/v1/trainer_base.py: PPOTrainer._compute_advantage": "39f6144bc6a8",
    }
    for version in ("0.9.0", "0.9.1", "0.10.0.dev of August 2026")
}
"""The methods of verl that a mode overrides or relies on, with the hashes of their source in each tested version."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of verl: a trajectory of one or several turns, or one call of a trajectory with several rows."""

    uid: str
    session: int
    """The rollout of the task `uid`."""
    index: int
    """The place in the list that the agent loop returned."""
    outcome: float
    agent: str = "agent"
    scores: Sequence[float] = ()
    """Scores of the first turns, from 0 to 1; later turns have none."""
    parents: Sequence[int] | None = None
    """Indices of the rows that the first turn read; None: the row before."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of this module in `+algorithm.creditflow`, beside those of credit."""

    outcome_range: Sequence[float] = (0.0, 1.0)
    """The lowest and the highest possible reward of a trajectory."""
    turn_scores: bool = False
    """Estimator: rewards at the tokens of a turn before the last are its score. A mode reads `extra_fields`."""
    folder: str | None = None
    """Mode: a new folder for `creditflow why` and `creditflow report`, with every step and its terms."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of rows as the steps of a batch. R rows, L tokens in a row, T sampled tokens."""

    batch: TrajectoryBatch
    row_S: Ints
    """[S] the row of each turn."""
    place_T: tuple[Ints, Ints]
    """Row and column [T] of each sampled token, in the order of the batch."""

    @classmethod
    def from_rows(cls, rows: Sequence[Row | None], mask_RL: Bools, outcome_range: Sequence[float]) -> Turns:
        """Build the batch. A row that is None (padding), or without sampled tokens, has no turns.

        Each turn has the one before it in its row as its parent; the first turn of a row, the last ones of `parents`.
        Raises BatchError, among others for parents that do not exist and outcomes outside the range.
        """
        real = sorted((row.uid, row.session, row.index, r) for r, row in enumerate(rows) if row is not None)
        order = [r for *_, r in real if mask_RL[r].any()]
        ordered: list[Row] = [row for r in order if (row := rows[r]) is not None]
        outcomes = {(uid, session): _outcome(rows[r], outcome_range) for uid, session, _, r in real}  # of the last row
        mask_RL = mask_RL[order]
        start_RL = mask_RL & ~np.pad(mask_RL, ((0, 0), (1, 0)))[:, :-1]
        row_S = np.nonzero(start_RL)[0]
        first_R = np.searchsorted(row_S, np.arange(len(order) + 1))
        trajectories = [list(rows) for _, rows in groupby(ordered, key=lambda row: (row.uid, row.session))]
        trajectory_R = np.repeat(np.arange(len(trajectories)), list(map(len, trajectories)))
        score_S = np.full(len(row_S), np.nan)
        for r, row in enumerate(ordered):
            if len(row.scores) > first_R[r + 1] - first_R[r]:
                raise BatchError(f"{_name(row)}: {len(row.scores)} scores for {first_R[r + 1] - first_R[r]} turns")
            score_S[first_R[r] : first_R[r] + len(row.scores)] = np.round(row.scores, 6)  # 32 bits: 1.00000003
        row_T, column_T = np.nonzero(mask_RL)
        batch = TrajectoryBatch.from_arrays(
            trajectory_of_step=trajectory_R[row_S],
            group_of_trajectory=[rows[0].uid for rows in trajectories],
            outcome=[outcomes[rows[0].uid, rows[0].session] for rows in trajectories],
            outcome_range=(outcome_range[0], outcome_range[1]),
            agent_of_step=[ordered[r].agent for r in row_S],
            scores=None if np.isnan(score_S).all() else score_S,
            edges=_edges(trajectories, first_R, {(uid, session, index) for uid, session, index, _ in real}),
            token_offsets=np.append(np.flatnonzero(start_RL[mask_RL]), len(row_T)),
            response_mask=np.ones(len(row_T), dtype=np.bool_),
        )
        return cls(batch, np.array(order, dtype=np.int64)[row_S], (np.array(order, dtype=np.int64)[row_T], column_T))

    def spread(self, column_T: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """[R, L] the values of the sampled tokens in verl's rows, 0 elsewhere."""
        column_RL = np.zeros(shape, np.float32)
        column_RL[self.place_T] = column_T
        return column_RL


def _outcome(row: Row | None, bounds: Sequence[float]) -> float:
    """The outcome of a row. A bound that was rounded to 32 bits is the bound again."""
    assert row is not None
    if not math.isfinite(row.outcome):
        raise BatchError(f"{_name(row)}: expected a finite reward, got {row.outcome}")
    close = [bound for bound in bounds if math.isclose(row.outcome, bound, rel_tol=1e-6, abs_tol=1e-6)]
    if not close and not bounds[0] <= row.outcome <= bounds[1]:
        raise BatchError(
            f"{_name(row)}: reward {row.outcome} is outside of {list(bounds)}; set "
            f"+{KEY}.outcome_range=[LOWEST,HIGHEST]"
        )
    return float(close[0]) if close else row.outcome


def _name(row: Row) -> str:
    return f"row {row.uid}_{row.session}_{row.index}"


def _edges(
    trajectories: Sequence[Sequence[Row]], first_R: Ints, real: Container[tuple[str, int, int]]
) -> NDArray[np.int64]:
    """[E, 2] child and parent of the turns; `first_R` [R + 1]: the first turn of each row.

    `real`: all rows, also those without turns, which pass nothing on.
    """
    edges = [(s, s - 1) for begin, end in pairwise(first_R.tolist()) for s in range(begin + 1, end)]
    r = 0
    for rows in trajectories:
        last = {row.index: int(first_R[r + i + 1]) - 1 for i, row in enumerate(rows)}
        for i, row in enumerate(rows):
            before = [rows[i - 1].index] if i else []
            for parent in before if row.parents is None else row.parents:
                if (row.uid, row.session, parent) not in real or parent >= row.index:
                    raise BatchError(
                        f"{_name(row)}: extra_fields.parents: expected indices, below {row.index}, of the outputs that "
                        f"its agent loop returned, got {parent!r}"
                    )
                if parent in last:
                    edges.append((int(first_R[r + i]), last[parent]))
        r += len(rows)
    return np.array(edges, dtype=np.int64).reshape(-1, 2)


@dataclass(slots=True)
class Credit:
    """The options of credit, and what they learn from batch to batch."""

    options: CreditOptions
    settings: Settings
    threshold: Threshold
    history: History = field(default_factory=History)

    @classmethod
    def from_config(cls, algorithm: Any) -> Credit:
        """Read verl's section `algorithm`. Raises ConfigError for unknown and unusable options, as for a recipe."""
        from creditflow.config import credit_options

        keys = _section(algorithm)
        own = {f.name: keys.pop(f.name) for f in fields(Settings) if f.name in keys}
        if algorithm.get("use_kl_in_reward"):
            raise ConfigError(
                "algorithm.use_kl_in_reward: credit has no term for it inside verl's program; set "
                "actor_rollout_ref.actor.use_kl_loss=true"
            )
        options, settings = credit_options(**keys), Settings(**own)
        if not isinstance(settings.turn_scores, bool):
            raise ConfigError(f"{KEY}.turn_scores: expected true or false, got {settings.turn_scores!r}")
        bounds = settings.outcome_range
        if not isinstance(bounds, list | tuple) or [type(b) in (int, float) for b in bounds] != [True, True]:
            raise ConfigError(f"{KEY}.outcome_range: expected two numbers such as [-1,1], got {bounds}")
        if options.group_by == "task_agent_state":
            raise ConfigError(f"{KEY}.group_by: prompts are not known here; set task_agent_turn")
        return cls(options, settings, options.propagation.make_threshold())

    def assign(self, batch: TrajectoryBatch, values_T: Floats | None = None) -> Assignment:
        """Assign credit, and learn from the batch."""
        assignment = assign(batch, self.options, values_T=values_T, threshold=self.threshold, history=self.history)
        self.threshold.update(batch_stats(assignment))
        self.history = assignment.history_after
        return assignment


def _section(algorithm: Any) -> dict[str, Any]:
    """The options in verl's section `algorithm`."""
    from omegaconf import OmegaConf

    section: Any = OmegaConf.to_container(OmegaConf.create(algorithm.get("creditflow") or {}), resolve=True)
    return dict(section)


_CREDITS: dict[str, Credit] = {}
"""The state of the estimator, by its options. A process trains one run."""


def advantages(
    token_level_rewards: Any, response_mask: Any, config: Any = None, index: Any = None, **_: Any
) -> tuple[Any, Any]:
    """verl's estimator: `token_level_rewards` and `response_mask` [R, L], `index` [R] the task of each row.

    The outcome is the sum of the rewards from the start of the last turn on. Returns advantages, and once more as
    returns. Raises ConfigError for options that need a trainer mode, and BatchError.
    """
    import torch

    config = {} if config is None else config
    credit = _CREDITS.setdefault(repr(config.get("creditflow")), Credit.from_config(config))
    use_mode = f"set trainer.v1.trainer_mode={PREFIX}sync instead of algorithm.adv_estimator={ESTIMATOR}"
    if credit.options.estimator.critic:
        raise ConfigError(f"{KEY}.adv_estimator: {credit.options.adv_estimator} reads a critic; {use_mode}")
    if credit.settings.folder is not None:
        raise ConfigError(f"{KEY}.folder: an estimator does not know the training step; {use_mode}")
    if (config.get("rollout_correction") or {}).get("rollout_rs"):
        raise ConfigError(f"algorithm.rollout_correction.rollout_rs: rejected tokens would look like turns; {use_mode}")
    mask_RL, reward_RL = response_mask.bool().cpu().numpy(), token_level_rewards.double().cpu().numpy()
    rows = [
        _row_of_rewards(str(uid), r, reward_RL[r], mask_RL[r], credit.settings.turn_scores)
        for r, uid in enumerate(index)
    ]
    turns = Turns.from_rows(rows, mask_RL, credit.settings.outcome_range)
    token_T = credit.assign(turns.batch).token_advantages()
    column = torch.from_numpy(turns.spread(token_T, mask_RL.shape)).to(token_level_rewards.device)
    return column, column


def _row_of_rewards(uid: str, r: int, reward_L: Floats, mask_L: Bools, scored: bool) -> Row:
    """The row of a trajectory with rewards at its tokens."""
    starts = np.flatnonzero(mask_L & ~np.append(False, mask_L[:-1]))
    paid = np.add.reduceat(reward_L, starts) if len(starts) else np.zeros(1)
    if not scored and paid[:-1].any():
        raise BatchError(
            f"row {r}: rewards at tokens before the last turn; they count as scores of turns with "
            f"+{KEY}.turn_scores=true"
        )
    return Row(uid, r, 0, float(paid[-1]), scores=paid[:-1].tolist() if scored else ())


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
        if differ := changed_methods(root, TESTED):
            raise ConfigError(
                f"trainer.v1.trainer_mode: this verl differs from {', '.join(TESTED)} in "
                f"{', '.join(name.split(': ')[1] for name in differ)}, which creditflow overrides or relies on; "
                "install one of these versions"
            )
        self.credit = Credit.from_config(config.algorithm)
        if (name := str(config.algorithm.adv_estimator)) not in ("gae", "grpo", ESTIMATOR):
            raise ConfigError(f"algorithm.adv_estimator: the trainer mode reads {KEY}.adv_estimator; move {name} there")
        with open_dict(config):  # verl compares the name of the mode, and derives the critic from the estimator
            config.trainer.v1.trainer_mode = config.trainer.v1.trainer_mode.removeprefix(PREFIX)
            config.algorithm.adv_estimator = "gae" if self.credit.options.estimator.critic else "grpo"
        super().__init__(config)  # type: ignore[call-arg]
        if self.credit.settings.folder is not None and self.parameter_sync_step > 1:
            raise ConfigError(
                f"{KEY}.folder: a training step has one step file; set trainer.v1.{self.trainer_mode}."
                "parameter_sync_step=1"
            )
        self._folder: RunFolder | None = None

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Write advantages and returns to the rows, after verl's own work: rollout correction and its weights."""
        import torch
        import transfer_queue as tq
        from tensordict import TensorDict
        from verl.workers.utils.padding import response_to_nested

        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        names = ["response_mask", "rm_scores", "extra_fields", *(["values"] if self.use_critic else [])]
        data = tq.kv_batch_get(**where, select_fields=names)
        batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        kept = tq.kv_batch_get(**where, select_fields=["response_mask"])["response_mask"]

        mask_RL = data["response_mask"].to_padded_tensor(0).bool().numpy()
        outcome_R = [float(row.sum()) for row in data["rm_scores"].unbind()]
        rows = [
            None if tag.get("is_padding") else _row_of_fields(key, outcome, extra)
            for key, tag, outcome, extra in zip(batch.keys, batch.tags, outcome_R, data["extra_fields"], strict=True)
        ]
        turns = Turns.from_rows(rows, mask_RL, self.credit.settings.outcome_range)
        values_T = None
        if self.use_critic:
            values_T = data["values"].to_padded_tensor(0).double().numpy()[turns.place_T]
        assignment = self.credit.assign(turns.batch, values_T)
        self._record(assignment, turns, metrics, where)

        advantage_T = assignment.token_advantages()
        returns_T = advantage_T if assignment.returns_T is None else assignment.returns_T
        nested = {
            name: response_to_nested(
                torch.from_numpy(turns.spread(column_T, mask_RL.shape)) * kept.to_padded_tensor(0), kept
            )
            for name, column_T in {"advantages": advantage_T, "returns": returns_T}.items()
        }
        return tq.kv_batch_put(**where, fields=TensorDict(nested, batch_size=len(batch.keys)))

    def _record(self, assignment: Assignment, turns: Turns, metrics: dict[str, Any], where: Mapping[str, Any]) -> None:
        """Add the metrics of credit, and write the step file."""
        from creditflow.credit.analysis.metrics import credit_metrics
        from creditflow.monitoring import error_metrics, rollout_metrics, sub_reward_metrics

        batch = assignment.batch
        for measure in (rollout_metrics, sub_reward_metrics, error_metrics):
            metrics.update(measure(batch))
        metrics.update(credit_metrics(assignment) | self.credit.threshold.metrics())
        if self.credit.settings.folder is None:
            return
        self._folder = self._folder or run_folder(Path(self.credit.settings.folder), self.config, self.global_steps)
        self._folder.write_steps(self.global_steps, self._with_texts(turns, where), assignment)
        numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float | np.number)}
        self._folder.append_metrics(self.global_steps, numbers)

    def _with_texts(self, turns: Turns, where: Mapping[str, Any]) -> TrajectoryBatch:
        """The batch with texts, and ids that are unique in the run. The prompt of a turn has all before it."""
        import transfer_queue as tq

        data = tq.kv_batch_get(**where, select_fields=["prompts", "responses"])
        prompts, responses = (data[name].unbind() for name in ("prompts", "responses"))
        batch, (row_T, column_T) = turns.batch, turns.place_T
        texts: list[tuple[str, str]] = []
        for begin, end in pairwise(batch.token_offsets.tolist()):
            row, first, last = int(row_T[begin]), int(column_T[begin]), int(column_T[end - 1])
            before = [*prompts[row].tolist(), *responses[row][:first].tolist()]
            said = responses[row][first : last + 1].tolist()
            texts.append((self.tokenizer.decode(before), self.tokenizer.decode(said, skip_special_tokens=True)))
        trajectory_ids = tuple(f"{self.global_steps:06d}-{n}" for n in range(batch.n_trajectories))
        places = zip(batch.trajectory_of_step.tolist(), batch.index_of_step.tolist(), strict=True)
        return replace(
            batch,
            trajectory_ids=trajectory_ids,
            step_ids=tuple(f"{trajectory_ids[n]}/{i}" for n, i in places),
            prompts=tuple(prompt for prompt, _ in texts),
            responses=tuple(response for _, response in texts),
        )


def _row_of_fields(key: str, outcome: float, fields: Any) -> Row:
    """The row of a key `uid_session_index`, with the `extra_fields` that its agent loop returned."""
    extra = getattr(fields, "data", fields) or {}
    uid, session, index = key.rsplit("_", 2)
    scores = extra.get("score")
    scores = () if scores is None else scores if isinstance(scores, Sequence) else (scores,)
    return Row(uid, int(session), int(index), outcome, str(extra.get("agent", "agent")), scores, extra.get("parents"))


def run_folder(path: Path, config: Any, step: int) -> RunFolder:
    """The folder of a new run, or of one that goes on with training step `step`."""
    from omegaconf import OmegaConf

    from creditflow.config import recipe_of_dict
    from creditflow.engines.common.run import run_facts
    from creditflow.runs import RunFolder

    keys = {key: value for key, value in _section(config.algorithm).items() if key not in Settings.__slots__}
    recipe = recipe_of_dict({"algorithm": keys}, str(config.trainer.experiment_name), path)
    if (path / "run.json").exists():
        if step == 1 or (path / "config.yaml").read_text() != recipe.to_yaml():
            why = "that a run which begins anew would remove" if step == 1 else "of a run with other options"
            raise ConfigError(f"{KEY}.folder: {path} has steps {why}; name another folder")
        folder = RunFolder.open(path)
        folder.rewind(step - 1)
        return folder
    facts = run_facts(recipe, "verl's own program", ("torch", "verl"), verl=OmegaConf.to_container(config))
    return RunFolder.create(path, facts, recipe.to_yaml())


class _AfterImport:
    """A finder, first in `sys.meta_path`, that calls a function when a module has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then, self.searching = name, then, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name or self.searching:
            return None
        self.searching = True
        spec = find_spec(name)
        self.searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self.then(module)
                sys.meta_path.remove(self)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _add_estimator(core_algos: Any) -> None:
    core_algos.register_adv_est(ESTIMATOR)(advantages)


def _add_modes(trainers: Any) -> None:
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    for name in ("sync", "colocate_async", "separate_async"):
        mode = type(f"Credit_{name}", (CreditMode, TRAINER_REGISTRY[name]), {})
        trainers.register_trainer(f"{PREFIX}{name}")(mode)


def _register() -> None:
    for name, add in {"verl.trainer.ppo.core_algos": _add_estimator, "verl.trainer.ppo.v1": _add_modes}.items():
        if name in sys.modules:
            add(sys.modules[name])
        else:
            sys.meta_path.insert(0, _AfterImport(name, add))


_register()
