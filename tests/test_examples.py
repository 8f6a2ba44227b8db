"""Tests of the framework examples with the real libraries: their rollouts record the same steps as calls in process."""

import asyncio
import re
import subprocess
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from creditflow._utils.loading import load_object
from creditflow._utils.progress import Reporter
from creditflow.cli import app
from creditflow.config import load_recipe
from creditflow.engines.common.components import build_components
from creditflow.engines.local.trainer import train
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.rollout import AgentSpec, Scheduler
from creditflow.rollout.recorder import Sampling
from creditflow.runs import Ledger
from tests.builders import mostly_slow, run_team
from tests.paths import DOCS, ROOT
from tests.rollout.http.test_server import Templated
from tests.test_docs_code import BLOCK

FOLDER = ROOT / "examples" / "frameworks"
PLAIN = ("openai", "anthropic", "langgraph", "openai_agents", "autogen", "pydantic_ai", "agno")
"""Frameworks that send the prompts unchanged."""
FORMS = {
    "smolagents": '<tool_call>{{"name": "final_answer", "arguments": {{"answer": "{}"}}}}</tool_call>',
    "dspy": "[[ ## line ## ]]\n{}\n\n[[ ## completed ## ]]",
}
"""The form of a response in frameworks that do not take it as it is."""
FRAMEWORKS = (*PLAIN, "subprocess", *FORMS)
AGENTS = {"writer": AgentSpec(match="You write one line"), "editor": AgentSpec(match="You make a line better")}


@pytest.fixture(autouse=True)
def frameworks_stay_offline(monkeypatch, tmp_path):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("DSPY_CACHEDIR", str(tmp_path))


class LongTemplated(Templated):
    """A model that reads long prompts."""

    max_positions = 16384


def run_workflow(workflow, model, agents=AGENTS, n=1):
    return run_team(workflow, agents, Scheduler({"default": model}), n, Sampling(max_prompt_tokens=8192))


def line_of(prompt: str) -> str:
    number = re.findall(r"task (\d)", prompt)[-1]
    return f"line two of task {number}" if "line one" in prompt else f"line one of task {number}"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_framework_call_becomes_a_step_of_its_agent(framework):
    solve = load_object(f"with_{framework}.py:solve", FOLDER, "workflow")
    form = FORMS.get(framework, "{}")
    made = run_workflow(solve, LongTemplated(lambda prompt: form.format(line_of(prompt))), n=3)
    for k, rollout in enumerate(made):
        draft, final = f"line one of task {k}", f"line two of task {k}"
        assert rollout.status == "ok", rollout.info
        assert [step.agent for step in rollout.steps] == ["writer", "editor"]
        assert [step.parents for step in rollout.steps] == [(), (0,)]
        assert [step.response for step in rollout.steps] == [form.format(draft), form.format(final)]
        assert f"task {k}" in rollout.steps[0].prompt
        assert draft in rollout.steps[1].prompt
        assert rollout.answer == final
        assert all(step.response_mask == (1,) * len(step.response_ids) for step in rollout.steps)


