"""Environments that `export` makes of recipes: verifiers evaluates them with a server on loopback."""

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("verifiers")

import verifiers.v1 as vf

from creditflow.errors import ConfigError
from creditflow.plugins.verifiers.export import export
from tests.paths import TOY
from tests.plugins.verifiers.servers import saying

MODULE = f"""
from creditflow.plugins.verifiers.export import export

TeamTaskset, TeamEnv = export({str(TOY)!r}, ["reward.backend=inline"])
__all__ = ["TeamEnv", "TeamTaskset"]
"""
BULLET = "\N{BULLET}!"


def test_exported_team_is_evaluated_by_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_team.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    seats = {"writer": {"model": "writer"}, "critic": {"model": "critic"}}
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": "toy-team"}, **seats}))
    tasks = list(env.taskset)
    assert [task.data.prompt_text for task in tasks] == [f"Say {i}." for i in range(8)]

    episode = asyncio.run(episode_of(env, tasks[3], {"writer": [("abc", "stop")], "critic": [(BULLET, "stop")]}))

    assert episode.ok, episode.errors
    writer, critic = episode.traces
    assert (writer.agent.name, critic.agent.name) == ("writer", "critic")
    assert [node.message.content for node in critic.nodes] == ["Judge.", "Say 3. abc", BULLET]
    scores = {name: reward.score for name, reward in writer.rewards.items()}
    assert scores == {"outcome": 1.0, "compute_decomposed_reward": 1.0}
    assert writer.reward == 2.0
    assert 1.9 < critic.reward < 2.0


async def episode_of(env: vf.Env, task: vf.Task, said: dict[str, list[tuple[str, str]]]) -> vf.Episode:
    """One episode, of roles that say these texts."""
    with saying(said) as url:
        client = vf.EvalClientConfig(base_url=url, api_key_var="NONE")
        async with env.serving():
            (slot,) = env.slots(task)
            return await env.run_slot(slot, vf.ModelContext(model="?", client=client))


def test_recipe_with_tools_of_its_own_is_not_exported() -> None:
    with pytest.raises(ConfigError, match=r"team\.agents\.writer\.tools: verifiers runs tools"):
        export(TOY, ["team.agents.writer.tools=[search]"])
