"""Recipes as verl configurations, compared with verl's own files and dataclasses, without training."""

from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from creditflow._utils.progress import Reporter
from creditflow.config import Config, leaves, load_recipe, with_options
from creditflow.engines.base import LOCAL_OPTIONS
from creditflow.engines.verl import configuration, options, plugin
from creditflow.engines.verl.checks import validate
from creditflow.engines.verl.configuration import compose
from creditflow.engines.verl.engine import ENGINE
from creditflow.engines.verl.options import mapped
from creditflow.engines.verl.overridden import expect_verl
from creditflow.engines.verl.policies import policy_configs
from creditflow.engines.verl.recipe import read_run_handle
from creditflow.errors import ConfigError
from tests.builders import mostly_slow
from tests.cli.commands import creditflow
from tests.paths import RECIPES, TOY

ray = pytest.importorskip("ray")
pytest.importorskip("verl")

RUN = Path("/runs/one")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
WARM_UP = f"{ACTOR}.optim.lr_warmup_steps"
CRITIC = "algorithm.adv_estimator=gae algorithm.outcome_to=answer"


@pytest.fixture(scope="session", autouse=True)
def _verl():
    expect_verl()


def composed(*arguments, recipe=TOY):
    """Compose verl's configuration of a recipe with command-line arguments."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    device = ("trainer.device=auto",) if recipe == TOY else ()  # the toy recipe sets cpu, which verl rejects
    return compose(load_recipe(recipe, [*device, *arguments[:at]]), arguments[at + 1 :], RUN)


def refused(*arguments, recipe=TOY):
    with pytest.raises(ConfigError) as caught:
        validate(composed(*arguments, recipe=recipe))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def expect(config, words):
    """Assert that a configuration has the values of `key=value` words."""
    expected = {key: yaml.safe_load(value) for key, value in (word.split("=") for word in words.split())}
    assert {key: OmegaConf.select(config, key, throw_on_missing=True) for key in expected} == expected


def select(config, key):
    return OmegaConf.select(config, key, throw_on_missing=True)


# Recipe options reach verl

OURS = (
    *("algorithm", "reward", "team", "policies", "recipe", "compare", "verl", "guard", "audit", "ray_kwargs"),
    *("data.train_files", "data.val_files"),
    *(
        f"{ROLLOUT}.{name}"
        for name in ("max_failed_frac", "min_complete_frac", "multi_turn", "timeout_outcome", "timeout_s")
    ),
    *("trainer.default_local_dir", "trainer.device", "trainer.precision", "trainer.num_threads"),
    *("trainer.logger", "trainer.project_name", "trainer.experiment_name"),
)
"""Recipe sections and keys that creditflow reads itself, or passes to verl apart from the mapping."""


def test_every_recipe_option_is_mapped_or_own():
    """A new recipe option without a mapping would be dropped silently."""
    followed = {key for keys in options.sources().values() for key in keys}

    for key, _ in leaves(Config().model_dump()):
        ours = any(key == own or key.startswith(f"{own}.") for own in OURS)
        unsupported = key in {*options.LOCAL, *LOCAL_OPTIONS}
        assert key in followed or unsupported or ours, key


OTHER_VALUES = {
    "actor_rollout_ref.model.target_modules": ["q_proj"],
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "critic.ppo_max_token_len_per_gpu": 888,
    "critic.loss_agg_mode": "seq-mean-token-mean",
    "critic.loss_scale_factor": 44,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 999,
    f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum",
    f"{ACTOR}.policy_loss.loss_mode": "gspo",
    f"{ACTOR}.loss_scale_factor": 55,
    f"{ACTOR}.kl_loss_type": "mse",
    "trainer.resume_mode": "resume_path",
    "trainer.resume_from_path": "there",
    "trainer.max_actor_ckpt_to_keep": 2,
}


def other_values():
    """A changed value for each option with the same name in verl; numbers differ from each other."""
    config, values = load_recipe(TOY).config, dict(OTHER_VALUES)
    for place, key in enumerate(key for key in options.SAME if key not in OTHER_VALUES):
        value = attrgetter(key)(config)
        more = place + 2 if isinstance(value, int) else (place + 1) / 64
        values[key] = not value if isinstance(value, bool) else value + more
    return values


def test_same_name_options_reach_verl():
    values = other_values()

    config = composed(*CRITIC.split(), *(f"{key}={str(value).lower()}" for key, value in values.items()))

    assert {key: select(config, key) for key in values} == values


OF_VERL = f"{ROLLOUT}.max_model_len=null trainer.logger=console trainer.default_hdfs_dir=x {ACTOR}.kl_loss_type=k3+"
"""Values of verl alone."""
FIXED = (
    "trainer.use_v1=true trainer.v1.trainer_mode=sync algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=false "
    f"algorithm.filter_groups.metric=acc reward.num_workers=1 {ROLLOUT}.calculate_log_probs=true "
    f"{ROLLOUT}.multi_turn.enable=false"
)
"""Options with one value, which may be repeated."""


@pytest.mark.parametrize(
    ("arguments", "verls"),
    [
        (
            "trainer.logger=[console] trainer.project_name=p trainer.total_training_steps=50 trainer.test_freq=3 "
            f"trainer.save_freq=4 {ACTOR}.clip_ratio=0.1 {ACTOR}.grad_clip=0.5 {ACTOR}.optim.lr=0.5 "
            f"{ACTOR}.optim.lr_scheduler_type=cosine {ACTOR}.optim.weight_decay=0.25 {ACTOR}.optim.betas=[0.5,0.75] "
            "actor_rollout_ref.model.lora_rank=8 critic.optim.betas=[0.25,0.5] critic.grad_clip=0.75 "
            "critic.model.path=other algorithm.gamma_token=0.9 algorithm.lam_token=0.8",
            "trainer.logger=[] trainer.project_name=p trainer.total_training_steps=50 trainer.test_freq=3 "
            f"trainer.save_freq=4 {ACTOR}.clip_ratio_low=0.1 {ACTOR}.clip_ratio_high=0.1 {ACTOR}.optim.clip_grad=0.5 "
            f"{ACTOR}.optim.lr=0.5 {ACTOR}.optim.lr_scheduler_type=cosine {ACTOR}.optim.weight_decay=0.25 "
            f"{ACTOR}.optim.betas=[0.5,0.75] actor_rollout_ref.model.lora_rank=8 critic.optim.betas=[0.25,0.5] "
            "critic.optim.clip_grad=0.75 critic.optim.lr=1.0e-5 critic.model.path=other trainer.total_epochs=50 "
            "algorithm.gamma=0.9 algorithm.lam=0.8",
        ),
        (
            f"{ACTOR}.clip_ratio_high=0.28 critic.optim.lr=0.5 actor_rollout_ref.model.path=other "
            "algorithm.adv_estimator=rloo algorithm.gamma=0.5 trainer.total_training_steps=0",
            f"{ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28 {ACTOR}.optim.lr=1.0e-3 critic.optim.lr=0.5 "
            "critic.model.path=other algorithm.adv_estimator=grpo algorithm.gamma=1.0 trainer.total_epochs=1 "
            "trainer.total_training_steps=0",
        ),
        (
            "policies.default.lora_rank=4 policies.default.optim.lr=0.5 trainer.total_training_steps=null "
            "trainer.total_epochs=3 algorithm.error_minimization=gae_lambda=0.5",
            f"actor_rollout_ref.model.lora_rank=4 {ACTOR}.optim.lr=0.5 trainer.total_training_steps=null "
            "trainer.total_epochs=3 algorithm.lam=1.0",
        ),
        (  # at the end only: verl acts after the last step if the frequency is above 0
            "trainer.test_freq=-1 trainer.save_freq=-1 policies.own.model.path=/its/own "
            "team.agents.writer.policy=own team.agents.critic.policy=own "
            "ray_kwargs.ray_init.address=auto ray_kwargs.ray_init.log_to_driver=true trainer.num_threads=3 "
            "ray_kwargs.ray_init.runtime_env.env_vars.A=b",
            "trainer.test_freq=2147483647 trainer.save_freq=2147483647 actor_rollout_ref.model.path=/its/own "
            "ray_kwargs.ray_init.address=auto ray_kwargs.ray_init.log_to_driver=true ray_kwargs.ray_init.num_cpus=null "
            "ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS='3' ray_kwargs.ray_init.runtime_env.env_vars.A=b",
        ),
        (  # 3 mini-batches twice are 6 updates per training step; the 13th update is in the third step
            f"data.train_batch_size=8 {ACTOR}.ppo_mini_batch_size=3 {ACTOR}.ppo_epochs=2 {WARM_UP}=13 "
            "verl.trainer.nnodes='\\${data.train_batch_size}' -- trainer.n_gpus_per_node=${trainer.nnodes}",
            f"{WARM_UP}=3 trainer.nnodes=8 trainer.n_gpus_per_node=8",
        ),
        (f"-- {OF_VERL}", OF_VERL),
        (f"-- {FIXED}", FIXED),
        ("verl.config_name=ppo_megatron_trainer", f"{ACTOR}.strategy=megatron"),
        ("-- model_engine=torchtitan", f"{ACTOR}.strategy=torchtitan"),
        (
            f"{ACTOR}.optim.lr_scheduler_type=cosine verl.model_engine=megatron",
            f"{ACTOR}.strategy=megatron {ACTOR}.optim.lr_decay_style=cosine",
        ),
        (  # an open option keeps verl's default
            f"{CRITIC} actor_rollout_ref.model.path=/m",
            "algorithm.adv_estimator=gae critic.model.path=/m critic.ppo_max_token_len_per_gpu=32768 "
            f"{ACTOR}.ppo_max_token_len_per_gpu=16384 actor_rollout_ref.model.enable_gradient_checkpointing=true",
        ),
        (  # required
            "trainer.num_threads=0",
            "trainer.use_v1=true trainer.v1.trainer_mode=sync trainer.default_local_dir=/runs/one/checkpoints "
            "trainer.logger=[] trainer.experiment_name=one data.train_files=train data.val_files=val "
            "data.custom_cls.path=pkg://creditflow.engines.verl.dataset data.custom_cls.name=TaskDataset "
            f"{ACTOR}.use_dynamic_bsz=true {ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model] "
            f"{ROLLOUT}.name=vllm {ROLLOUT}.calculate_log_probs=true {ROLLOUT}.prompt_length=128 "
            f"{ROLLOUT}.response_length=4 {ROLLOUT}.agent.agent_loop_manager_class="
            "creditflow.engines.verl.agent_loop.CreditflowAgentLoopManager ray_kwargs.ray_init.log_to_driver=false "
            "ray_kwargs.ray_init.runtime_env.env_vars=null",
        ),
    ],
)
def test_options_reach_verl(arguments, verls):
    config = composed(*arguments.split())

    expect(config, verls)
    assert validate(config) == []


SEVERAL = (
    "policies.first.model.path=/one",
    "policies.second.model.path=/two",
    "team.agents.writer.policy=first",
    "team.agents.critic.policy=second",
    "verl.trainer.n_gpus_per_node=2",
    f"verl.{ROLLOUT}.tensor_model_parallel_size=1",
    f"verl.{ROLLOUT}.name=transformers",
)


def test_each_policy_has_its_own_adapter_and_optimizer():
    own = ("policies.first.lora_rank=4", "policies.second.optim={lr_warmup_steps: 3, lr: 0.5}", f"{ACTOR}.ppo_epochs=2")
    recipe = load_recipe(TOY, ["trainer.device=auto", *SEVERAL, *own])

    first, second = policy_configs(compose(recipe, (), RUN), recipe.config).values()

    assert [c.actor_rollout_ref.model.path for c in (first, second)] == ["/one", "/two"]
    assert [c.critic.model.path for c in (first, second)] == ["/one", "/two"]
    assert [c.actor_rollout_ref.model.lora_rank for c in (first, second)] == [4, 0]
    assert [c.actor_rollout_ref.actor.optim.lr for c in (first, second)] == [1e-3, 0.5]
    assert second.actor_rollout_ref.actor.optim.lr_warmup_steps == 2


def test_own_option_of_a_policy_leaves_verls_others():
    recipe = load_recipe(TOY, ["trainer.device=auto", *SEVERAL, "policies.second.optim.lr=0.5"])

    configs = policy_configs(compose(recipe, [f"{WARM_UP}=7"], RUN), recipe.config).values()

    assert [(c.actor_rollout_ref.actor.optim.lr, select(c, WARM_UP)) for c in configs] == [(1e-3, 7), (0.5, 7)]


SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=1",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
)


@pytest.mark.parametrize(
    ("mode", "ours", "message"),
    [
        (SEPARATE[:1], (), f"{ROLLOUT}.nnodes: trainer.v1.trainer_mode=separate_async needs devices"),
        (SEPARATE, ("algorithm.max_version_lag=0",), "algorithm.max_version_lag: 0, but"),
        (SEPARATE, ("actor_rollout_ref.model.lora_rank=8",), "actor_rollout_ref.model.lora_rank: LoRA of policy"),
        ((*SEPARATE, "actor_rollout_ref.model.lora.rank=8"), (), "actor_rollout_ref.model.lora_rank: LoRA of policy"),
        ((*SEPARATE, "trainer.v1.separate_async.num_warmup_batches=3"), (), "algorithm.max_version_lag: 2, but"),
        ((*SEPARATE, "trainer.v1.colocate_async.num_warmup_batches=2"), (), "trainer.v1.colocate_async.num_warmup"),
        ((*SEPARATE, f"{ROLLOUT}.tensor_model_parallel_size=2"), (), f"{ROLLOUT}.tensor_model_parallel_size: rollout"),
        ((f"{ROLLOUT}.nnodes=1",), (), f"{ROLLOUT}.nnodes: only trainer.v1.trainer_mode=separate_async reads it"),
    ],
)
def test_asynchronous_mode_rejects_what_it_cannot_do(mode, ours, message):
    assert refused("algorithm.max_version_lag=2", *ours, "--", *mode).startswith(message)


def test_asynchronous_mode_bounds_and_corrects_staleness():
    config = composed("algorithm.max_version_lag=2", "--", *SEPARATE)
    expect(
        config,
        "trainer.v1.sampler.max_off_policy_threshold=3 trainer.v1.sampler.max_off_policy_strategy=wait "
        f"trainer.v1.separate_async.parameter_sync_step=1 {ROLLOUT}.checkpoint_engine.backend=nccl "
        "algorithm.rollout_correction.rollout_is=token",
    )
    own = composed("algorithm.max_version_lag=2", "--", *SEPARATE, "algorithm.rollout_correction.rollout_is=sequence")
    assert own.algorithm.rollout_correction.rollout_is == "sequence"
    recipe = load_recipe(TOY, ["trainer.device=auto", "algorithm.max_version_lag=2", *SEVERAL])
    shared = compose(recipe, (*SEPARATE[:2], f"{ROLLOUT}.n_gpus_per_node=4"), RUN)
    for of_policy in policy_configs(shared, recipe.config).values():
        assert of_policy.actor_rollout_ref.rollout.n_gpus_per_node == 2


def test_carried_recipe_keeps_dollar_signs():
    """verl resolves interpolations twice; recipe text that looks like one must stay unchanged."""
    config = composed("team.agents.writer.system='Write \\${x} and $y$.'")
    OmegaConf.resolve(config)
    again = OmegaConf.create(OmegaConf.to_container(config, resolve=True))

    run = read_run_handle(again)
    assert run.recipe.config.team.agents["writer"].system == "Write ${x} and $y$."
    assert (run.recipe.name, run.recipe.folder, run.run_folder) == ("toy", TOY.parent, RUN)
    assert read_run_handle(again.data).recipe == run.recipe  # verl passes only this section to the data set


# Precedence


def recipe_with(tmp_path, text):
    path = tmp_path / "it.yaml"
    path.write_text(f"extends: {TOY}\n{text}\n")
    return path


VERL_LR = "trainer: {device: auto}\nverl: {actor_rollout_ref: {actor: {optim: {lr: 0.125, clip_grad: 0.25}}}}"


def test_precedence_of_defaults_section_and_overrides(tmp_path):
    recipe = recipe_with(tmp_path, VERL_LR)
    lr, clip = f"{ACTOR}.optim.lr", f"{ACTOR}.optim.clip_grad"

    def values(*arguments):
        config = composed(*arguments, recipe=recipe)
        return select(config, lr), select(config, clip)

    assert configuration.files("ppo_trainer", ())[1][lr] == 1e-6  # toy.yaml: 1e-3
    assert values() == (0.125, 0.25)
    assert values("--", f"{lr}=0.5", f"{clip}=0.75") == (0.5, 0.75)
    assert values(f"{lr}=0.5") == (0.5, 0.25)
    assert values(f"{ACTOR}.grad_clip=0.5", f"{lr}=0.5", f"verl.{lr}=0.75") == (0.75, 0.5)
    assert values(f"{lr}=0.5", "--", f"{lr}=0.25") == (0.25, 0.25)


def test_verl_overrides_update_the_carried_recipe():
    """creditflow reads the carried recipe, which must agree with verl's configuration."""
    same = f"{ROLLOUT}.n=6 data.max_response_length=9 trainer.total_training_steps=77"
    config = composed("--", *same.split(), f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.grad_clip=0.3")

    expect(config, f"{same} {ROLLOUT}.response_length=9 trainer.total_epochs=77 {ACTOR}.clip_ratio_high=0.1")
    expect(config, f"{ACTOR}.optim.clip_grad=0.3")
    expect(OmegaConf.create(read_run_handle(config).config.model_dump()), same)


def test_hydra_override_operators_work():
    config = composed(
        "verl={trainer: {+mine: 1}, actor_rollout_ref: {model: {override_config: {attn_implementation: sdpa}}}}",
        "--",
        "+trainer.other=2",
        "++trainer.nnodes=3",
        "~trainer.v1.separate_async",
        f"+{ROLLOUT}.repetition_penalty=1.5",
        "trainer.logger=[console,wandb]",
        f"{ACTOR}.optim={{lr: 0.5}}",
    )

    expect(  # an open section takes any key, and a section is merged, not replaced
        config,
        "actor_rollout_ref.model.override_config.attn_implementation=sdpa trainer.mine=1 trainer.other=2 "
        f"trainer.nnodes=3 trainer.v1.separate_async=null {ROLLOUT}.repetition_penalty=1.5 "
        f"trainer.logger=[console,wandb] {ACTOR}.optim.lr=0.5 {ACTOR}.optim.weight_decay=0.01",
    )


# Rejected options


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("trainer.total_epoch", "trainer.total_epochs"),
        (f"{ACTOR}.lr", f"{ACTOR}.optim.lr"),
        (f"{ROLLOUT}.tensor_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size"),
        ("trainer.total_epochs.more", "trainer.total_epochs"),
    ],
)
def test_unknown_verl_key_is_rejected_with_a_suggestion(key, nearest):
    message = refused("--", f"{key}=1")

    assert refused(f"verl.{key}=1") == message
    suggestion = f"(did you mean '{nearest}'?); +{key} would add it to those that verl lists"
    assert message == f"unknown verl key '{key}' {suggestion}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-- trainer.nnodes=two", "trainer.nnodes: expected a whole number, got 'two'"),
        ("-- trainer.nnodes=2.5", "trainer.nnodes: expected a whole number, got 2.5"),
        ("-- trainer.nnodes=true", "trainer.nnodes: expected a whole number, got True"),
        (f"-- {ACTOR}.use_torch_compile=1", f"{ACTOR}.use_torch_compile: expected true or false, got 1"),
        (f"-- {ACTOR}.strategy=[a]", f"{ACTOR}.strategy: expected a text, got ['a']"),
        (f"-- {ROLLOUT}.gpu_memory_utilization=all", f"{ROLLOUT}.gpu_memory_utilization: expected a number, got 'all'"),
        (f"-- {ROLLOUT}.max_model_len=long", f"{ROLLOUT}.max_model_len: expected a whole number, got 'long'"),
        (f"-- {ACTOR}.optim.betas=1", f"{ACTOR}.optim.betas: expected a list, got 1"),
        (f"-- {ACTOR}.ppo_epochs=null", f"{ACTOR}.ppo_epochs: expected a whole number, got None"),
        ("-- trainer=3", "trainer: expected a mapping of options, got 3"),
        ("verl.model_engine=[a]", "verl.model_engine: expected a name, got ['a']"),
        (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.name: vllm is for --engine local; set verl.{ROLLOUT}.name"),
        (
            f"{ACTOR}.optim.lr_scheduler_type=cosine -- model_engine=torchtitan",
            f"{ACTOR}.optim.lr_scheduler_type: 'cosine', but verl's model_engine=torchtitan has no such option",
        ),
    ],
)
def test_unusable_value_is_rejected(arguments, message):
    assert refused(*arguments.split()) == message


