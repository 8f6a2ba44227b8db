"""Start, progress and end of a run on verl, with a stand-in for verl."""

import errno
import io
import json
import re
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.engines.verl.engine import ENGINE, NewLines, total_steps
from creditflow.engines.verl.recipe import read_run_handle
from creditflow.errors import ConfigError, CreditflowError, InputError, says_disk_full
from creditflow.monitoring.guard import RESTORE, GuardAction, GuardEvent
from creditflow.monitoring.trackers.base import TRACKERS, tracker
from creditflow.runs import RunFolder
from creditflow.runs.run_folder import read_metrics
from tests.builders import unregister
from tests.paths import TOY

ray = pytest.importorskip("ray")
pytest.importorskip("verl")

OURS = ("trainer.device=auto", "ray_kwargs.ray_init.num_gpus=1")
ONE_DEVICE = (
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.name=trtllm",  # a back end without imports before a server starts
)


class Listener(Reporter):
    """A reporter that records its output."""

    def __init__(self):
        self.text = io.StringIO()
        super().__init__(Console(file=self.text, width=200))

    @property
    def lines(self):
        return self.text.getvalue().splitlines()


@dataclass
class Cluster:
    """A stand-in for Ray and verl's `run_ppo`, which calls `work` with the configuration."""

    work: Any = lambda config: None
    running: bool = False
    """Whether Ray is already running."""
    config: Any = None
    ended: list[str] = field(default_factory=list)

    def run_ppo(self, config, task_runner_class):
        self.config = config
        print("verl has much to say")
        handle = task_runner_class.options(num_cpus=1).remote()
        assert handle == "the actor"
        self.work(config)


@pytest.fixture
def cluster(monkeypatch):
    from verl.trainer import main_ppo

    import creditflow.engines.verl.trainer  # noqa: F401  # its imports use `ray.remote`

    stand_in = Cluster()
    actor_class = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda: "the actor"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(main_ppo, "run_ppo", stand_in.run_ppo)
    monkeypatch.setattr(ray, "remote", lambda **options: lambda cls: actor_class)
    monkeypatch.setattr(ray, "is_initialized", lambda: stand_in.running)
    monkeypatch.setattr(ray, "get_actor", lambda name: "the actor")
    monkeypatch.setattr(ray, "shutdown", lambda: stand_in.ended.append("Ray"))
    monkeypatch.setattr(ray, "kill", stand_in.ended.append)
    monkeypatch.setattr(ray.util, "placement_group_table", dict)
    return stand_in


def start(folder, *overrides, verl=(), reporter=None):
    recipe = load_recipe(TOY, [*OURS, f"trainer.default_local_dir={folder}", *overrides])
    return ENGINE.train(recipe, [*ONE_DEVICE, *verl], reporter or Listener())


def write(config, rows):
    """Write the metrics of a run's driver."""
    folder = RunFolder(read_run_handle(config).run_folder)
    for row in rows:
        folder.append_metrics(row["step"], {key: value for key, value in row.items() if key != "step"})


# Complete runs


