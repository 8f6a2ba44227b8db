import functools
import operator

import pytest

from creditflow.config import credit_overrides, load_recipe, with_effect
from creditflow.errors import ConfigError

MINIMAL = """
data: {train_files: tasks.jsonl}
team: {workflow: "team.py:solve", agents: {solver: {}}}
"""


@pytest.fixture
def recipe(tmp_path):
    """A function that writes the minimal recipe, extended by `more`."""

    def write(more="", name="recipe.yaml"):
        path = tmp_path / name
        path.write_text(MINIMAL + more)
        return path

    return write


def test_defaults_are_those_of_the_design(recipe):
    config = load_recipe(recipe()).config

    options = config.credit
    rule = {"rule": "own", "w_r": 1, "sub_reward_origin": 1, "w_o": 1, "outcome_to": "all"}
    assert options.propagation.spec() == rule
    assert (options.gamma, options.lam, options.adv_estimator) == (0.99, 0.95, "grpo")
    assert config.reward.max_failed_frac == 0.2


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
@pytest.mark.parametrize("minimization", ["gae_lambda=0.9", "{gae_lambda: 0.9}"])
def test_keys_of_the_first_recipes_are_resolved(recipe, minimization, estimator):
    keys = f"threshold_share: true, reward_decomp: true, propagation_threshold: 0.4, error_minimization: {minimization}"
    path = recipe(f"algorithm: {{adv_estimator: {estimator}, {keys}}}")
    algorithm = load_recipe(path, ["reward.decomp_granularity=agent"]).config.algorithm

    assert (algorithm.reward_decomp, algorithm.decomp_granularity) == (True, "agent")
    assert (algorithm.propagation, algorithm.lam) == ({"rule": "threshold", "theta": 0.4}, 0.9)


@pytest.mark.parametrize("value", ["0.9", "lambda=0.9", "{gae_lambda: much}", "{gae_lambda: 0.9, gamma: 1}"])
def test_invalid_error_minimization_is_refused(recipe, value):
    with pytest.raises(ConfigError, match=r"error_minimization: expected \{gae_lambda: 0.95\}"):
        load_recipe(recipe(f"algorithm: {{error_minimization: {value}}}"))


def test_overrides_replace_options_of_the_recipe(recipe):
    path = recipe("trainer: {total_training_steps: 5}")

    overrides = ["trainer.total_training_steps=7", "actor_rollout_ref.actor.optim.lr=2e-4", "recipe.depth=3"]
    config = load_recipe(path, overrides).config

    assert config.trainer.total_training_steps == 7
    assert config.actor_rollout_ref.actor.optim.lr == 2e-4
    assert config.recipe == {"depth": 3}


def test_extends_is_relative_to_the_recipe(recipe, tmp_path):
    recipe("algorithm: {gamma: 0.5, lam: 0.5}")
    (tmp_path / "below").mkdir()
    child = tmp_path / "below" / "child.yaml"
    child.write_text("extends: ../recipe.yaml\nalgorithm: {gamma: 0.7}\n")

    loaded = load_recipe(child)

    assert (loaded.config.algorithm.gamma, loaded.config.algorithm.lam) == (0.7, 0.5)
    assert loaded.name == "child"
    assert loaded.folder == (tmp_path / "below").resolve()


def test_circular_extends_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")

    with pytest.raises(ConfigError, match=r"extends.*circle"):
        load_recipe(tmp_path / "a.yaml")


def test_resolved_recipe_loads_again_unchanged(recipe, tmp_path):
    first = load_recipe(recipe("algorithm: {error_minimization: gae_lambda=0.9, threshold_share: false}"))
    again = tmp_path / "again.yaml"
    again.write_text(first.to_yaml())

    assert load_recipe(again).to_dict() == first.to_dict()


