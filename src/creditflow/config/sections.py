"""The sections of a recipe, in its order; `algorithm` and `guard` have separate modules."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from creditflow._utils.sections import FromMapping, PolicySource, Section, Share, Text, expected
from creditflow.config.plugins import extensible
from creditflow.rewards.entries import RewardFunctionConfig

# ---- data ------------------------------------------------------------------------------------------------------------

_Files = Annotated[
    Text | list[Text] | None,
    expected("a path, a list of paths, file.py:function, or an address such as reasoning-gym://..."),
]


class DataConfig(Section):
    """Data sets, batch sizes and length limits."""

    train_files: _Files = None
    """One path or a list, with verl's columns: `.parquet` or `.jsonl` files, or folders of them or of
    Hugging Face's `save_to_disk`. Or `file.py:function` that makes the tasks, or `reasoning-gym://family?option=value`
    (a list of these may have `weight=`), or the address of a plug-in's tasks. Default: the address in `team.workflow`,
    if it has tasks."""
    val_files: _Files = None
    """The same, for evaluation. Default: `data.train_files`, of which a function may return other tasks for split=val,
    and a folder may have a validation or test split."""
    train_batch_size: PositiveInt = 16
    """Tasks per training step, each with `actor_rollout_ref.rollout.n` rollouts."""
    val_max_samples: Annotated[Literal[-1] | PositiveInt, expected("1 or more, or -1 for all")] = -1
    """Number of tasks to evaluate on, from the first; -1: all."""
    max_prompt_length: PositiveInt = 1024
    """Tokens; a longer prompt ends its trajectory as `truncated`."""
    max_response_length: PositiveInt = 512
    """Tokens per step; a response that reaches it is `truncated`."""
    shuffle: bool = True
    """Draw the tasks of each epoch in a random order."""
    seed: NonNegativeInt = 0
    """Seed of the run; it determines the order of the data and the rollouts."""


# ---- actor_rollout_ref and critic: models, adapters, optimizers ------------------------------------------------------

_NAMES = "names of modules, or all-linear"
TargetModules = Annotated[Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)], expected(_NAMES)]
LayerIndices = Annotated[Annotated[list[NonNegativeInt], Field(min_length=1)] | None, expected("numbers of layers")]
ModelPath = Annotated[
    str | None, expected("a Hugging Face folder, a GGUF file, a hub name, tiny, smollm2 or file.py:function")
]
LossAggMode = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "traj-mean-step-mean",
]
LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)
SUM_NORM = "seq-mean-token-sum-norm"
"""The mode that divides by `loss_scale_factor`."""


class LoraConfig(Section):
    """An adapter."""

    lora_rank: NonNegativeInt = 0
    """Rank of the LoRA adapter; only the adapter is trained. 0: train all weights."""
    lora_alpha: PositiveInt = 16
    """The adapter's output is scaled by lora_alpha / lora_rank."""
    target_modules: TargetModules = "all-linear"
    """The modules with an adapter: a list of names as in peft, or `all-linear`, all linear layers but the last."""
    layers_to_transform: LayerIndices = None
    """Indices of the layers with an adapter, from 0; default: all."""


class ModelConfig(Section):
    """The model of a policy or of the critic."""

    path: ModelPath = None
    """A Hugging Face folder; a GGUF file; a name in the local Hugging Face cache; `tiny`: a byte-level model made on
    the spot; `smollm2`: SmolLM2-135M-Instruct (extra `smollm2`); or `file.py:function` that makes a folder."""


class ActorModelConfig(LoraConfig, ModelConfig):
    """The default model of all policies, and how it is trained."""

    enable_gradient_checkpointing: bool | None = None
    """Keep only each layer's input and compute the rest again for the gradient: less memory, more work in an update.
    Default: false; with `--engine verl`, verl's own default, true."""


_Beta = Annotated[float, Field(ge=0, lt=1)]
_Betas = Annotated[list[_Beta], Field(min_length=2, max_length=2), expected("two numbers in [0, 1)")]


class OptimConfig(Section):
    """AdamW, as in torch."""

    lr: PositiveFloat = 1e-6
    """Learning rate."""
    lr_warmup_steps: NonNegativeInt = 0
    """Updates over which the learning rate rises linearly from 0. A training step counts as many as a whole batch has,
    even if dynamic sampling leaves fewer."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """Schedule after the warm-up: `constant`, or half a `cosine` that reaches 0 when the run ends. It follows training
    steps, so updates that do not happen do not delay it."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    betas: _Betas = Field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the two running means."""


# ---- actor_rollout_ref and critic: updates ---------------------------------------------------------------------------

KLLossType = Literal["k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl"]


