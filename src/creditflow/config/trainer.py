"""The sections `trainer`, `audit` and `ray_kwargs`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from creditflow._utils.sections import Section, Text, expected

Precision = Literal["auto", "float32", "bfloat16"]


class TrainerConfig(Section):
    """Length of the run, hardware, logging and checkpoints."""

    total_training_steps: NonNegativeInt | None = None
    """Default: the number of steps in `total_epochs` passes over the data."""
    total_epochs: PositiveInt = 1
    """Passes over the data."""
    logger: list[Text] = Field(default_factory=lambda: ["console"])
    """Metrics trackers, in addition to the run's metrics.jsonl, which is always written: names from
    docs/reference/metrics.md."""
    project_name: Text = "creditflow"
    """The project, or experiment, of the run in trackers."""
    experiment_name: Text | None = None
    """The run's name in trackers; default: the name of its folder."""
    default_local_dir: Text | None = None
    """The run's folder; default `runs/<recipe>-<time>`."""
    val_before_train: bool = True
    """Evaluate before the first training step."""
    test_freq: int = -1
    """Evaluate every `test_freq` training steps; -1: only at the end."""
    save_freq: int = -1
    """Write a checkpoint every `save_freq` training steps; -1: only at the end."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """If `default_local_dir` already holds a run: `auto` resumes it from its newest complete checkpoint, `disable` is
    an error, `resume_path` resumes it from `resume_from_path`."""
    resume_from_path: Text | None = None
    """A checkpoint of the run in `default_local_dir`; sets the default of `resume_mode` to `resume_path`. Options may
    differ from those of the interrupted run."""
    max_actor_ckpt_to_keep: PositiveInt | None = None
    """Number of newest checkpoints to keep; default: all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`, `cpu` or `cuda`."""
    precision: Precision = "auto"
    """Precision of matrix products in sampling and updates; weights stay float32. `auto`: bfloat16 on CUDA, float32 on
    the CPU."""
    num_threads: NonNegativeInt = 0
    """torch threads; 0: torch's own choice."""
    critic_warmup: NonNegativeInt = 0
    """Training steps at the beginning in which only the critic is trained."""


class AuditConfig(Section):
    """Measurements of how faithful credit is, by continuing recorded trajectories from single decisions."""

    every: NonNegativeInt = 0
    """Training steps between two measurements; 0: never. Embedded engine only."""
    max_token_frac: Annotated[float, Field(gt=0, le=1), expected("a share above 0 and at most 1")] = 0.05
    """Largest share of the run's generated tokens that measurements may use. Each one chooses as many decisions as the
    unused part allows."""
    continuations: Annotated[int, Field(ge=2), expected("a whole number of at least 2")] = 4
    """Continuations with a decision kept, and as many with the decision sampled anew."""


class RayConfig(Section):
    """Connection to Ray."""

    ray_init: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `ray.init`: `address` joins a cluster; without it, a private Ray starts on this machine."""