def test_cancelled_rollout_ends_its_program():
    solve = load_object("with_subprocess.py:solve", FOLDER, "workflow")

    async def main():
        connected, disconnected = asyncio.Event(), asyncio.Event()

        async def never_answer(reader, writer):
            connected.set()
            await reader.read()  # until the program has ended
            disconnected.set()
            writer.close()

        async with await asyncio.start_server(never_answer, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            variables = {"OPENAI_BASE_URL": f"http://{host}:{port}/v1", "OPENAI_API_KEY": "key", "no_proxy": host}
            rollout = asyncio.create_task(
                solve(SimpleNamespace(text="?"), SimpleNamespace(client_environment=variables))
            )
            await connected.wait()
            rollout.cancel()
            await asyncio.wait_for(disconnected.wait(), 60)

    asyncio.run(main())


LONG_PROMPTS = ["data.max_prompt_length=4000", "data.train_batch_size=1", "data.val_max_samples=1"]
LONG_PROMPTS += ["actor_rollout_ref.actor.ppo_mini_batch_size=1"]
"""Settings for prompts of 3,700 tokens. There are few of them, since each takes seconds."""


@pytest.mark.parametrize("framework", mostly_slow(FRAMEWORKS, {"openai"}))
def test_recipe_trains_a_framework_team(framework, tmp_path):
    settings = [f"team.workflow=with_{framework}.py:solve", f"trainer.default_local_dir={tmp_path}/run"]
    settings += ["trainer.total_training_steps=1", "data.val_max_samples=2", "actor_rollout_ref.rollout.n=2"]
    settings += LONG_PROMPTS if framework == "smolagents" else []
    done = train(load_recipe(FOLDER / "recipe.yaml", settings), Reporter())
    rollouts = Ledger.open(done.path).read(1).batch.to_trajectories()
    assert len(rollouts) == (2 if framework == "smolagents" else 8)
    # A model with random weights never writes the form that DSPy requires: its rollouts end with the writer's mistake.
    agents = {"writer"} if framework == "dspy" else {"writer", "editor"}
    assert {step.agent for rollout in rollouts for step in rollout.steps} == agents
    assert "failed" not in {rollout.status for rollout in rollouts}
    assert all(step.policy_version == 0 and step.response_ids for rollout in rollouts for step in rollout.steps)


def test_own_server_records_the_steps_of_each_rollout():
    main = load_object("own_server.py:main", FOLDER.parent, "example")
    rollouts = asyncio.run(main(tiny_byte_model()))
    assert [rollout.id for rollout in rollouts] == [f"trajectory {k}" for k in range(4)]
    for rollout in rollouts:
        assert [(step.agent, step.turn) for step in rollout.steps] == [("writer", 0), ("editor", 0)]
        assert rollout.steps[1].parents == (0,)
        assert rollout.uid in rollout.steps[0].prompt
        assert all(0 < len(step.response_ids) <= 16 for step in rollout.steps)


def test_own_data_page_prints_the_example():
    named = {name: text for name, _, text in BLOCK.findall((DOCS / "how_to" / "own_data.md").read_text()) if name}
    folder = ROOT / "examples" / "own_data"
    assert named == {name: (folder / name).read_text() for name in named}
    assert set(named) == {path.name for path in folder.iterdir() if path.suffix in (".jsonl", ".py", ".yaml")}


def test_own_data_example_holds_out_questions():
    recipe = load_recipe(ROOT / "examples" / "own_data" / "recipe.yaml")
    parts = build_components(recipe)
    assert [task.extra_info["index"] for task in parts.train_tasks] == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert [task.extra_info["index"] for task in parts.val_tasks] == [0, 6]
    assert parts.train_tasks[0].ground_truth == "5"


CALL = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'


def calls_then_answers(prompt: str) -> str:
    return "It is 42." if "it was 42" in prompt else CALL


def with_openai_agents(kind, stream):
    """Return a workflow of one agent of the SDK with a tool; `kind`: the class of its model."""

    async def solve(task, team):
        import agents
        from openai import AsyncOpenAI

        agents.set_tracing_disabled(True)
        async with AsyncOpenAI(base_url=team.base_url, api_key=team.api_key) as client:
            model = getattr(agents, kind)("solver", openai_client=client)
            solver = agents.Agent("solver", instructions="Solve.", model=model, tools=[agents.function_tool(double)])
            if not stream:
                return (await agents.Runner.run(solver, task.text)).final_output
            running = agents.Runner.run_streamed(solver, task.text)
            async for _ in running.stream_events():
                pass
            return running.final_output

    return solve


def double(number: int) -> str:
    """Twice a number."""
    return f"it was {2 * number}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_framework_tools_run_between_steps(kind, stream):
    (rollout,) = run_workflow(with_openai_agents(kind, stream), Templated(calls_then_answers), {"solver": AgentSpec()})
    assert rollout.status == "ok", rollout.info
    assert [step.response for step in rollout.steps] == [CALL, rollout.answer]
    assert '"name": "double"' in rollout.steps[0].prompt
    assert "it was 42" in rollout.steps[1].prompt
    assert "it was 42" not in rollout.steps[0].prompt


CLUSTER = ROOT / "examples" / "cluster"


def test_cluster_examples_start_valid_commands():
    manifest = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    entrypoint = manifest["spec"]["entrypoint"].split()
    ours, verls = entrypoint[1 : entrypoint.index("--")], entrypoint[entrypoint.index("--") :]
    result = CliRunner().invoke(app, [*ours, "--dry-run", *verls])
    assert result.exit_code == 0, result.output
    pods = manifest["spec"]["rayClusterSpec"]
    groups = [pods["headGroupSpec"], *pods["workerGroupSpecs"]]
    nodes = 1 + sum(group["replicas"] for group in pods["workerGroupSpecs"])
    assert f"trainer.nnodes={nodes}" in entrypoint
    assert all(group["template"]["spec"]["containers"][0]["image"].endswith("/creditflow:0.1.0") for group in groups)
    assert subprocess.run(["bash", "-n", CLUSTER / "slurm.sh"], check=False).returncode == 0
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