def test_run_folder_records_facts_and_configuration(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    folder = start("run")

    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert folder.path == tmp_path / "run"
    assert (facts["engine"], facts["recipe"], facts["seed"]) == ("verl", "toy", 0)
    assert facts["versions"].keys() >= {"verl", "ray", "torch", "creditflow"}
    assert load_recipe(tmp_path / "run" / "config.yaml").config.data.train_batch_size == 2
    assert "trainer_mode: sync" in (tmp_path / "run" / "verl.yaml").read_text()
    model, run = Path(cluster.config.actor_rollout_ref.model.path), read_run_handle(cluster.config)
    assert model.is_absolute()
    assert (model / "config.json").exists()
    assert cluster.config.critic.model.path == run.config.actor_rollout_ref.model.path == str(model)
    assert (run.run_folder, run.config.team.workflow) == (tmp_path / "run", f"{TOY.parent}/toy.py:solve")
    assert OmegaConf.select(cluster.config, "trainer.default_local_dir") == str(tmp_path / "run" / "checkpoints")


def test_progress_keeps_standard_output_empty(cluster, tmp_path, capsys):
    listener = Listener()
    cluster.work = lambda config: write(
        config,
        [
            {"step": 0, "val/pass_at_1": 0.25},
            {"step": 1, "train/pass_at_1": 0.5, "timing/step_s": 2.0},
            {"step": 2, "train/pass_at_1": 0.75, "val/pass_at_1": 1.0},
        ],
    )

    start(tmp_path / "run", reporter=listener)

    assert listener.lines == [
        f"run folder: {tmp_path}/run",
        "Ray's logs: /tmp/ray/session_latest/logs",
        "before training: pass@1 0.250 on 6 tasks of data.train_files (data.val_files is not set)",
        "train 1/2 train pass@1 0.500  2.0 s",
        "train 2/2 train pass@1 0.750",
        "after step 2: pass@1 1.000 on 6 tasks of data.train_files (data.val_files is not set)",
    ]
    assert capsys.readouterr().out == ""


def test_remote_models_are_left_to_verl(cluster, tmp_path):
    hub, far = "Qwen/Qwen2.5-7B-Instruct", "hdfs://somewhere/model"
    critic = ("algorithm.adv_estimator=gae", "algorithm.outcome_to=answer", f"critic.model.path={far}")

    start(tmp_path / "run", f"actor_rollout_ref.model.path={hub}", *critic)

    assert (cluster.config.actor_rollout_ref.model.path, cluster.config.critic.model.path) == (hub, far)


# Resuming


def add_steps(folder, last):
    """Write the files of a run with a checkpoint of its step `last`."""
    for number in range(last + 1):
        RunFolder(folder).append_metrics(number, {"train/pass_at_1": 0.0})
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(last))


def test_run_with_a_checkpoint_resumes(cluster, tmp_path, sent):
    start(tmp_path / "run", "trainer.logger=[lines]")
    add_steps(tmp_path / "run", 1)
    sent.clear()
    listener = Listener()
    rows = [{"step": 1, "val/pass_at_1": 0.25}, {"step": 2, "train/pass_at_1": 1.0}]
    cluster.work = lambda config: write(config, rows)

    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    facts |= {"steps": 1, "tasks": {"data.train_files": "5 tasks, sha256 0"}}
    (tmp_path / "run" / "run.json").write_text(json.dumps(facts))

    changed = ": data.seed, data.train_files (5 tasks, "
    with pytest.raises(InputError, match=f"changed since its start{re.escape(changed)}"):
        start(tmp_path / "run", "data.seed=7")
    named = tmp_path / "run" / "checkpoints" / "global_step_1"
    named.mkdir()
    verl = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={named}")
    start(tmp_path / "run", "trainer.logger=[lines]", "data.seed=7", verl=verl, reporter=listener)

    first, warning, *others = listener.lines
    assert first == f"run folder: {tmp_path}/run, goes on after step 1"
    assert warning.startswith(f"warning: options have changed since the start of the run{changed}")
    assert others == [
        "the run began with 1 training steps and now has 2: a cosine schedule continues at its value for the new "
        "length",
        "Ray's logs: /tmp/ray/session_latest/logs",
        "after step 1: pass@1 0.250 on 6 tasks of data.train_files (data.val_files is not set)",
        "train 2/2 train pass@1 1.000",
    ]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["seed"] == 0  # unchanged
    assert sent == [(1, 0.25), (2, None), "end"]


def test_existing_run_is_not_overwritten(cluster, tmp_path):
    folder, listener = tmp_path / "run", Listener()
    start(folder)
    with pytest.raises(InputError, match="holds a run already, and it has no checkpoint to go on from; name another"):
        start(folder)

    add_steps(folder, 2)
    with pytest.raises(InputError, match=r"holds a run already, and trainer\.resume_mode is disable; name another"):
        start(folder, verl=("trainer.resume_mode=disable",))
    by_path = "trainer.resume_mode=resume_path"
    with pytest.raises(
        ConfigError, match=r"trainer\.resume_from_path: expected .*/run/checkpoints/global_step_<number>, "
    ):
        start(folder, verl=(by_path, "trainer.resume_from_path=/x/global_step_1"))
    earlier = folder / "checkpoints" / "global_step_1"
    earlier.mkdir()
    start(folder, verl=(by_path, f"trainer.resume_from_path={earlier}"), reporter=listener)
    assert listener.lines[0].endswith("goes on after step 1")

    RunFolder(folder).write_text("evaluation.json", "{}")
    with pytest.raises(InputError, match="holds a run that is finished, at step 2"):
        start(folder)
    start(folder, "trainer.total_training_steps=3")