UNKNOWN = "got an unexpected keyword argument 'mine'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("actor_rollout_ref.model.layers_to_transform=[0]", "{key}: [0] is for --engine local"),
        ("algorithm.filter_groups.max_num_gen_batches=3", "{key}: 3 is for --engine local"),
        (f"{ACTOR}.loss_agg_mode=traj-mean-step-mean", "{key}: traj-mean-step-mean is for --engine local"),
        ("critic.loss_agg_mode=traj-mean-step-mean", "{key}: traj-mean-step-mean is for --engine local"),
        ("critic.context=trajectory", "{key}: trajectory is for --engine local"),
        ("audit.every=1", "{key}: 1 is for --engine local"),
        ("trainer.device=cpu", "{key}: cpu is for --engine local"),
        ("trainer.device=cuda", "{key}: cuda is for --engine local"),
        (
            "policies.default.trainable=true team.agents.critic.policy=other policies.other.trainable=false",
            "{key}: false, but verl",
        ),
        ("actor_rollout_ref.model.path=null", "{key}: expected a Hugging Face"),
        (f"-- {ACTOR}.optim.betas=[a,b]", "{key}: "),
        (f"-- {ROLLOUT}.tensor_model_parallel_size=3", "{key}: rollout servers of 3 devices, which the 8 ("),
        (
            f"-- {ACTOR}.ppo_micro_batch_size_per_gpu=4",
            f"{{key}}: has no effect while {ACTOR}.use_dynamic_bsz is true: micro-batches are cut by tokens; "
            f"use {ACTOR}.ppo_max_token_len_per_gpu",
        ),
        (f"-- {ROLLOUT}.name=nothing", "{key}: expected one of sglang, "),
        (f"-- {ROLLOUT}.name=null", "{key}: expected one of sglang, "),
        ("-- nonsense", "unknown verl key 'nonsense'; +nonsense would add it"),
        ("-- trainer.nnodes={a", "verl's configuration: no viable alternative at input '{a'"),
        (
            "-- trainer.nnodes=1,2",
            "verl's configuration: Ambiguous value for argument 'trainer.nnodes=1,2' 1. To use it as a",
        ),
        ("-- +trainer.nnodes=3", "verl's configuration: Could not append to config. An item is already at"),
        ("-- ~trainer.nodes", "verl's configuration: Could not delete from config. 'trainer.nodes' does not exist."),
        ("-- model_engine=foo", "verl's configuration: In 'ppo_trainer': Could not find 'model_engine/foo'"),
        ("verl.config_name=nothing", "verl's configuration: Cannot find primary config 'nothing'"),
        (f"-- {ACTOR}.use_dynamic_bsz=false", "verl refuses the configuration: [actor] Please set at least one of"),
    ],
)
def test_rejected_option_is_named(arguments, message):
    *_, last = arguments.split()
    assert refused(*arguments.split()).startswith(message.replace("{key}", last.partition("=")[0]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"+{ACTOR}.mine=1", UNKNOWN),
        ("+actor_rollout_ref.model.mine=1", "actor_rollout_ref.model has no option 'mine'"),
        (f"{ROLLOUT}.expert_parallel_size=4", "expert_parallel_size must be equal to"),
    ],
)
def test_options_unknown_to_verls_dataclasses_are_rejected(override, message):
    assert message in refused("--", override)


