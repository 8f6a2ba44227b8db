"""A taskset whose reward runs the model's text as a program, and a judge that does."""

import verifiers.v1 as vf


class CommandingTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def runs_code(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        result = await runtime.run(["python3", "-c", trace.last_reply], {})
        return float(result.exit_code == 0)


class CommandingTaskset(vf.Taskset[CommandingTask]):
    def load(self):
        yield CommandingTask(vf.TaskData(prompt="?"), self.config.task)


class CommandingJudge(vf.Judge[float, vf.JudgeConfig]):
    async def score(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return float((await runtime.run(["python3", "-c", trace.last_reply], {})).exit_code == 0)


__all__ = ["CommandingJudge", "CommandingTaskset"]
