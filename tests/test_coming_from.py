"""The pages for users of other trainers: both programs of a page have the same inputs, rewards and advantages."""

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from omegaconf import OmegaConf

from creditflow._utils.install import install_command
from creditflow._utils.progress import Reporter
from creditflow.config import Config, leaves, load_recipe
from creditflow.credit import assign
from creditflow.data import TrajectoryBatch, read_parquet
from creditflow.data.datasets import load_tasks
from creditflow.engines.base import find_engine
from creditflow.engines.common.components import load_functions
from tests.builders import make_trajectory, mostly_slow, step
from tests.cli.commands import creditflow, refused
from tests.paths import DOCS, SAMPLES
from tests.plugins.trl.test_trl import run
from tests.test_docs_code import BLOCK

PAGES = DOCS / "coming_from"
CODE = re.compile(r"`([^`]+)`")
KEY = re.compile(r"\.?[a-z_]+(\.[a-z_<>]+)+|\.[a-z_]+")


def write_page(name: str, folder: Path) -> Path:
    """Write the named blocks of a page as files."""
    for file, _, text in BLOCK.findall((PAGES / f"from_{name}.md").read_text()):
        if file:
            (folder / file).write_text(text)
    return folder


def recipe_of(name: str, folder: Path, *overrides: str):
    return load_recipe(write_page(name, folder) / "recipe.yaml", overrides)


def train(folder: Path, *overrides: str) -> TrajectoryBatch:
    """Train the recipe in `folder`; returns the first training step."""
    options = [f"trainer.default_local_dir={folder / 'run'}", "actor_rollout_ref.model.path=tiny", *overrides]
    find_engine("local").train(load_recipe(folder / "recipe.yaml", options), (), Reporter())
    return read_parquet(folder / "run" / "steps" / "000001.parquet")


def options_of(name: str) -> list[list[list[str]]]:
    """The tables of a page's options: the rows of each, without its head."""
    section = (PAGES / f"from_{name}.md").read_text().split("\n## Options\n")[1].split("\n## ")[0]
    tables = [part.splitlines() for part in section.split("\n\n") if part.lstrip().startswith("| ")]
    return [[row.strip("|").split(" | ") for row in table[2:]] for table in tables]


def named(name: str, column: int) -> set[str]:
    """The names in code type in a column of the tables of a page's options."""
    return {found for table in options_of(name) for row in table for found in CODE.findall(row[column])}


# TRL


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_page("trl", tmp_path_factory.mktemp("from_trl"))


@pytest.fixture(scope="module")
def trl(folder):
    return json.loads(run(folder, Path(__file__).with_name("coming_from_worker.py"), folder).splitlines()[-1])


def test_trl_and_recipe_have_equal_prompts(trl, folder) -> None:
    batch = train(folder)
    ours = {tuple(ids.tolist()) for ids in np.split(batch.prompt_ids, batch.prompt_offsets[1:-1])}
    assert ours == {tuple(ids) for ids in trl["printed"]["prompts"]}
    assert len(ours) == 4
    assert batch.n_steps == trl["printed"]["completions"] == 32


def test_trl_and_recipe_train_alike(trl) -> None:
    """Without scaling, advantages are equal; with it, the constants beside the deviation differ."""
    for theirs, ours in trl["printed"]["rewards"]:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-7)  # TRL's are float32
        assert len(set(theirs)) > 2
    assert len(trl["unscaled"]["advantages"]) == 2
    for theirs, ours, _ in trl["unscaled"]["advantages"]:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    for theirs, ours, deviation in trl["printed"]["advantages"]:
        sd = np.array(deviation)
        np.testing.assert_allclose(np.multiply(ours, sd + 1e-6), np.multiply(theirs, sd + 1e-4), rtol=0, atol=1e-6)
        assert np.abs(np.subtract(ours, theirs)).max() > 1e-4
    assert trl["unscaled"]["moved"] > 1e-3
    assert trl["unscaled"]["difference"] < 1e-5


