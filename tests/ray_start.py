"""Start Ray on a busy machine."""

from typing import Any

_ATTEMPTS = 5
_TOO_LATE = "The current node timed out during startup"


def start_ray(**options: Any) -> None:
    """Call `ray.init`, again if its node was too late: Ray waits for it for 30 s, a limit without an option."""
    import ray

    for attempt in range(_ATTEMPTS):
        try:
            ray.init(**options)
        except Exception as error:
            if _TOO_LATE not in str(error) or attempt == _ATTEMPTS - 1:
                raise
            ray.shutdown()
        else:
            return