@pytest.mark.parametrize(
    "override",
    mostly_slow(
        [
            "trainer.use_v1=false",
            "trainer.v1.trainer_mode=creditflow",
            "trainer.v1.sampler.max_off_policy_threshold=7",
            "trainer.v1.separate_async.parameter_sync_step=2",
            "trainer.default_local_dir=elsewhere",
            "algorithm.adv_estimator=gae",
            "algorithm.filter_groups.metric=reward",
            "algorithm.filter_groups.max_num_gen_batches=10",
            "critic.enable=true",
            "reward.reward_model.enable=true",
            "reward.num_workers=8",
            "data.custom_cls.path=mine.py",
            "data.filter_overlong_prompts=true",
            f"{ROLLOUT}.calculate_log_probs=false",
            f"{ROLLOUT}.response_length=5",
            f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml",
            f"+{ROLLOUT}.agent.agent_loop_manager_class=mine.Manager",
            f"{ROLLOUT}.checkpoint_engine.backend=nccl",
            "skip.rollout.enable=true",
        ],
        {"trainer.use_v1=false", "algorithm.adv_estimator=gae", "skip.rollout.enable=true"},
    ),
)
def test_option_without_effect_is_rejected_by_name(override):
    key = override.partition("=")[0].removeprefix("+")

    message = refused("--", override)

    assert message.startswith(f"{key}: ")
    assert len(message) > len(key) + 10


