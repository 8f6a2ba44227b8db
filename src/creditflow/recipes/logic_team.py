"""Two agents evaluate logic circuits from reasoning-gym: two gates at the inputs, and a last gate.

The workflow puts the values in. The agent `gate` computes each gate at the inputs (`1 nand 0 = 1`), and the judge
computes the last one from both results. An unreadable response is returned once. That is 3 to 6 turns.

Recipe settings (`recipe.*`): `flip`, the share of sub-rewards that are replaced by their opposite; `judge_weight` (0:
the judge's sub-reward is measured, but no credit).

Every response is untrusted text. It is compared with one exact form and never evaluated; anything else earns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from creditflow import AgentError, Reply, Step, Task, Team, Trajectory, reward
from creditflow.data import Message
from creditflow.plugins.gym.tasks import gym_entry
from creditflow.rewards.support.noise import flipped

MAX_CHARACTERS = 80
GATES = {"&": "and", "+": "or", "\u2295": "xor", "\u2191": "nand", "\u2193": "nor"}
"""Names of the signs in reasoning-gym's expressions."""

COMPUTATIONS = (
    ("1 and 1", "1 and 1 = 1"),
    ("0 or 0", "0 or 0 = 0"),
    ("1 xor 1", "1 xor 1 = 0"),
    ("0 nand 0", "0 nand 0 = 1"),
)
"""Examples in the prompts, as earlier turns."""


# The workflow


async def solve(task: Task, team: Team) -> str:
    """Compute each gate at the inputs, then the last one."""
    gates, last = circuit_of(task)
    bits: list[str] = []
    replies: list[Reply] = []
    for gate in gates:
        reply, bit = await _computed("gate", gate, [], team)
        bits.append(bit)
        replies.append(reply)
    _, bit = await _computed("judge", f"{bits[0]} {last} {bits[1]}", replies, team)
    return bit


async def _computed(agent: str, gate: str, parents: Sequence[Reply], team: Team) -> tuple[Reply, str]:
    """An agent's reply and the bit in it; an unreadable reply is returned once."""
    for _ in range(2):
        reply = await team[agent](_asked(COMPUTATIONS, gate), parents=parents, info={"gate": gate})
        if (bit := bit_in(reply.text, gate)) is not None:
            return reply, bit
        parents = [*parents, reply]
    raise AgentError(f"{agent}: not an equation of {gate}: {reply.text[:40]!r}")


def _asked(examples: Sequence[tuple[str, str]], question: str) -> list[Message]:
    """The messages of a question after its examples."""
    turns = [*examples, (question, "")]
    messages: list[Message] = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    return messages[:-1]


# The task


def circuit_of(task: Task) -> tuple[list[str], str]:
    """The two gates at the inputs with their values, such as `1 nand 0`, and the name of the last gate."""
    metadata = gym_entry(task)["metadata"]
    values = metadata["assignments"]
    gates = [f"{values[term[0]]} {GATES[term[1]]} {values[term[2]]}" for term in metadata["term_strings"]]
    return gates, metadata["final_gate"].lower()


def true_bit(gate: str) -> str:
    """The result of a gate such as `1 nand 0`."""
    left, name, right = gate.split(" ")
    a, b = int(left), int(right)
    value = {"and": a & b, "or": a | b, "xor": a ^ b, "nand": 1 - (a & b), "nor": 1 - (a | b)}[name]
    return str(value)


# Reading responses


def bit_in(text: str, circuit: str) -> str | None:
    """The bit in a response of the exact form `{circuit} = {bit}`; else None."""
    said, _, bit = _trimmed(text).rpartition(" = ")
    return bit if said == circuit and bit in ("0", "1") else None


def _trimmed(text: str) -> str:
    return text.strip(" \n") if len(text) <= MAX_CHARACTERS else ""


# The sub-rewards


@reward(agent_match="^(gate|judge)$")
def bit_right(step: Step, trajectory: Trajectory, flip: float = 0.0) -> float:
    """Whether the equation repeats the given gate and has the right bit."""
    gate = step.info["gate"]
    return flipped(bit_in(step.response, gate) == true_bit(gate), step, trajectory, flip)