def test_resolved_recipe_finds_model_folders_from_elsewhere(recipe, tmp_path, monkeypatch):
    """Model folders are relative to the working directory, and the working directory may change."""
    for name in ("judge", "policy", "solver"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    more = """
actor_rollout_ref: {model: {path: policy}}
reward: {functions: [{fn: judge, args: {path: judge}}, {fn: "mine.py:score", args: {path: absent}}]}
"""
    first = load_recipe(recipe(more))
    (tmp_path / "again.yaml").write_text(first.to_yaml())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    config = load_recipe(tmp_path / "again.yaml").config

    assert config.actor_rollout_ref.model.path == str(tmp_path / "policy")
    assert [function.args["path"] for function in config.reward.functions] == [str(tmp_path / "judge"), "absent"]
    assert list(config.team.agents) == ["solver"]


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("algorithm.propagation_treshold=0.4", "algorithm.propagation_threshold"),
        ("actor_rollout_ref.actor.optim.learning_rate=1", "actor_rollout_ref.actor.optim"),
        ("trainer.total_steps=1", "trainer.total_epochs"),
        ("traner.test_freq=1", "trainer"),
        ("team.agents.writer.sytem=x", "team.agents.writer.system"),
        ("policies.default.optim.rl=1", "policies.default.optim.lr"),
    ],
)
def test_unknown_key_names_the_nearest(recipe, override, nearest):
    with pytest.raises(ConfigError) as refused:
        load_recipe(recipe(), [override])

    key = "traner" if nearest == "trainer" else override.partition("=")[0]
    assert str(refused.value).startswith(f"unknown key {key!r} (did you mean '{nearest}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_batch_size=0", r"data.train_batch_size: expected a number above 0, got 0"),
        ("data.val_max_samples=0", "data.val_max_samples: expected 1 or more, or -1 for all, got 0"),
        ("trainer.device=tpu", "trainer.device: expected one of auto, cpu, cuda, got 'tpu'"),
        ("trainer.critic_warmup=3", "trainer.critic_warmup: 3, but algorithm.adv_estimator: grpo has no critic"),
        ("policies={default: {optim: {lr: fast}}}", "policies.default.optim.lr: expected a number above 0, got 'fast'"),
        ("actor_rollout_ref.rollout.n=1; algorithm.filter_groups.enable=true", "rollout.n: .* at least 2, got 1"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=64", "ppo_mini_batch_size: expected at most .*16 tasks, got 64"),
        ("noequals", "noequals: expected key=value"),
        ("data.train_files=[", "not readable as YAML"),
        ("team.workflow=${oops", r"not readable as YAML: team.workflow: .*; write \\\${ for the text \${"),
        ("team.workflow=${oops}", r"^team.workflow: Interpolation key 'oops' not found; write \\\${ for the text \${"),
        ("recipe={1: 2}", "recipe.1: expected a text as the name, got 1; put it in quotes"),
        ("policies={default: {}, small/solver: {}}", "policies.small/solver: expected letters, .* not `state`"),
        ("policies={default: {}, ..: {}}", "policies...: expected letters"),
        ("policies={default: {}, state: {}}", "policies.state: expected letters"),
        ("algorithm.error_minimization=gae_lambda=7", "algorithm.lam: expected a number of .* at most 1, got 7"),
        (
            "reward.functions=[{fn: exact_match, agent_mach: x}]",
            r"unknown key 'reward.functions\[0\].agent_mach' \(did you mean 'reward.functions\[0\].agent_match'\?\)",
        ),
        ("algorithm.lam=0.5", "algorithm.error_minimization: means lam 0.95, but algorithm.lam is 0.5"),
        ("algorithm.propagation=false", "algorithm.propagation"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "optim.betas: expected two numbers"),
        ("team.agents.close.system=x", "team.agents.close"),
        # Misspelt values
        ("algorithm.propagation_threshold={kind: quantil}", r"did you mean 'quantile'\?"),
        ("actor_rollout_ref.model.target_modules=all_linear", r"did you mean 'all-linear'\?"),
        ("team.agents.a.model=x", "; an agent has the model of its policy: set policies.NAME.model"),
        ("reward.functions=[team.py:f]", r"got 'team.py:f'; write \{fn: team.py:f\}"),
        ("trainer.logger=[wandbb]", r"did you mean 'wandb'\?"),
        ("guard.fallback.trainable=lroa", r"trainable: expected one of all, lora, .*did you mean 'lora'\?"),
        ("guard.rules.entropy.kind=levels", r"guard.rules.entropy.kind: expected one of drop.*did you mean 'level'\?"),
        # Contradictions of two keys
        ("algorithm.decomp_granularity=step; reward.decomp_granularity=agent", "granularity: 'agent', but .* 'step'"),
        ("algorithm.adv_estimator=gae; algorithm.outcome_to=all", "algorithm.outcome_to: gae .*expected answer"),
        ("trainer.resume_from_path=x; trainer.resume_mode=auto", "trainer.resume_from_path: expected"),
    ],
)
def test_invalid_value_is_refused_with_its_key(recipe, override, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe(), ["algorithm.error_minimization=gae_lambda=0.95", *override.split("; ")])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a list\n", "expected a mapping of options at the top level"),
        ("data:\n  train_files: [\n", "not readable as YAML: line "),
        ("data: {train_files: x}\nteam: {agents: {solver: {}}}\n", "team.workflow"),
        ('team: {workflow: "a.py:solve"}\n', "team.agents: expected at least one agent"),
    ],
)
def test_invalid_recipe_file_is_refused(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(content)

    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["data.train_batch_size=4"], "actor_rollout_ref.actor.ppo_mini_batch_size", 4),
        (["data.train_batch_size=64"], "actor_rollout_ref.actor.ppo_mini_batch_size", 8),
        (["critic.loss_agg_mode=seq-mean-token-sum-norm"], "critic.loss_scale_factor", 512),
        (["trainer.resume_from_path=x"], "trainer.resume_mode", "resume_path"),
    ],
)
def test_dependent_defaults_adapt(recipe, overrides, key, expected):
    loaded = load_recipe(recipe(), overrides).to_dict()

    assert functools.reduce(operator.getitem, key.split("."), loaded) == expected


