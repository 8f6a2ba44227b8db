"""`creditflow from-verl`: a recipe from a command of verl, by the tables that convert recipes to verl's options.

Without verl installed, keys that verl does not have stay in the recipe, and refused keys are listed at any value.
"""

from __future__ import annotations

import re
import shlex
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from creditflow._utils.install import needs
from creditflow.cli._app import Command
from creditflow.errors import ConfigError, first_line

_PROGRAM = "verl.trainer.main_ppo"
_HEAD = f"""\
# From a command of {_PROGRAM}. Check: creditflow train THIS_FILE --engine verl --dry-run
# team.py, beside this file:
#     async def solve(task, team):
#         return await team.solver(task.text)
"""
_BASE = {
    "algorithm": {"propagation": "identical", "reward_decomp": False, "group_by": "task"},
    "team": {"workflow": "team.py:solve", "agents": {"solver": {}}},
}
"""verl's credit, of whole trajectories, and its single turn."""
_MODE = "trainer.v1.trainer_mode"
_REPLACED = [f"algorithm.{name}" for name in ("adv_estimator", "gamma", "lam", "norm_adv_by_std_in_grpo")]
"""verl's options of credit, which `engines.verl.plugin` does not read."""
_LENGTHS = {"data.max_prompt_length": "first prompt", "data.max_response_length": "whole trajectory"}
"""verl's limits, and the part of a trajectory of several turns that they bound."""
_FUNCTIONS = ("reward.custom_reward_function.", "custom_reward_function.")


_VARIABLE = re.compile(r"\$(\w|\(|\{\w+\})")
"""A variable or command of a shell; Hydra's interpolations have a dot or colon."""