def test_all_unusable_options_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        composed("--", "trainer.nnodes=two", "trainer.total_epoch=1", "critic.shuffle=true", "data.image_key=x")

    assert str(caught.value) == "4 options of verl cannot be used:"
    expected = (
        "critic.shuffle: mini-batches are dealt out",
        "data.image_key: tasks are the recipe's",
        "trainer.nnodes: expected a whole number, got 'two'",
        "unknown verl key 'trainer.total_epoch' (did you mean 'trainer.total_epochs'?)",
    )
    for note, start in zip(caught.value.__notes__, expected, strict=True):
        assert note.startswith(start)


def test_command_prints_each_unusable_option_on_a_line():
    verl = ("critic.shuffle=true", "data.image_key=x")
    result = creditflow("train", TOY, "trainer.device=auto", "--engine", "verl", "--dry-run", "--", *verl)

    assert (result.exit_code, result.stdout) == (2, "")
    *_, head, first, second = result.stderr.splitlines()
    assert head == "error: 2 options of verl cannot be used:"
    assert (first.split(": ")[0], second.split(": ")[0]) == ("  critic.shuffle", "  data.image_key")


def test_option_of_any_type_is_passed_on():
    config = composed("--", "actor_rollout_ref.model.external_lib=mine", "critic.model.external_lib=[a,b]")

    expect(config, "actor_rollout_ref.model.external_lib=mine critic.model.external_lib=[a,b]")