def test_empty_section_has_the_defaults(recipe):
    assert load_recipe(recipe(), ["data=null"]).config.data.train_batch_size == 16


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["propagation: own, propagation_threshold: 0.5"], r"set propagation: threshold$"),
        (["threshold_share: false, on_closed_gate: cut"], "on_closed_gate: the rule discounted has no such option"),
        (["on_closed_gate: freeze"], "on_closed_gate: the rule own has no such option"),
        (["propagation: {rule: own, outcome_to: all}, outcome_to: answer"], "outcome_to: 'answer', but .* to 'all'"),
        (["propagation: identical", "propagation_threshold: 0.7"], "propagation_threshold: the rule identical has no"),
        (["propagation: own, shadow: {propagation: {rule: identical, w_m: 1}}"], "algorithm.shadow.propagation.w_m"),
        (["w_r: 2"], "'algorithm.w_r'; removed in 0.1: .*rule: own, w_r: 1"),
        (["theta: 0.3"], "algorithm.theta: expected it as an option of a rule, .* with threshold"),
        (["outcome_to: auto"], "algorithm.outcome_to: .*got 'auto'; removed in 0.1: leave it out"),
    ],
)
def test_option_that_the_rule_lacks_is_refused(recipe, layers, message):
    recipe(f"algorithm: {{{layers[0]}}}", "base.yaml")
    path = recipe(name="top.yaml")
    path.write_text("extends: base.yaml\n" + (f"algorithm: {{{layers[1]}}}" if layers[1:] else ""))
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


@pytest.mark.parametrize(
    ("base", "override", "spec"),
    [
        ("propagation_threshold: 0.7, on_closed_gate: freeze", "propagation=identical", {"rule": "identical"}),
        ("outcome_to: answer", "propagation=threshold", {"rule": "threshold", "outcome_to": "answer"}),
        ("propagation: {rule: own, w_r: 2}", "propagation=threshold", {"rule": "threshold"}),
        ("propagation: {rule: own, w_r: 2}", "propagation.w_o=3", {"rule": "own", "w_r": 2, "w_o": 3}),
        (
            "propagation: {rule: threshold, theta: 0.5}",
            "propagation_threshold=0.7",
            {"rule": "threshold", "theta": 0.7},
        ),
        ("propagation_threshold: 0.7", "propagation.theta=0.5", {"rule": "threshold", "theta": 0.5}),
        ("propagation_threshold: 0.7", "threshold_share=false", {"rule": "discounted"}),
        ("propagation: identical", "propagation=null", {"rule": "own"}),
        ("propagation: threshold, propagation_threshold: 0.7", "propagation_threshold=null", {"rule": "threshold"}),
    ],
)
def test_override_of_the_rule_replaces_its_options(recipe, base, override, spec):
    path = recipe(f"algorithm: {{{base}}}")
    loaded = load_recipe(path, [f"algorithm.{override}"])
    assert loaded.config.algorithm.propagation == spec
    (record := path.with_name("config.yaml")).write_text(loaded.to_yaml())
    assert load_recipe(record).config.algorithm == loaded.config.algorithm


def test_rule_and_its_option_are_set_in_any_order(recipe):
    options, rule = ["propagation.theta=0.3", "propagation=threshold"], {"rule": "threshold", "theta": 0.3}
    path = recipe("algorithm: {shadow: {propagation: {rule: own, w_r: 2}}}")
    for order in (options, options[::-1]):
        assert credit_overrides(order) == {"propagation": rule}
        loaded = load_recipe(path, [f"algorithm.shadow.{option}" for option in order])
        assert loaded.config.algorithm.shadow == {"propagation": rule}


def test_former_name_of_a_rule_is_a_notice(recipe):
    loaded = load_recipe(recipe("algorithm: {propagation: none}"), ["algorithm.propagation.w_r=2"])
    assert loaded.config.algorithm.propagation == {"rule": "own", "w_r": 2}
    assert loaded.notices == ("algorithm.propagation: none is now called own",)


def test_guard_rule_on_gates_is_a_notice_without_gates(recipe):
    path = recipe("guard: {rules: {mine: {metric: propagation/pass_rate, below: 0.5}}}")
    left_out = "guard.rules.mine: left out, as the propagation rule own has no gates"
    assert load_recipe(path, ["algorithm.propagation=own"]).notices == (left_out,)
    assert load_recipe(path, ["algorithm.propagation=threshold"]).notices == ()


def test_comparison_drops_options_that_an_arm_ignores(recipe):
    path, others = recipe(), ["algorithm.propagation_threshold=0.7", "data.seed=3"]
    assert with_effect(path, ["algorithm.propagation=threshold"], others) == others
    assert with_effect(path, ["algorithm.propagation=identical"], others) == ["data.seed=3"]
    assert with_effect(path, ["algorithm.propagation=gigpo"], ["algorithm.propagation.w_m=1"]) == []