# Bad input: the run writes and starts nothing


@pytest.mark.parametrize(
    ("overrides", "verl", "said"),
    [
        (["ray_kwargs.ray_init.num_gpus=0"], [], "trainer.n_gpus_per_node: 1 wanted"),
        ([], ["trainer.nnodes=2"], "trainer.n_gpus_per_node: 2 wanted"),
        ([], ["actor_rollout_ref.rollout.name=vllm"], "actor_rollout_ref.rollout.name: vllm is not installed"),
        (["recipe.tasks=1"], [], "data.train_batch_size: 2 tasks a step, but the data set has 1"),
        (["reward.functions=[{fn: exact_macth}]"], [], "did you mean 'exact_match'?"),
        (
            ["reward.functions=[{fn: exact_match}, {fn: kl_to_reference}]"],
            [],
            "reward.functions: one of them reads the reference's log-probs",
        ),
        (
            ["reward.functions=[{fn: exact_match}, {fn: judge, args: {policy: default, rubric: Right or wrong}}]"],
            [],
            "reward.functions: judge judges by a policy of the run",
        ),
        (["reward.backend=inline"], [], "reward.backend: inline"),
        (["actor_rollout_ref.model.path=toy.py:nothing"], [], "has no 'nothing'"),
        ([], ["trainer.use_v1=false"], "trainer.use_v1: "),
    ],
)
def test_bad_input_is_rejected_before_writing(cluster, tmp_path, monkeypatch, overrides, verl, said):
    from verl.utils import device

    monkeypatch.setattr(device, "get_device_name", lambda: "cuda")

    with pytest.raises(InputError) as caught:
        start(tmp_path / "run", *overrides, verl=verl)

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    assert cluster.config is None


def test_cluster_resources_are_not_checked_locally(cluster, tmp_path):
    start(tmp_path / "run", "ray_kwargs.ray_init={address: auto}", verl=("trainer.nnodes=2",))

    assert cluster.config.ray_kwargs.ray_init.address == "auto"


def test_total_steps_match_verl():
    for steps, epochs, most, tasks, expected in ((7, 1, -1, 100, 7), (None, 3, -1, 11, 6), (None, 3, 9, 100, 6)):
        trainer = {"total_training_steps": steps, "total_epochs": epochs}
        data = {"train_batch_size": 4, "train_max_samples": most}
        assert total_steps(OmegaConf.create({"trainer": trainer, "data": data}), tasks) == expected


# Failures


def remote(cause, times=1):
    """Wrap `cause` as Ray does when an error passes between processes."""
    error = cause
    for _ in range(times):
        error = ray.exceptions.RayTaskError("run", "a long traceback", error).as_instanceof_cause()
    return error