class PolicyLossConfig(Section):
    """The policy loss, under verl's names."""

    loss_mode: Literal["vanilla", "gspo", "cispo"] = "vanilla"
    """`vanilla`: PPO's clipped surrogate of each token. `gspo`: the ratio of the whole response, the geometric mean of
    its tokens' ratios, in place of each token's (Zheng et al. 2025, arXiv 2507.18071; the paper clips at 3e-4 below and
    4e-4 above, with `seq-mean-token-mean`). `cispo`: the log-prob, weighted by the clipped ratio as a constant (MiniMax
    2025, arXiv 2506.13585). Only `vanilla` has the dual clip."""


class UpdateConfig(Section):
    """How a model is updated."""

    optim: OptimConfig = OptimConfig()
    ppo_epochs: PositiveInt = 1
    """Passes over a batch."""
    loss_agg_mode: LossAggMode = "token-mean"
    """`token-mean`, `seq-mean-token-mean`, `seq-mean-token-sum`, `seq-mean-token-sum-norm` (a sequence is one step's
    response) or `traj-mean-step-mean`."""
    loss_scale_factor: PositiveInt | None = None
    """Divisor of `seq-mean-token-sum-norm`; default: `data.max_response_length`, as in verl."""
    grad_clip: PositiveFloat = 1.0
    """Upper limit of the gradient's norm."""


class ActorConfig(UpdateConfig):
    """How the policy is updated."""

    ppo_mini_batch_size: PositiveInt = 8
    """Tasks per optimizer update; default: 8, or `data.train_batch_size` if that is smaller."""
    ppo_max_token_len_per_gpu: PositiveInt | None = None
    """Tokens of one micro-batch. Default: derived from the model and the machine's memory, at most 16384; with
    `--engine verl`, verl's own default."""
    clip_ratio: NonNegativeFloat = 0.2
    """How far the probability ratio may move from 1 before its loss is clipped."""
    clip_ratio_low: NonNegativeFloat | None = None
    """The same, below 1; default: `clip_ratio`."""
    clip_ratio_high: NonNegativeFloat | None = None
    """The same, above 1; default: `clip_ratio`."""
    clip_ratio_c: Annotated[float, Field(gt=1), expected("more than 1")] = 3.0
    """Dual clip: upper limit of the ratio in the loss of tokens with negative advantage."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    entropy_coeff: NonNegativeFloat = 0.0
    """Coefficient of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the divergence from the reference model to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Coefficient of that divergence."""
    kl_loss_type: KLLossType = "low_var_kl"
    """`k1` (or `kl`), `abs`, `k2` (`mse`) or `k3` (`low_var_kl`), as in verl."""


class CriticConfig(UpdateConfig):
    """The value model of an estimator with a critic (`algorithm.adv_estimator: gae`), and how it is updated.

    The critic uses the actor's mini-batches.
    """

    model: ModelConfig = ModelConfig()
    """Default: the policy's model, with a new head that predicts 0."""
    context: Literal["step", "trajectory"] = "step"
    """Input of the value model. `step`: the agent's own prompt; `trajectory`: all prompts and responses of the policy's
    agents in the trajectory so far (a centralised critic; Yu et al. 2022, arXiv 2103.01955). Acting needs no critic, so
    the agents' inputs stay the same."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    ppo_max_token_len_per_gpu: PositiveInt | None = None
    """Tokens of one micro-batch. Default: derived as the actor's, at most 32768."""
    cliprange_value: PositiveFloat = 0.5
    """How far a value may move in one training step before its loss is clipped."""


# ---- actor_rollout_ref: rollouts -------------------------------------------------------------------------------------


class ValKwargs(Section):
    """How an evaluation samples."""

    n: PositiveInt = 1
    """Rollouts per validation task."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0: greedy."""
    do_sample: bool = True
    """Evaluate by sampling. A greedy pass (`*_greedy`) is always reported as well."""


class MultiTurnConfig(Section):
    """Turns of an agent with tools, within one step."""

    max_assistant_turns: PositiveInt = 8
    """Maximum number of the agent's turns."""
    max_parallel_calls: PositiveInt = 4
    """Tool calls in one turn; further calls are refused."""
    max_tool_response_length: PositiveInt = 2048
    """Characters of a tool's result; a longer result keeps its beginning and end."""


