"""The protocol of an engine, and the registry of all engines.

A folder of this package with a module `engine.py` is an engine of that name; its module defines `ENGINE`. Other
distributions add engines by entry points of group `creditflow.engines`: the name is the engine's, the value its
`Engine` object. An engine is imported when it is chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from creditflow._utils.progress import Reporter
from creditflow.config import Config, Recipe, trained_policies
from creditflow.data import Floats, Trajectory
from creditflow.engines.common.components import Components
from creditflow.engines.common.rollouts import total_steps
from creditflow.engines.models.folders import model_folder
from creditflow.errors import ConfigError
from creditflow.monitoring.evaluation import Evaluation
from creditflow.monitoring.trackers.base import MakeReport
from creditflow.registry import Registry
from creditflow.rewards import ScoringReport
from creditflow.runs import RunFolder

DEFAULT = "local"


LOCAL_OPTIONS = ("critic.context", "guard.fallback.trainable", "audit.every")
"""Options that only the default engine has."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The predicted memory of a training step, in bytes."""

    key: str
    """The option of the micro-batch size."""
    max_tokens: int
    """Its value, given or derived."""
    needed: int
    """The largest memory of a step."""
    limit: int
    """All memory of the machine or device."""
    available: int
    """The memory that the process has or can still get."""
    problem: str = ""
    """The error with which training would end; empty if the step fits."""

    def text(self) -> str:
        """The estimate as a sentence."""
        needed, limit, available = (f"{size / (1 << 30):.1f}" for size in (self.needed, self.limit, self.available))
        return (
            f"memory: a step needs about {needed} GiB with {self.key}={self.max_tokens}; {available} of {limit} GiB "
            "are available"
        )


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Scored rollouts of a few tasks, without training."""

    trajectories: Sequence[Trajectory]
    """`rollout.n` for each task, grouped by task."""
    report: ScoringReport
    values_T: Floats | None
    """[T] the critic's value of each response token; None without a critic."""
    memory: tuple[MemoryEstimate, ...] = ()
    """The memory of a training step, by the key of its micro-batch size."""


class Engine(ABC):
    """A sampler and trainer. A subclass implements `train`, and what its attributes promise."""

    name: str
    """The name on the command line and in `run.json`."""
    rolls_out = False
    """Whether `check` and `evaluate` are implemented. If not, the default engine runs them."""
    has_options = False
    """Whether it reads the arguments after `--`, and `configuration` is implemented."""

    @abstractmethod
    def train(
        self, recipe: Recipe, options: Sequence[str], reporter: Reporter, make_report: MakeReport | None = None
    ) -> RunFolder:
        """Train the recipe, or resume its run; returns the run's folder.

        `options`: the arguments after `--`. `make_report`: makes the report of the finished run for its trackers.
        Raises InputError on bad input, before anything is written, and CreditflowError if training failed.
        """

    def total_steps(self, components: Components) -> int:
        """The training steps of a run."""
        return total_steps(len(components.train_tasks), components.recipe.config)

    def prepare(self, recipe: Recipe, prepared: set[Path]) -> None:
        """Create the recipe's generated models before many runs start from them, and check its models.

        `prepared`: the model folders that were checked before; this adds the recipe's. Raises InputError for a model
        that cannot be used.
        """
        prepared.update(model_folder(recipe, policy) for policy in trained_policies(recipe.config))

    def concurrent_runs(self, recipe: Recipe) -> int:
        """The default number of runs side by side on this machine."""
        return 1

    def expect_trainable(self, recipe: Recipe, reporter: Reporter) -> None:
        """Raise ConfigError if this engine cannot train the recipe; print its warnings. Starts and writes nothing."""
        expect_supported(recipe.config, self.name)

    def check(self, components: Components, n_tasks: int) -> CheckResult:
        """Roll out and score the first `n_tasks` training tasks. Loads all models as for training."""
        raise NotImplementedError(f"engine {self.name}: rollouts without training")

    def evaluate(self, components: Components, reporter: Reporter) -> Evaluation:
        """Evaluate the recipe's models on its validation tasks."""
        raise NotImplementedError(f"engine {self.name}: rollouts without training")

    def configuration(self, recipe: Recipe, options: Sequence[str], reporter: Reporter) -> str:
        """The engine's own configuration of a run as text, checked; starts and writes nothing."""
        raise NotImplementedError(f"engine {self.name}: options of its own")


ENGINES: Registry[Engine] = Registry("--engine", group="creditflow.engines", record=Engine)
for file in Path(__file__).parent.glob("*/engine.py"):
    ENGINES.add_lazily(file.parent.name, f"{__package__}.{file.parent.name}.engine:ENGINE")


def find_engine(name: str) -> Engine:
    """Import an engine.

    Raises ConfigError for an unknown name, or for an engine of another distribution that cannot be imported.
    """
    if name not in ENGINES:
        names = " or ".join(sorted(ENGINES.names(), key=lambda name: name != DEFAULT))
        raise ConfigError(f"--engine: expected {names}, got {name!r}{ENGINES.hint(name)}")
    try:
        return ENGINES[name]
    except ConfigError as error:
        raise ConfigError(f"--engine: {error}") from error


def sampling_engine(engine: Engine) -> Engine:
    """`engine` if it rolls out without training, else the default engine.

    Both use the same workflow, rewards and credit.
    """
    return engine if engine.rolls_out else find_engine(DEFAULT)


def expect_supported(config: Config, name: str, instead: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for an option that only the default engine has, and not the engine `name`.

    `instead`: further options of the default engine alone, and what to do in place of each.
    """
    local = dict.fromkeys(LOCAL_OPTIONS, f"{name} does not support it") | dict(instead or {})
    for key, words in local.items() if name != DEFAULT else ():
        if (value := attrgetter(key)(config)) != attrgetter(key)(Config()):
            raise ConfigError(f"{key}: {value} is for --engine {DEFAULT}; {words}")
