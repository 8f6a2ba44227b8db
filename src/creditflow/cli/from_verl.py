"""`creditflow from-verl`: a recipe from a command of verl, by the tables that convert recipes to verl's options.

Without verl installed, keys that verl does not have stay in the recipe, and refused keys are listed at any value.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from creditflow.errors import ConfigError

_HEAD = """\
# From a command of verl.trainer.main_ppo. Check: creditflow train THIS_FILE --engine verl --dry-run
# team.py, beside this file:
#     async def solve(task, team):
#         return await team.solver(task.text)
"""
_BASE = {
    "algorithm": {"propagation": "identical", "reward_decomp": False, "group_by": "task"},
    "team": {"workflow": "team.py:solve", "agents": {"solver": {}}},
}
"""verl's credit, of whole trajectories, and its single turn."""
_SYNC = {"trainer.v1.trainer_mode": "sync"}


class CommandClass(TyperCommand):
    """Command whose arguments may look like options, as `--config-name=x` of verl does."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.ignore_unknown_options = True


def from_verl(
    overrides: Annotated[list[str], typer.Argument(metavar="KEY=VALUE", help="Those of verl.trainer.main_ppo.")],
) -> None:
    """Print the recipe of a command of verl.

    In your script, write `creditflow from-verl` for `python3 -m verl.trainer.main_ppo`, and `> recipe.yaml` at the end.
    Options that no recipe can have are comments at its end, each with the reason. Paths are relative to the recipe.
    """
    print(recipe_text(overrides), end="")


def recipe_text(arguments: Sequence[str]) -> str:
    """The recipe of a command's overrides, with those that could not be carried over as comments.

    `arguments`: words, or one text with all of them; what precedes `verl.trainer.main_ppo` is ignored.
    """
    import yaml
    from omegaconf import OmegaConf

    from creditflow.engines.verl.checks import unknown, without_effect
    from creditflow.engines.verl.configuration import CONFIG_NAME, files, nested
    from creditflow.engines.verl.options import LOCAL, RECIPE_NAME, REFUSED

    try:
        words = shlex.split(arguments[0].replace("\\\n", " ")) if len(arguments) == 1 else list(arguments)
    except ValueError as error:
        raise ConfigError(f"not readable as a shell reads it: {error}; close the quotes") from error
    words = words[words.index("verl.trainer.main_ppo") + 1 :] if "verl.trainer.main_ppo" in words else words
    recipe, verl, left = dict[str, Any](_BASE), dict[str, Any](), dict[str, str]()
    chosen: dict[str, Any] = {}
    for word in filter(None, words):
        key, equals, text = word.partition("=")
        if key == "--config-name":
            verl["config_name"] = text.removesuffix(".yaml")
        elif word[0] in "~-" or "@" in key:
            left[word] = "no part of a recipe; add it to the command, after --"
        elif equals:
            chosen[key] = _value(key, text)
    section = "reward." if "reward.custom_reward_function.path" in chosen else ""
    path, name = (chosen.pop(f"{section}custom_reward_function.{part}", None) for part in ("path", "name"))
    if path is None:
        left["data_source"] = "verl chose the reward by this column; the recipe has math_verify, or name yours"
    recipe["reward.functions"] = [{"fn": "math_verify" if path is None else f"{path}:{name or 'compute_score'}"}]
    engine = [f"model_engine={chosen['model_engine']}"] if "model_engine" in chosen else []
    verls = files(verl.get("config_name", CONFIG_NAME), tuple(engine))[1] if find_spec("verl") else {}
    bare = {key.lstrip("+"): value for key, value in chosen.items() if key not in ("model_engine", "trainer.logger")}
    problems = without_effect(bare, _SYNC) | (unknown(bare.keys() & chosen.keys(), verls) if verls else {})
    for key, value in chosen.items():
        parent, dot, last = key.lstrip("+").rpartition(".")
        name, problem = RECIPE_NAME.get(key, key), problems.get(f"{parent}{dot}{last}")
        moved = name != key or REFUSED.get(key) == REFUSED["data.train_files"]
        same = problem is None and key not in LOCAL and last != "lr_warmup_steps"  # whose units differ
        misfit = _misfit(name, value) if moved or same else ""
        if misfit is None:
            recipe[name] = value
        elif not (moved or problem):
            mark = "+" if key.startswith("+") else ""
            verl[f"{parent}{dot}{mark}{last}"] = value.replace("${", "\\${") if isinstance(value, str) else value
        elif key not in verls or verls[key] != value:
            left[f"{key}={value}"] = (misfit or problem or "").removeprefix(f"{key}: ")
    options = OmegaConf.to_container(nested(recipe | ({"verl": nested(verl)} if verl else {})))
    body = yaml.safe_dump(options, sort_keys=False, width=120)
    return _HEAD + body + "".join(f"# not carried over: {option}: {reason}\n" for option, reason in left.items())


def _value(key: str, text: str) -> Any:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        made: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{key}: {text!r} is not readable as a value of Hydra") from error
    return made["value"]


def _misfit(key: str, value: Any) -> str | None:
    """The reason that a recipe cannot have the value; None if it can."""
    from omegaconf import OmegaConf

    from creditflow._utils.sections import checked
    from creditflow.config import Config
    from creditflow.engines.verl.configuration import nested

    try:
        config = checked(Config, OmegaConf.to_container(nested({key: value})))
        return None if config.credit else ""  # the options of credit are checked when they are made
    except ConfigError as error:
        return str(error).removeprefix(f"{key}: ")
