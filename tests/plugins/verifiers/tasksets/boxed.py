"""A taskset that needs a container."""

import verifiers.v1 as vf


class BoxedTask(vf.Task[vf.TaskData]):
    NEEDS_CONTAINER = True


class BoxedTaskset(vf.Taskset[BoxedTask]):
    def load(self):
        yield BoxedTask(vf.TaskData(prompt="?"), self.config.task)


__all__ = ["BoxedTaskset"]