def test_rejected_keys_exist_in_verl():
    defaults = configuration.files("ppo_trainer", ())[1]
    ours = {f"{ROLLOUT}.agent.agent_loop_manager_class"}  # verl reads this key but does not list it
    ours |= {key for key in options.REFUSED if key.startswith(plugin.KEY)}

    assert [key for key in options.REFUSED if key not in defaults and key not in ours] == []
    assert [key for key in options.MICRO_BATCHES if key not in defaults] == []
    sizes = [key for size in options.MICRO_BATCHES.values() for key in (size, f"{size}_per_gpu")]
    sizes += [size.replace("micro_batch_size", "max_token_len_per_gpu") for size in options.MICRO_BATCHES.values()]
    assert [key for key in sizes if key not in defaults] == []


@pytest.mark.parametrize(("refuses", "by_override"), [(ENGINE.configuration, False), (ENGINE.train, True)])
def test_several_trained_policies_need_separate_servers(tmp_path, refuses, by_override):
    """verl's adapter for TensorRT-LLM finds servers by rank, so two policies would share the first one's servers."""
    override = f"{ROLLOUT}.name=trtllm"
    folder = f"trainer.default_local_dir={tmp_path / 'run'}"
    section = () if by_override else (f"verl.{override}",)
    recipe = load_recipe(TOY, ["trainer.device=auto", folder, *SEVERAL, *section])

    with pytest.raises(ConfigError) as caught:
        refuses(recipe, [override] if by_override else [], Reporter())

    message = str(caught.value)
    assert message.startswith(
        f"policies: expected one trained policy with {ROLLOUT}.name=trtllm, got 2 (first, second)"
    )
    assert all(way in message for way in ("policies.<name>.endpoint", "--engine local", "lora_rank"))
    assert not (tmp_path / "run").exists()


