"""`creditflow serve`: a recipe's policies behind an API of OpenAI's or Anthropic's, for agents that run elsewhere."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from creditflow._utils.files import make_folder
from creditflow._utils.loopback import bound, expect_loopback
from creditflow._utils.progress import Reporter
from creditflow.cli._options import AllowRemote, Host, Overrides, Port, Recipe, number_option
from creditflow.errors import first_line

if TYPE_CHECKING:
    from creditflow.engines.common.components import Components
    from creditflow.engines.local.policy_set import PolicySet
    from creditflow.rollout.http.sessions import TrajectoryWriter

EXTRA = "serve"
KEY_VARIABLE = "CREDITFLOW_API_KEY"
"""Environment variable of the API key; if it is unset, a key is generated and printed."""
_POLL_S = 1.0
"""Seconds between two checks for trajectories to write."""


def serve(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Output folder.")] = Path("trajectories"),
    host: Host = "127.0.0.1",
    port: Port = 8322,
    idle: Annotated[float, number_option("--idle", "Seconds without a call that end a rollout.", 1, of=float)] = 3600,
    per_file: Annotated[int, number_option("--per-file", "Trajectories per file.", 1)] = 256,
    allow_remote: AllowRemote = False,
) -> None:
    """Serve a recipe's policies to clients of OpenAI and Anthropic.

    Each rollout has a URL. It begins with its first call, and is written as a trajectory when it ends. To train agents
    that call over HTTP, give them team.base_url in a workflow (docs/how_to/serving.md).

    Example: creditflow serve my_team/recipe.yaml -o trajectories
    """
    from creditflow.config import load_recipe

    expect_loopback(host, "needs but the API key", remote=allow_remote)
    reporter = Reporter()
    loaded = load_recipe(recipe, overrides or [])
    make_folder(out, "--out")
    bound(host, port).close()  # a taken port fails before the models are loaded
    with reporter.bar(f"loading {loaded.name}", announce=True, keep=False):
        from creditflow.engines.common.components import build_components
        from creditflow.engines.local.policy_set import PolicySet
        from creditflow.rollout.http.sessions import TrajectoryWriter

        components = build_components(loaded, training=False, tasks=False)
        policy_set = PolicySet.for_rollouts(loaded)
    asyncio.run(_serve(components, policy_set, TrajectoryWriter(out, per_file, reporter), host, port, idle, reporter))


async def _serve(
    components: Components,
    policy_set: PolicySet,
    writer: TrajectoryWriter,
    host: str,
    port: int,
    idle: float,
    reporter: Reporter,
) -> None:
    """Serve until interrupted, then end and write the open rollouts."""
    from creditflow.rollout import Scheduler
    from creditflow.rollout.http.server import OpenAIServer
    from creditflow.rollout.http.sessions import SessionStore

    api_key = os.environ.get(KEY_VARIABLE, "")
    scheduler = Scheduler(
        {**policy_set.policies, **components.chat_clients},
        components.recipe.config.actor_rollout_ref.rollout.max_num_seqs,
    )
    store = SessionStore(
        components.agents, components.sampling, scheduler, writer, api_key or secrets.token_urlsafe(24)
    )
    store.server = server = OpenAIServer(host, port, session_store=store).start()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    reporter.say(f"base URL: {server.url}/t/NAME/v1   NAME: any name for the rollout")
    reporter.say(f"API key:  {f'the value of {KEY_VARIABLE}' if api_key else store.api_key}")
    reporter.say(f"agents:   {', '.join(f'{spec.policy}:{name}' for name, spec in components.agents.items())}")
    reporter.say(f"trajectories are written to {writer.folder} (ends with Ctrl-C)")
    fault: Exception | None = None
    try:
        while not stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _POLL_S)
            if fault is None and (fault := scheduler.fault) is not None:
                message = f"{type(fault).__name__}: {first_line(fault)}"
                reporter.say(f"a model failed, and its callers received status 500: {message}")
            await store.end_idle(idle)
            writer.write(everything=False)
    finally:
        await asyncio.to_thread(server.stop)  # no client can begin or end a rollout from here on
        try:
            await store.end_idle(0.0)
        finally:
            writer.write(everything=True)
        for client in components.chat_clients.values():
            await client.aclose()