class RolloutConfig(Section):
    """How rollouts are sampled."""

    name: Literal["local", "vllm"] = "local"
    """The embedded engine's sampler: `local`, the built-in one, or `vllm`, a process of vLLM in an environment of its
    own (`make vllm`) for each policy. `--engine verl` reads `verl.actor_rollout_ref.rollout.name` instead."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """With `name: vllm`: `vllm`, a mapping of vLLM's engine options (`max_model_len`, `kv_cache_memory_bytes`, `dtype`,
    `enforce_eager`, ...) and of two more. `python`: the Python of the environment with vLLM; default:
    `.venv/vllm/bin/python`, or this one if vLLM is installed in it. `start_timeout_s`: default 900."""
    n: PositiveInt = 8
    """Rollouts per task."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    max_num_seqs: PositiveInt = 1024
    """Maximum number of calls in one batch of generation."""
    max_failed_frac: Share = 0.5
    """Stop if a larger share of rollouts fails: the rest would be a biased sample."""
    timeout_s: PositiveFloat = 600.0
    """Seconds for one rollout; time in the run's own sampler does not count. A longer rollout is cancelled."""
    timeout_outcome: Literal["mask", "zero"] = "mask"
    """`mask`: the trajectory is `failed` and left out of training. `zero`: it gets the worst outcome, by default 0."""
    min_complete_frac: Annotated[float, Field(gt=0, le=1), expected("a share above 0 and at most 1")] = 1.0
    """Train as soon as this share of a batch's groups is complete. The others join the next batch, with the versions
    that sampled them, so batches differ in size. Below 1 needs `--engine verl` with an asynchronous trainer mode."""
    val_kwargs: ValKwargs = ValKwargs()
    multi_turn: MultiTurnConfig = MultiTurnConfig()


class ActorRolloutRefConfig(Section):
    """Model, update and rollout, together as in verl."""

    model: ActorModelConfig = ActorModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()


# ---- reward ----------------------------------------------------------------------------------------------------------


class RewardConfig(Section):
    """Reward functions, where they run, and how many of their scores may fail."""

    functions: list[Annotated[RewardFunctionConfig, FromMapping()]] = Field(default_factory=list)
    """The reward functions. Default for the address of a plug-in's workflow: its own, such as a rubric."""
    max_failed_frac: Share = 0.2
    """Stop if a larger share of the scores of one function fails."""
    backend: Literal["process", "ray", "inline"] = "process"
    """Execution of functions: `process`, worker processes of this machine; `ray`, Ray actors (`ray_kwargs.ray_init`);
    `inline`, this process, without time-outs, for a debugger."""
    num_workers: PositiveInt | None = None
    """Worker processes, or Ray actors; default: one per core, at most eight."""
    timeout: PositiveFloat = 60.0
    """Seconds for one call of a function without its own `timeout`."""
    max_in_flight: PositiveInt = 256
    """Maximum number of pending calls of async functions."""
    cache_size: NonNegativeInt = 1_000_000
    """Size of the cache of function results, in numbers; keyed by function and inputs. A result of one number takes
    eleven. 0: no cache."""
    sandbox: dict[str, Any] = Field(default_factory=dict)
    """Sandbox for untrusted code: `backend` and its options (`creditflow.sandbox`), for every function with a
    `sandbox` argument."""
    decomp_granularity: Literal["trajectory", "agent", "step", "token_level"] | None = None
    """`trajectory` (outcome only), `agent`, `step` (default) or `token_level`: the same as
    `algorithm.decomp_granularity`; contradicting it is an error."""


# ---- team and policies -----------------------------------------------------------------------------------------------

DEFAULT_POLICY = "default"
"""The policy of agents that name none, and the only policy of a recipe without `policies`."""


class EndpointConfig(Section):
    """An OpenAI-compatible server with a frozen model. A plain string is read as the `base_url`."""

    base_url: str = ""
    """Such as http://127.0.0.1:8000/v1."""
    model: Text | None = None
    """The server's name for the model; default: the policy's `model.path`."""
    api_key_env: str | None = None
    """The environment variable that holds the key, never the key itself; without it, the key sent is `none`."""
    timeout: PositiveFloat = 120.0
    """Seconds for one attempt."""
    max_retries: NonNegativeInt = 6
    """Retries after 5xx, broken connections and time-outs. Rate limits (429) do not count."""
    give_up_after: PositiveFloat = 600.0
    """Seconds since the call after which no attempt begins; also the longest wait for rate limits."""
    max_in_flight: PositiveInt = 256
    """Concurrent requests of each rollout process."""
    headers: dict[str, Text] = Field(default_factory=dict)
    """Sent with every request; must not hold API keys."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Extra fields of every request (`top_p`, `chat_template_kwargs`). They override creditflow's own (`max_tokens`,
    `temperature`, `seed`); null removes a field."""


@extensible("policies")
class PolicyConfig(Section):
    """A model that agents act through."""

    model: ModelConfig = ModelConfig()
    """Default: `actor_rollout_ref.model`."""
    lora_rank: NonNegativeInt | None = None
    """Default: `actor_rollout_ref.model.lora_rank`. All policies share the other adapter options of that section."""
    optim: dict[str, Any] = Field(default_factory=dict)
    """Overrides of `actor_rollout_ref.actor.optim` for this policy."""
    trainable: bool | None = None
    """Default: true; false for a model behind an endpoint, and for a policy that a plug-in provides."""
    endpoint: EndpointConfig | None = None
    """The server of a remote model. A policy with an endpoint is frozen: its responses cannot be trained on."""

    @property
    def source(self) -> tuple[str, PolicySource] | None:
        """The key and the section of the plug-in that provides the policy; None for a model or an endpoint."""
        return next(((key, section) for key, section in self if isinstance(section, PolicySource)), None)

    @property
    def trained(self) -> bool:
        """`trainable`, or its default."""
        return self.endpoint is None and self.source is None if self.trainable is None else self.trainable


