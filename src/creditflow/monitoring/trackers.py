"""Send a run's metrics to wandb, TensorBoard or MLflow through accelerate's trackers.

The run's folder is written in any case. A tracker that cannot be set up is an input error. One that fails later is
reported and left out from then on, since a chart must not end a run of days.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from creditflow._utils.files import write_whole
from creditflow.credit import Assignment
from creditflow.errors import ConfigError, did_you_mean, first_line

KEY = "trainer.logger"
CONSOLE = "console"
_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "mlflow": "mlflow"}
NAMES = (CONSOLE, *_PACKAGES)
SHOWN = 8
"""Number of sample trajectories in a table."""
_TEXT = 2000
"""Characters of a prompt or response in a table."""
COLUMNS = (
    *("trajectory", "index", "agent", "prompt", "response"),
    *("sub_reward", "outcome", "gate_open", "credit", "advantage"),
)


@dataclass(slots=True)
class Trackers:
    """The open trackers of a run."""

    say: Callable[[str], None]
    open: dict[str, Any] = field(default_factory=dict)
    """accelerate's trackers by name."""

    @classmethod
    def start(
        cls,
        names: Sequence[str],
        project: str,
        run_name: str,
        folder: Path,
        config: Mapping[str, Any],
        say: Callable[[str], None],
        after: int = 0,
    ) -> Trackers:
        """Start the trackers of a new run, or of a run that continues `after` a training step.

        `config`: the run's configuration, stored with its metrics. Raises ConfigError, with the tracker's message, if
        one cannot be set up.
        """
        made = cls(say)
        for name in (name for name in names if name != CONSOLE):
            try:
                tracker = _MAKERS[name](project, run_name, folder, after)
                tracker.start()
                if after == 0:
                    tracker.store_init_configuration(_flat(config))
            except Exception as error:
                made.finish()
                raise ConfigError(f"{KEY}: {name} cannot be set up: {first_line(error)}") from error
            made.open[name] = tracker
            if name == "wandb":
                tracker.run.define_metric("*", step_metric="step")
            if name == "mlflow":
                run_id: str = tracker.active_run.info.run_id
                write_whole(folder / _MLFLOW_RUN, partial(Path.write_text, data=run_id))
        return made

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the finite metrics of a training step."""
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}

        def send(name: str, tracker: Any) -> None:
            if name == "wandb":  # wandb's own step cannot decrease, as after a rollback
                tracker.log({**finite, "step": step})
            else:
                tracker.log(_named_for(name, finite), step=step)

        self._each(send)

    def table(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """Send sample trajectories to the trackers with tables, as one row of COLUMNS per step."""

        def send(name: str, tracker: Any) -> None:
            if name == "wandb":
                import wandb

                table = wandb.Table(columns=["step", *COLUMNS], data=[[step, *row] for row in rows])
                tracker.log({"trajectories": table, "step": step})

        self._each(send)

    @property
    def takes_tables(self) -> bool:
        """Whether any open tracker has tables."""
        return "wandb" in self.open

    def finish(self) -> None:
        """Close all trackers."""
        self._each(lambda name, tracker: tracker.finish())
        self.open.clear()

    def _each(self, send: Callable[[str, Any], None]) -> None:
        for name, tracker in list(self.open.items()):
            try:
                send(name, tracker)
            except Exception as error:
                del self.open[name]
                self.say(
                    f"warning: {name} failed and is left out from now on: {first_line(error)}; metrics.jsonl has all"
                )


def expect_names(names: Sequence[str]) -> None:
    """Raise ConfigError for unknown trackers."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"{KEY}: expected some of {', '.join(NAMES)}, got {name!r}{did_you_mean(name, NAMES)}")


def expect_installed(names: Sequence[str]) -> None:
    """Raise ConfigError for trackers without installed packages."""
    from importlib.util import find_spec

    for name in (name for name in names if name != CONSOLE):
        if any(find_spec(package) is None for package in ("accelerate", _PACKAGES[name])):
            raise ConfigError(f"{KEY}: {name} is not installed: pip install 'creditflow[{name}]'")


def sample_rows(assignment: Assignment, most: int = SHOWN) -> list[list[Any]]:
    """The steps of the first trajectory of each task, for at most `most` tasks, as rows of COLUMNS."""
    batch = assignment.batch
    first: dict[int, int] = {}
    for trajectory, group in enumerate(batch.group_of_trajectory.tolist()):
        if len(first) < most:
            first.setdefault(group, trajectory)
    rows = []
    for trajectory in first.values():
        outcome = batch.outcome_scores[trajectory]
        for s in (batch.trajectory_of_step == trajectory).nonzero()[0].tolist():
            rows.append(
                [
                    batch.trajectory_ids[trajectory],
                    int(batch.index_of_step[s]),
                    batch.agent_names[batch.agent_of_step[s]],
                    batch.prompts[s][:_TEXT],
                    batch.responses[s][:_TEXT],
                    float(assignment.sub_reward_S[s]),
                    None if outcome is None else float(outcome.rescaled),
                    bool(assignment.gate_open_S[s]),
                    float(assignment.credit_S[s]),
                    float(assignment.advantage_S[s]),
                ]
            )
    return rows


def _named_for(tracker: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics by names that the tracker accepts.

    MLflow accepts letters, digits, blanks and _ - . : / in names; other characters are replaced by their code.
    """
    if tracker != "mlflow":
        return dict(metrics)
    return {re.sub(r"[^\w\-. :/]", lambda odd: f"_x{ord(odd[0]):x}", key): value for key, value in metrics.items()}


def _flat(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Options by dotted name; values other than numbers, strings and booleans as JSON."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{path}{key}.")
        else:
            plain = isinstance(value, int | float | str | bool)
            found[f"{path}{key}"] = value if plain else json.dumps(value, default=str)
    return found


def _wandb(project: str, run_name: str, folder: Path, after: int) -> Any:
    from accelerate.tracking import WandBTracker

    # A continued run keeps its id in wandb.
    own = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return WandBTracker(project, name=run_name, dir=str(folder), id=own, resume="allow")


def _tensorboard(project: str, run_name: str, folder: Path, after: int) -> Any:
    from accelerate.tracking import TensorBoardTracker

    return TensorBoardTracker(run_name, folder / "tensorboard", purge_step=after + 1 if after else None)


_MLFLOW_RUN = "mlflow_run_id"


def _mlflow(project: str, run_name: str, folder: Path, after: int) -> Any:
    import mlflow
    from accelerate.tracking import MLflowTracker

    server = os.environ.get("MLFLOW_TRACKING_URI")
    # Without a server, use a database, since MLflow refuses its file store. Set for each run: it outlives one.
    mlflow.set_tracking_uri(server or f"sqlite:///{(folder / 'mlflow.db').resolve()}")
    begun = folder / _MLFLOW_RUN
    return MLflowTracker(
        project,
        logging_dir=None if server else (folder / "mlflow").resolve().as_uri(),
        run_id=begun.read_text() if after and begun.is_file() else None,
        run_name=run_name,
    )


_MAKERS: dict[str, Callable[[str, str, Path, int], Any]] = {
    "wandb": _wandb,
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
}