def test_trl_options_of_the_page_exist(trl) -> None:
    values = ["dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo", "group", "none", "batch"]
    missing = {name for name in named("trl", 0) if name not in trl["options"]}
    assert missing == {*values, "importance_sampling_level: sequence", "peft_config"}


# verl


def verls_options(*overrides: str):
    """verl's own configuration."""
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def test_verl_command_and_recipe_have_equal_options(tmp_path) -> None:
    pytest.importorskip("verl")
    from creditflow.engines.verl import configuration, overridden

    overridden.expect_verl()
    recipe = recipe_of("verl", tmp_path)
    words = shlex.split((tmp_path / "train.sh").read_text().replace("\\\n", " "))
    assert words[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    theirs, ours = verls_options(*words[3:]), configuration.compose(recipe, (), tmp_path / "run")
    keys = [word.split("=")[0] for word in words[3:]]
    own = {"data.train_files", "data.val_files", "reward.custom_reward_function.path"}  # read by creditflow itself
    assert {key for key in keys if OmegaConf.select(theirs, key) != OmegaConf.select(ours, key)} == own
    assert recipe.config.data.train_files == theirs.data.train_files


def test_converted_verl_command_has_equal_options(tmp_path) -> None:
    pytest.importorskip("verl")
    from creditflow.cli.from_verl import recipe_text
    from creditflow.engines.verl import configuration, overridden

    overridden.expect_verl()
    command = (SAMPLES / "verl_command.sh").read_text()
    text = recipe_text([command])
    assert (SAMPLES / "verl_command.yaml").read_text() == text
    words = shlex.split(command.replace("\\\n", " "))[3:]
    assert recipe_text(words) == text  # as a shell passes them
    assert recipe_text(["# Ray's nodes\n" + command.replace("\\\n", "\\\n  # data.seed=1 \\\n", 1)]) == text
    (tmp_path / "big.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "big.yaml")
    theirs, ours = verls_options(*words), configuration.compose(recipe, (), tmp_path / "run")
    keys = {word.split("=")[0] for word in words}
    other = {key for key in keys if OmegaConf.select(theirs, key) != OmegaConf.select(ours, key)}
    left = {line.partition("=")[0] for line in text.split("# not carried over: ")[2:]}
    own = {"data.train_files", "data.val_files", "trainer.logger"}  # read by creditflow itself
    assert other == own | left
    assert (len(words), recipe.config.trainer.logger) == (46, theirs.trainer.logger)


def test_verl_command_without_a_recipe_form_is_explained() -> None:
    pytest.importorskip("verl")
    from creditflow.cli.from_verl import recipe_text

    words = (
        "--config-name=ppo_megatron_trainer.yaml algorithm.adv_estimator=remax algorithm.lam=0.9 ~data.shuffle "
        "trainer.nnode=2 +actor_rollout_ref.model.override_config.x=1 custom_reward_function.path=r.py "
        "custom_reward_function.name=f actor_rollout_ref.actor.optim.lr_warmup_steps=3 algorithm.kl_ctrl.kl_coef=0.1 "
        "reward.num_workers=4"
    )
    made, *left = recipe_text(words.split()).split("# not carried over: ")
    recipe = yaml.safe_load(made)
    assert recipe["algorithm"]["lam_token"] == 0.9
    assert recipe["reward"]["functions"] == [{"fn": "r.py:f"}]
    assert dict(leaves(recipe["verl"])) == {
        "config_name": "ppo_megatron_trainer",
        "algorithm.kl_ctrl.kl_coef": 0.1,
        "actor_rollout_ref.model.override_config.+x": 1,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": 3,
    }
    reasons = (
        "~data.shuffle: no part of a recipe",
        "algorithm.adv_estimator=remax: expected",
        "trainer.nnode=2: unknown verl key",
    )
    for line, reason in zip(left, (*reasons, "reward.num_workers=4: "), strict=True):
        assert line.startswith(reason), line


def converted(*words: str):
    """The recipe that `from-verl` makes of words, and its comments."""
    pytest.importorskip("hydra")
    from creditflow.cli.from_verl import recipe_text

    made, *left = recipe_text(words).split("# not carried over: ")
    return yaml.safe_load(made), [line.rstrip("\n") for line in left if not line.startswith("data_source: ")]


@pytest.mark.parametrize(
    ("words", "name", "left"),
    [
        (["--config-name", "ppo_megatron_trainer"], "ppo_megatron_trainer", []),
        (["--config-path=config", "-cn", "ppo_megatron_trainer.yaml"], "ppo_megatron_trainer", []),
        (["--config-name", "ppo_trainer"], None, []),
        (["--config-path=X", "--config-name=mine"], None, ["--config-path=X --config-name=mine: not verl's"]),
    ],
)
def test_from_verl_reads_the_name_of_a_configuration(words, name, left) -> None:
    recipe, comments = converted(*words, "data.max_prompt_length=5")
    assert recipe["data"] == {"max_prompt_length": 5}
    assert recipe.get("verl", {}).get("config_name") == name
    assert [line.partition(";")[0] for line in comments] == left


def test_from_verl_reads_values_as_hydra_does() -> None:
    recipe, left = converted(
        "actor_rollout_ref.model.override_config={attn_implementation:eager}",
        "trainer.experiment_name=12:30",
        "trainer.project_name=010",
        "++data.seed=on",
        "++data.max_prompt_length=5",
        "actor_rollout_ref.rollout.load_format='a\nb'",
        "actor_rollout_ref.model.custom_chat_template={% if x %}",
        "data.truncation='a\nb'",
        "trainer.nnodes=1,2",
        "trainer.nnodes='${'",
        "+=5",
        "nothing",
    )
    assert recipe["trainer"] == {"experiment_name": "12:30", "project_name": "010"}
    assert recipe["data"]["max_prompt_length"] == 5
    assert recipe["verl"]["actor_rollout_ref"] == {
        "model": {"override_config": {"attn_implementation": "eager"}},
        "rollout": {"load_format": "a\nb"},
    }
    assert recipe["verl"]["data"] == {"seed": "on"}
    expected = (
        "actor_rollout_ref.model.custom_chat_template={% if x %}: Hydra cannot read it: ",
        "trainer.nnodes=1,2: no part of a recipe",
        "trainer.nnodes='${': Hydra cannot read it: ",
        "+=5: no part of a recipe",
        "nothing: Hydra cannot read it: missing EQUAL",
        "data.truncation='a\\nb': tasks are the recipe's",
    )
    for line, start in zip(left, expected, strict=True):
        assert line.startswith(start), line


@pytest.mark.parametrize("switch", ["trainer.v1.trainer_mode=credit_sync", "algorithm.adv_estimator=creditflow"])
def test_from_verl_converts_a_command_with_the_plugin(switch) -> None:
    options = ("propagation=own", "gamma=0.5", "folder=x", "outcome_range=[0,2]", "turn_scores=true", "group_byy=task")
    recipe, left = converted(switch, "algorithm.gamma=0.9", *(f"+algorithm.creditflow.{option}" for option in options))
    assert recipe["algorithm"] == {"propagation": "own", "gamma": 0.5}
    assert recipe.get("verl", {}) == ({"trainer": {"v1": {"trainer_mode": "sync"}}} if "sync" in switch else {})
    expected = [
        "algorithm.gamma=0.9: credit has the options",
        "+algorithm.creditflow.folder=x: set trainer.default_local_dir",
        "+algorithm.creditflow.outcome_range=[0,2]: set `range`",
        "+algorithm.creditflow.turn_scores=true: turns are scored",
        "+algorithm.creditflow.group_byy=task: unknown key 'algorithm.group_byy'",
    ]
    comments = [line for line in left if "adv_estimator" not in line]
    for line, start in zip(comments, expected, strict=True):
        assert line.startswith(start), line


def test_from_verl_names_values_to_check() -> None:
    pytest.importorskip("hydra")
    from creditflow.cli.from_verl import recipe_text

    multi_turn = ("data.max_response_length=16", "actor_rollout_ref.rollout.multi_turn.enable=True")
    variables = ("trainer.project_name=$HOME/x", "actor_rollout_ref.model.path=${MODEL}")
    made = recipe_text([*multi_turn, *variables, "data.val_files=${data.train_files}"])
    assert [line for line in made.splitlines() if line.startswith("# check: ")] == [
        *(f"# check: {word}: a shell's variable is text here; write its value" for word in variables),
        "# check: data.max_response_length=16: verl's whole trajectory; here of each step",
    ]
    assert "# check" not in recipe_text(multi_turn[:1])


def test_from_verl_carries_arguments_of_the_reward_function(tmp_path) -> None:
    kwargs = "+reward.custom_reward_function.reward_kwargs.bonus=0.25"
    recipe, left = converted("reward.custom_reward_function.path=r.py", kwargs)
    assert recipe["reward"]["functions"] == [{"fn": "r.py:compute_score", "args": {"bonus": 0.25}}]
    assert left == []
    (tmp_path / "r.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):\n"
        "    return 0.5 + bonus\n"
    )
    (tmp_path / "made.yaml").write_text(yaml.safe_dump(recipe))
    (function,) = load_functions(load_recipe(tmp_path / "made.yaml"))
    trajectory = make_trajectory("0", [step("solver")])
    trajectory.answer = "11"
    assert function.call(trajectory) == 0.75
    _, (without,) = converted(kwargs)
    assert without.startswith(f"{kwargs}: rewards are the recipe's")


def test_from_verl_refuses_other_programs() -> None:
    pytest.importorskip("hydra")
    message = refused("from-verl", "python3", "-m", "verl.trainer.main_generation", "data.seed=1")
    assert message.startswith(
        "expected a command of verl.trainer.main_ppo, got 'python3 -m verl.trainer.main_generation"
    )


def test_from_verl_names_the_extra_with_hydra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "hydra.core.override_parser.overrides_parser", None)
    assert refused("from-verl", "data.seed=1").endswith(install_command("verl"))


def test_from_verl_writes_a_recipe_that_checks(tmp_path, monkeypatch) -> None:
    pytest.importorskip("hydra")
    monkeypatch.chdir(write_page("verl", tmp_path))
    Path("team.py").unlink()
    command = Path("train.sh").read_text().replace("path=model", "path=tiny")
    made = creditflow("from-verl", command)
    assert (made.exit_code, made.stderr) == (0, "")
    Path("made.yaml").write_text(made.stdout)
    Path("team.py").write_text("\n".join(re.findall("^#     (.*)", made.stdout, re.MULTILINE)))
    checked = creditflow("check", "made.yaml", "trainer.num_threads=1")
    assert "the recipe can be trained" in checked.stderr, checked.output


def test_verl_options_of_equal_name_exist_in_both() -> None:
    pytest.importorskip("verl")
    theirs, ours, missing = verls_options(), dict(leaves(Config().model_dump())), object()
    keys = [f"{CODE.findall(row[0])[0]}.{name}" for row in options_of("verl")[0] for name in CODE.findall(row[1])]
    assert len(keys) > 35
    assert [key for key in keys if key not in ours] == []
    assert [key for key in keys if OmegaConf.select(theirs, key, default=missing) is missing] == []


def test_verl_rows_and_scores_are_equal(tmp_path) -> None:
    recipe = recipe_of("verl", tmp_path)
    tasks = load_tasks(recipe.config.data.train_files, recipe.folder, {}, "train")
    rows = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert [list(task.prompt) for task in tasks] == [row["prompt"] for row in rows]
    (function,) = load_functions(recipe)
    space: dict = {}
    exec((tmp_path / "score.py").read_text(), space)
    for task, row in zip(tasks, rows, strict=True):
        for text in ("11", " 13 ", "1x", "no", ""):
            given = (row["data_source"], text, row["reward_model"]["ground_truth"], row["extra_info"])
            made = make_trajectory("0", [step("solver", response=text)])
            made.task, made.answer = task, text
            assert function.call(made) == space["compute_score"](*given)


def grpo_of_verl(outcome_N, task_N):
    """The advantage of each trajectory by verl's GRPO, one row a trajectory."""
    torch = pytest.importorskip("torch")
    algorithms = pytest.importorskip("verl.trainer.ppo.core_algos")
    rewards = torch.tensor(outcome_N, dtype=torch.float64)[:, None]
    made, _ = algorithms.compute_grpo_outcome_advantage(rewards, torch.ones_like(rewards), np.array(task_N))
    return made[:, 0].numpy()


@pytest.mark.parametrize("name", ["verl", "agent_lightning"])
def test_recipe_has_the_advantages_of_verl(name, tmp_path) -> None:
    """In Agent Lightning 1.0.2 the advantage of a rollout is that of verl, for each of its rows."""
    recipe = recipe_of(name, tmp_path)
    rng = np.random.default_rng(0)
    outcome_N, task_N = rng.random(24), np.repeat(np.arange(6), 4).astype(str)
    most = 1 if name == "verl" else 5
    trajectories = [
        make_trajectory(str(i), [step("solver") for _ in range(rng.integers(1, most + 1))], float(one), uid)
        for i, (one, uid) in enumerate(zip(outcome_N, task_N, strict=True))
    ]
    batch = TrajectoryBatch.from_trajectories(trajectories)
    made = assign(batch, recipe.config.credit)
    expected = grpo_of_verl(outcome_N, task_N)[batch.trajectory_of_step]
    np.testing.assert_allclose(made.advantage.advantage_S, expected, rtol=0, atol=1e-6)


# rLLM


@pytest.mark.parametrize("scaled", [False, True])
def test_recipe_has_the_advantages_of_rllm(scaled, tmp_path) -> None:
    """rLLM's GRPO (`calculate_grpo_advantages_per_group`): per task and role, over all members of the group."""
    n, n_tasks = 4, 3
    recipe = recipe_of("rllm", tmp_path, f"algorithm.norm_adv_by_std_in_grpo={str(scaled).lower()}")
    rng = np.random.default_rng(1)
    reward_TNR = rng.integers(0, 5, (n_tasks, n, 3)) / 4  # two solvers and the judge
    trajectories = [
        make_trajectory(
            f"{t}-{i}",
            [step("solver", float(one[0])), step("solver", float(one[1])), step("judge")],
            float(one[2]),
            str(t),
        )
        for t, rollouts in enumerate(reward_TNR)
        for i, one in enumerate(rollouts)
    ]
    made = assign(TrajectoryBatch.from_trajectories(trajectories), recipe.config.credit)
    expected_TNR = np.empty_like(reward_TNR)
    for role in ([0, 1], [2]):
        group = reward_TNR[:, :, role]
        centred = group - group.mean((1, 2), keepdims=True)
        expected_TNR[:, :, role] = centred / (group.std((1, 2), keepdims=True) + 1e-6) if scaled else centred
    factor = np.sqrt((n - 1) / n) if scaled else 1.0
    np.testing.assert_allclose(made.advantage.advantage_S, factor * expected_TNR.ravel(), rtol=0, atol=1e-5)


# All pages


@pytest.mark.parametrize("name", mostly_slow(["verl", "agent_lightning", "rllm"], {"rllm"}))
def test_recipe_of_the_page_trains(name, tmp_path) -> None:
    if name == "agent_lightning":
        pytest.importorskip("openai")
    batch = train(write_page(name, tmp_path), "trainer.total_training_steps=1")
    assert set(batch.agent_names) == ({"solver", "judge"} if name == "rllm" else {"solver"})
    assert not np.isnan(batch.outcome).any()


@pytest.mark.parametrize("name", ["trl", "verl", "agent_lightning", "rllm"])
def test_recipe_options_of_the_page_exist(name) -> None:
    """Checks names with a dot; a name that begins with one continues the name before it."""
    known = [key for key, _ in leaves(Config().model_dump())]
    known += ["team.agents.<name>.tools", *{key.rpartition(".")[0] for key in known}]
    keys = {match[0] for written in named(name, 1) if (match := KEY.match(written))}
    assert len(keys) > 5
    assert [key for key in sorted(keys) if not any(f".{one}".endswith(f".{key.lstrip('.')}") for one in known)] == []