def test_rows_beyond_the_micro_batch_limit_are_rejected():
    """verl would fail an assertion during the first update."""
    message = refused("data.max_response_length=900", f"{ACTOR}.ppo_max_token_len_per_gpu=1000")

    assert message.startswith(f"{ACTOR}.ppo_max_token_len_per_gpu: 1000, which a row of ")
    assert "1028 tokens" in message
    for section in (ACTOR, f"{ACTOR}.fsdp_config"):
        ulysses = f"{section}.ulysses_sequence_parallel_size=2"
        composed("data.max_response_length=900", f"{ACTOR}.ppo_max_token_len_per_gpu=600", "--", ulysses)


# Printed configurations


@pytest.mark.parametrize(
    "name",
    mostly_slow(["arithmetic_chain", "gsm8k_team_8xA100", "gsm8k_team_2x8xA100", "dapo_32b"], {"gsm8k_team_2x8xA100"}),
)
def test_dry_run_prints_a_shipped_recipe_without_ray(name, monkeypatch):
    monkeypatch.setattr(ray, "init", lambda *arguments, **options: pytest.fail("Ray was started"))
    before = ray.is_initialized()

    text = ENGINE.configuration(load_recipe(RECIPES / f"{name}.yaml"), [], Reporter())

    assert ray.is_initialized() == before
    assert "${" not in text
    printed = yaml.safe_load(text)
    assert printed["algorithm"]["adv_estimator"] == "grpo"
    assert printed["algorithm"]["gamma"] == printed["algorithm"]["lam"] == 1.0  # per token
    recipe = printed["creditflow"]["recipe"]  # in readable form
    assert printed["actor_rollout_ref"]["rollout"]["response_length"] == recipe["data"]["max_response_length"]
    assert Path(printed["creditflow"]["run_folder"]).is_absolute()


