"""Every removed name, where a user writes it: the message gives the advice."""

from pathlib import Path

import pytest

from creditflow.removed import REMOVED
from tests.cli.commands import creditflow
from tests.paths import TOY


def words_with(name: str, new: Path) -> list[object]:
    """A command with the removed name; `new` is a folder that does not exist."""
    kind, _, rest = name.partition(" ")
    key, _, value = name.partition("=")
    if kind in ("creditflow", "recipe", "template"):
        return {"creditflow": rest.split(), "recipe": ["check", rest]}.get(kind, ["init", new, "--template", rest])
    if kind == "tool":
        return ["check", TOY, f"team.agents.writer.tools=[{rest}]"]
    if kind == "argument":
        function, _, argument = rest.partition(".")
        return ["check", TOY, f"reward.functions=[{{fn: {function}, args: {{{argument}: x}}}}]"]
    if kind.startswith("creditflow."):
        return ["check", TOY, f"team.workflow={name}:solve"]
    if key == "reward.functions.fn":
        return ["check", TOY, f"reward.functions=[{{fn: {value}}}]"]
    return ["check", TOY, f"{key}={value or 1}"]


@pytest.mark.parametrize("name", REMOVED)
def test_removed_name_is_answered_with_advice(name: str, tmp_path: Path) -> None:
    result = creditflow(*words_with(name, tmp_path / "new"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count(f"; removed in 0.1: {REMOVED[name]}") == 1, result.stderr
