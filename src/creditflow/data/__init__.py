"""The shared data types, and their files.

`Task`, `Score`, `Step` and `Trajectory` record one rollout; `TrajectoryBatch` holds many in columns. `read_parquet` and
`write_parquet` load pyarrow on first use.
"""

from typing import TYPE_CHECKING

from creditflow._utils.lazy import attach
from creditflow.data.batch import TrajectoryBatch
from creditflow.data.trajectory import (
    FAILED,
    NOT_MATCHED,
    OK,
    RIGHT,
    TRAJECTORY_STATUSES,
    Bools,
    Floats,
    Ints,
    Message,
    Score,
    ScoreStatus,
    Step,
    Task,
    Trajectory,
    all_digits,
    into_range,
)
from creditflow.data.validation import validate

if TYPE_CHECKING:
    from creditflow.data.table import read_parquet, write_parquet

__getattr__ = attach(__name__, {"creditflow.data.table": ("read_parquet", "write_parquet")})

__all__ = [
    "FAILED",
    "NOT_MATCHED",
    "OK",
    "RIGHT",
    "TRAJECTORY_STATUSES",
    "Bools",
    "Floats",
    "Ints",
    "Message",
    "Score",
    "ScoreStatus",
    "Step",
    "Task",
    "Trajectory",
    "TrajectoryBatch",
    "all_digits",
    "into_range",
    "read_parquet",
    "validate",
    "write_parquet",
]