class AgentConfig(Section):
    """One agent."""

    system: Text = ""
    """System prompt."""
    policy: Text = DEFAULT_POLICY
    """The name of the agent's policy in `policies`."""
    match: Text = ""
    """Regular expression. An HTTP call without another sign of its agent belongs to this agent if its system prompt
    matches. If no agent's `match` fits, it belongs to the agent with the longest `system` in the prompt."""
    tools: list[Any] = Field(default_factory=list)
    """The agent's tools: names of `creditflow.rollout.toolbox`, `file.py:function`, or `{fn, name, args, timeout}`."""


class TeamConfig(Section):
    """The agents and their workflow."""

    workflow: Annotated[str, expected("package.module:function, file.py:function or scheme://...")] = ""
    """`package.module:function` or `file.py:function`; or the address of a plug-in's workflow, such as
    `verifiers://taskset?option=value`."""
    agents: dict[str, AgentConfig] = Field(default_factory=dict)
    """The agents by name. Default for the address of a plug-in: its own, such as the roles of an environment."""
    ignored_fields: list[Text] = Field(default_factory=list)
    """Fields to ignore in HTTP calls. They would change sampling and are refused by default (`response_format`,
    `tool_choice`, `top_p`). A step's `info["ignored"]` lists the ignored fields of its call."""


# ---- trainer, audit and ray_kwargs -----------------------------------------------------------------------------------

Precision = Literal["auto", "float32", "bfloat16"]


class TrainerConfig(Section):
    """Length of the run, hardware, logging and checkpoints."""

    total_training_steps: NonNegativeInt | None = None
    """Default: the number of steps in `total_epochs` passes over the data."""
    total_epochs: PositiveInt = 1
    """Passes over the data."""
    logger: list[Text] = Field(default_factory=lambda: ["console"])
    """Metrics trackers, in addition to the run's metrics.jsonl, which is always written: names from
    docs/reference/metrics.md."""
    project_name: Text = "creditflow"
    """The project, or experiment, of the run in trackers."""
    experiment_name: Text | None = None
    """The run's name in trackers; default: the name of its folder."""
    default_local_dir: Text | None = None
    """The run's folder; default `runs/<recipe>-<time>`."""
    val_before_train: bool = True
    """Evaluate before the first training step."""
    test_freq: int = -1
    """Evaluate every `test_freq` training steps; -1: only at the end."""
    test_delay: NonNegativeInt = 0
    """Training steps at the beginning without an evaluation by `test_freq`."""
    save_freq: int = -1
    """Write a checkpoint every `save_freq` training steps; -1: only at the end."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """If `default_local_dir` already holds a run: `auto` resumes it from its newest complete checkpoint, `disable` is
    an error, `resume_path` resumes it from `resume_from_path`."""
    resume_from_path: Text | None = None
    """A checkpoint of the run in `default_local_dir`; sets the default of `resume_mode` to `resume_path`. Options may
    differ from those of the interrupted run."""
    max_actor_ckpt_to_keep: PositiveInt | None = None
    """Number of newest checkpoints to keep; default: all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`, `cpu` or `cuda`."""
    precision: Precision = "auto"
    """Precision of matrix products in sampling and updates; weights stay float32. `auto`: bfloat16 on CUDA, float32 on
    the CPU."""
    num_threads: NonNegativeInt = 0
    """torch threads; 0: torch's own choice."""
    critic_warmup: NonNegativeInt = 0
    """Training steps at the beginning in which only the critic is trained."""


class AuditConfig(Section):
    """Measurements of how faithful credit is, by continuing recorded trajectories from single decisions."""

    every: NonNegativeInt = 0
    """Training steps between two measurements; 0: never. Embedded engine only."""
    max_token_frac: Annotated[float, Field(gt=0, le=1), expected("a share above 0 and at most 1")] = 0.05
    """Largest share of the run's generated tokens that measurements may use. Each one chooses as many decisions as the
    unused part allows."""
    continuations: Annotated[int, Field(ge=2), expected("a whole number of at least 2")] = 4
    """Continuations with a decision kept, and as many with the decision sampled anew. Fewer than 4 give no noise
    ceiling."""


class RayConfig(Section):
    """Connection to Ray."""

    ray_init: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `ray.init`: `address` joins a cluster; without it, a private Ray starts on this machine."""