def test_dapo_recipe_has_its_published_settings():
    config = composed(recipe=RECIPES / "dapo_32b.yaml")
    expect(
        config,
        f"{ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28 {ACTOR}.loss_agg_mode=token-mean {ROLLOUT}.n=16 "
        f"{ACTOR}.use_kl_loss=false {ACTOR}.optim.lr=1.0e-6 {ACTOR}.optim.lr_warmup_steps=20 {ROLLOUT}.top_p=1.0 "
        f"data.train_batch_size=512 {ACTOR}.ppo_mini_batch_size=32 {ROLLOUT}.temperature=1.0 "
        f"{ROLLOUT}.prompt_length=2048 {ROLLOUT}.response_length=20480 {ROLLOUT}.val_kwargs.top_p=0.7 "
        f"{ROLLOUT}.val_kwargs.temperature=1.0 algorithm.filter_groups.enable=true algorithm.filter_groups.metric=acc",
    )
    functions = {f.fn: f.args for f in read_run_handle(config).config.reward.functions}
    assert functions == {"math_verify": {}, "overlong": {"max_length": 20480, "cache_length": 4096}}


def test_with_options_does_not_modify_the_recipe():
    recipe = load_recipe(TOY)
    changed = with_options(recipe, {f"{ROLLOUT}.n": 9})

    assert (recipe.config.actor_rollout_ref.rollout.n, changed.config.actor_rollout_ref.rollout.n) == (4, 9)
    assert mapped(changed.config)[f"{ROLLOUT}.n"] == 9