GLOO = (
    "[/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:23440: Connection reset by peer. GLHF!"
)
NCCL = "NCCL error: remote process exited or there was a network error"
FULL = OSError(errno.ENOSPC, "No space left on device", "steps/000001.parquet")
NO_RAY = ConnectionError("Could not find any running Ray instance.\nTry again.")
ENDS = [
    (remote(ConfigError("data.x: wrong"), 3), ConfigError, r"^data\.x: wrong$"),
    (remote(FULL, 1), OSError, "No space left"),
    (remote(RuntimeError(GLOO), 2), CreditflowError, r"a process of the run died, or .*run the same command again"),
    (remote(RuntimeError(NCCL), 2), CreditflowError, r"a process of the run died, or .*run the same command again"),
    (remote(ZeroDivisionError("by zero"), 2), ray.exceptions.RayTaskError, "a long traceback"),
    (remote(ConnectionResetError("Connection reset by peer"), 2), ray.exceptions.RayTaskError, "a long traceback"),
    (
        ray.exceptions.RayActorError(),
        CreditflowError,
        r"the run's driver process ended: .*; Ray's logs: /tmp/ray/session_latest/logs",
    ),
    (NO_RAY, ConfigError, r"^ray_kwargs\.ray_init\.address: Ray cannot be joined: Could not find any"),
    (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
]


@pytest.mark.parametrize(("error", "expected", "message"), ENDS, ids=range(len(ENDS)))
def test_error_of_another_process_ends_the_run(cluster, tmp_path, error, expected, message):
    def work(config):
        write(config, [{"step": 1, "train/pass_at_1": 0.5}])
        raise error

    cluster.work, listener = work, Listener()
    with pytest.raises(expected, match=message) as caught:
        start(tmp_path / "run", reporter=listener)
    assert listener.lines[-1] == "train 1/2 train pass@1 0.500"
    assert cluster.ended == ["Ray"]
    assert says_disk_full(caught.value) == (expected is OSError)
    assert isinstance(caught.value, ray.exceptions.RayTaskError) == (expected is ray.exceptions.RayTaskError)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_existing_ray_outlives_the_run(cluster, tmp_path, error):
    def work(config):
        if error is not None:
            raise error

    cluster.work, cluster.running = work, True
    with pytest.raises(error) if error else nullcontext():
        start(tmp_path / "run")

    assert cluster.ended == ["the actor"]


# Reading the growing metrics file


def line(step, **numbers):
    return json.dumps({**numbers, "step": step}) + "\n"


def test_tail_returns_each_complete_line_once(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(line(0))
    tail = NewLines(file)

    assert tail.rows() == []
    file.write_text(line(0) + line(1) + line(2)[:5])
    assert [row["step"] for row in tail.rows()] == [1]
    assert tail.rows() == []
    file.write_text("".join(line(step) for step in range(5)))
    assert [row["step"] for row in tail.rows()] == [2, 3, 4]


# Trackers


@pytest.fixture
def sent():
    """The steps and losses that the tracker `lines` gets."""
    logged = []

    class Lines:
        def log(self, step, metrics):
            logged.append((step, metrics.get("loss", metrics.get("val/pass_at_1"))))

        def finish(self):
            logged.append("end")

    tracker("lines")(lambda run: Lines())
    yield logged
    unregister(TRACKERS, "lines")


def test_rollback_goes_on_after_the_newest_good_checkpoint(cluster, tmp_path, sent):
    folder, listener = tmp_path / "run", Listener()
    event = GuardEvent(2, "drop", "loss", "fired", RESTORE, {"value": 2.0})

    def fall_back(config):
        write(config, [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}])
        for step, good in ((1, True), (2, True)):  # the rule fired at the second
            (folder / f"checkpoints/global_step_{step}/actor").mkdir(parents=True)
            (folder / f"checkpoints/global_step_{step}/creditflow.json").write_text(json.dumps({"good": good}))
        (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("2")
        cluster.work = lambda config: write(config, [{"step": 2, "loss": 0.5}])
        raise remote(GuardAction(event), 2)

    cluster.work = fall_back
    start(folder, "trainer.logger=[lines]", reporter=listener)

    assert sent == [(1, 1.0), (2, 2.0), (2, 0.5), "end"]
    assert [row["loss"] for row in read_metrics(folder)] == [1.0, 0.5]
    assert [line for line in listener.lines if "after step 1" in line or event.text in line] == [
        event.text,
        f"guard: goes on after step 1; what came after is kept in {folder}/rolled_back/1",
        f"run folder: {folder}, goes on after step 1",
    ]
    assert [path.name for path in (folder / "checkpoints").glob("global_*")] == ["global_step_1"]


def test_tracker_that_cannot_start_leaves_no_run(cluster, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nosuch://somewhere")
    with pytest.raises(ConfigError, match=r"trainer\.logger: mlflow cannot be set up"):
        start(tmp_path / "run", "trainer.logger=[mlflow]")

    start(tmp_path / "run")
