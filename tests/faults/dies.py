"""Run `creditflow` and kill it with SIGKILL at the k-th pass of a place: `dies.py PLACE K WHEN ARGUMENTS...`.

WHEN: `before` or `after` the action at that place. K 0: finish normally, and print the number of passes of each place.
"""

import functools
import json
import os
import signal
import sys
from collections import Counter

from creditflow._utils import files
from creditflow.cli import app
from creditflow.engines.local import checkpoint, sampler, trainer
from creditflow.engines.local.learner import Learner
from creditflow.engines.local.policy import Policy
from creditflow.rewards import RewardManager
from creditflow.runs import RunFolder

PLACES = {
    "generation": (sampler, "_sample"),
    "scoring": (RewardManager, "score"),
    "credit": (trainer, "assign"),
    "update": (Learner, "step"),
    "metrics": (RunFolder, "append_metrics"),
    "events": (RunFolder, "append_events"),
    "weights of a checkpoint": (Policy, "save"),
    "optimizer of a checkpoint": (Learner, "save"),
    "sums of a checkpoint": (checkpoint, "_sum"),
    "writing to disk": (files, "_sync"),
}


def main(place: str, k: int, when: str, arguments: list[str]) -> None:
    passed: Counter[str] = Counter()

    def watched(name, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            passed[name] += 1
            dies = name == place and passed[name] == k
            if dies and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for name, (owner, attribute) in PLACES.items():
        setattr(owner, attribute, watched(name, getattr(owner, attribute)))
    app(arguments, standalone_mode=False)
    print(json.dumps(passed))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