class CommandClass(Command):
    """Command whose arguments may look like options, as `--config-name=x` of verl does."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.ignore_unknown_options = True


def from_verl(
    overrides: Annotated[list[str], typer.Argument(metavar="KEY=VALUE", help=f"Those of {_PROGRAM}.")],
) -> None:
    """Print the recipe of a command of verl.

    In your script, write `creditflow from-verl` for `python3 -m verl.trainer.main_ppo`, and `> recipe.yaml` at the end.
    Options that no recipe can have are comments at its end, each with the reason; comments at its head name values to
    check. Paths are relative to the recipe.

    Example: creditflow from-verl "$(cat train.sh)" > recipe.yaml
    """
    print(recipe_text(overrides), end="")


def recipe_text(arguments: Sequence[str]) -> str:
    """The recipe of a command's overrides, with those that could not be carried over as comments.

    `arguments`: words, or one text with all of them; what precedes `verl.trainer.main_ppo` is ignored. Raises
    ConfigError for a command of another program.
    """
    import yaml
    from omegaconf import OmegaConf

    from creditflow.engines.verl.checks import unknown, without_effect
    from creditflow.engines.verl.configuration import CONFIG_NAME, files, nested
    from creditflow.engines.verl.options import LOCAL, RECIPE_NAME, REFUSED
    from creditflow.engines.verl.plugin import ESTIMATOR, KEY, PREFIX

    file, given, left = _read(arguments, CONFIG_NAME)
    recipe, verl = dict[str, Any](_BASE), {} if file == CONFIG_NAME else {"config_name": file}
    chosen: dict[str, Any] = {key: override.value() for key, override in given.items()}
    mode = str(chosen.get(_MODE, "sync"))
    if mode.startswith(PREFIX) or chosen.get(_REPLACED[0]) == ESTIMATOR:
        recipe["algorithm"] = {}
        replaced = [key for key in _REPLACED if chosen.pop(key, None) is not None]
        left |= {given[key].input_line: "credit has the options of the recipe's algorithm" for key in replaced}
    if mode.startswith(PREFIX):
        chosen[_MODE] = mode.removeprefix(PREFIX)
    function: dict[str, Any] = {"fn": "math_verify"}
    if section := next((section for section in _FUNCTIONS if chosen.get(f"{section}path")), None):
        parts: Any = nested({k.removeprefix(section): chosen.pop(k) for k in given if k.startswith(section)})
        function = {"fn": f"{parts.path}:{parts.get('name') or 'compute_score'}"}
        if "reward_kwargs" in parts:
            function["args"] = parts.reward_kwargs
    else:
        left["data_source"] = "verl chose the reward by this column; the recipe has math_verify, or name yours"
    recipe["reward.functions"] = [function]
    engine = tuple(f"{key}={value}" for key, value in chosen.items() if key == "model_engine")
    verls = files(file, engine)[1] if find_spec("verl") else {}
    added = {key for key in chosen.keys() - verls.keys() if given[key].input_line.startswith("+")}
    listed = {key: value for key, value in chosen.items() if key not in ("model_engine", "trainer.logger")}
    problems = without_effect(listed, {_MODE: "sync"}) | (unknown(listed.keys() - added, verls) if verls else {})
    for key, value in chosen.items():
        parent, dot, last = key.rpartition(".")
        name = RECIPE_NAME.get(key, key if key in REFUSED else key.replace(f"{KEY}.", "algorithm."))
        problem = problems.get(key, "").removeprefix(f"{key}: ")
        moved = name != key or problem == REFUSED["data.train_files"]
        same = not problem and key not in added | LOCAL.keys() and last != "lr_warmup_steps"  # whose units differ
        misfit = _misfit(name, value) if moved or same else "verl's own"
        if not misfit:
            recipe[name] = value
        elif not (moved or problem):
            mark = "+" if key in added else ""
            verl[f"{parent}{dot}{mark}{last}"] = value.replace("${", "\\${") if isinstance(value, str) else value
        elif key not in verls or verls[key] != value:
            left[given[key].input_line] = misfit if moved else problem
    made = OmegaConf.to_container(nested(recipe | ({"verl": nested(verl)} if verl else {})))
    shells = [override.input_line for override in given.values() if _VARIABLE.search(override.input_line)]
    check = dict.fromkeys(shells, "a shell's variable is text here; write its value")
    if chosen.get("actor_rollout_ref.rollout.multi_turn.enable"):
        check |= {given[k].input_line: f"verl's {of}; here of each step" for k, of in _LENGTHS.items() if k in given}
    text = yaml.safe_dump(made, sort_keys=False, width=120)
    return _HEAD + _comments("check", check) + text + _comments("not carried over", left)


def _comments(title: str, reasons: Mapping[str, str]) -> str:
    return "".join("\\n".join(f"# {title}: {word}: {why}".splitlines()) + "\n" for word, why in reasons.items())


def _read(arguments: Sequence[str], verls_file: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """verl's configuration file, Hydra's overrides by key, and the words that no recipe can have, with the reasons."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with needs("creditflow from-verl", "verl"):
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

    try:
        # Without lines of comments, and with continued lines joined.
        words = shlex.split(re.sub(r"(?m)^\s*#.*|\\\n", " ", arguments[0])) if len(arguments) == 1 else list(arguments)
    except ValueError as error:
        raise ConfigError(f"not readable as a shell reads it: {error}; close the quotes") from error
    if _PROGRAM not in words and "-m" in words:
        raise ConfigError(f"expected a command of {_PROGRAM}, got {shlex.join(words)[:100]!r}")
    options = ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--config-name", "-cn", default=verls_file)
    options.add_argument("--config-path", "-cp", default="config")
    named, words = options.parse_known_args(words[words.index(_PROGRAM) + 1 :] if _PROGRAM in words else words)
    file, given, left = str(named.config_name).removesuffix(".yaml"), dict[str, Any](), dict[str, str]()
    if named.config_path not in ("config", "./config"):  # verl's own folder
        left[f"--config-path={named.config_path} --config-name={file}"] = "not verl's; convert its options, too"
        file = verls_file
    for word in filter(None, words):
        try:
            override = OverridesParser.create().parse_override(word)
            if override.is_delete() or override.package or override.is_sweep_override() or not override.key_or_group:
                left[word] = "no part of a recipe; add it to the command, after --"
            else:
                OmegaConf.create([override.value()])  # which reads interpolations
                given[override.key_or_group] = override
        except (HydraException, OmegaConfBaseException) as error:
            left[word] = f"Hydra cannot read it: {first_line(error)}"
    return file, given, left


def _misfit(key: str, value: Any) -> str:
    """The reason that a recipe cannot have the value; empty if it can."""
    from omegaconf import OmegaConf

    from creditflow._utils.sections import checked
    from creditflow.config import Config
    from creditflow.engines.verl.configuration import nested

    try:
        checked(Config, OmegaConf.to_container(nested({key: value}))).algorithm.options()  # checks options of credit
    except ConfigError as error:
        return str(error).removeprefix(f"{key}: ")
    return ""
