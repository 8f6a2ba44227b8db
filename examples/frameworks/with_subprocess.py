"""Agents in another program: it receives a URL and a key in its environment, and prints its answer.

Run as a program, this file is that other program: it uses HTTP and JSON, and nothing of creditflow.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from creditflow import Task, Team


async def solve(task: Task, team: Team) -> str:
    """Run the program and return its answer."""
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        task.text,
        env={**os.environ, **team.client_environment},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        said, _ = await program.communicate()
    finally:  # a cancelled rollout must not leave its program behind
        if program.returncode is None:
            program.kill()
    if program.returncode:
        raise RuntimeError(f"the agents' program ended with {program.returncode}")
    return said.decode().rstrip("\n")


def ask(agent: str, text: str) -> str:
    """Request one completion."""
    body = json.dumps({"model": agent, "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    sys.stdout.buffer.write(ask("editor", ask("writer", sys.argv[1])).encode() + b"\n")
