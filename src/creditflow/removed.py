"""Keys, values and commands that were removed before the first release, with their replacements."""

REMOVED: dict[str, str] = {
    "actor_rollout_ref.rollout.branching": "leave it out; `creditflow audit RUN` samples single steps again",
    "actor_rollout_ref.rollout.multi_turn.format": "leave it out; tool calls always have the format hermes",
    "actor_rollout_ref.rollout.overlap": "use verl's asynchronous modes: `-- trainer.v1.trainer_mode=colocate_async`",
    "algorithm.baseline": "leave it out; the baseline is the mean of the group",
    "algorithm.counterfactual_rollouts": "leave it out; `creditflow audit RUN` measures the values of single steps",
    "algorithm.episode_weight": "use `algorithm.propagation: {rule: irc, episode_weight: 0.3}`",
    "algorithm.gate": "leave it out; a gate is open or closed",
    "algorithm.gate_at": "leave it out; a gate acts on the credit that its step passes to its parents",
    "algorithm.gate_unscored": "leave it out; the gate of a step whose scoring failed is open",
    "algorithm.on_closed_gate=neutral": "use `cut`, the default",
    "algorithm.outcome_baseline": "leave it out; the baseline is that of the group",
    "algorithm.outcome_to=auto": "leave it out; `posterior` contains the outcome, others pay it to all steps",
    "algorithm.prefix_features": "leave it out; the baseline is that of the group",
    "algorithm.preset=c3": "use `algorithm.propagation: own`; it had more signal than c3, and no more rollouts",
    "algorithm.preset=istar": "use `algorithm.propagation: own`; it had more signal than istar, and no reward model",
    "algorithm.preset=prime": "use `algorithm.propagation: own`; it had more signal than prime, and no reward model",
    "algorithm.preset=sharp": "use `algorithm.propagation: own`; it had more signal than sharp, and no more rollouts",
    "algorithm.propagation=implicit_step": "use `own`",
    "algorithm.propagation=leave_one_out": "use `own`",
    "algorithm.propagation=replay": "use `own`",
    "algorithm.propagation=shapley": "use `own`",
    "algorithm.score_model": "use `algorithm.propagation: {rule: calibrated, score_weight: fixed}`",
    "algorithm.score_weight": "use `algorithm.propagation: {rule: calibrated, w_m: 0}`",
    "algorithm.share": "leave it out; a step divides its credit evenly among its parents",
    "algorithm.shared_reward": "use `algorithm.propagation: {rule: identical, shared_reward: outcome}`",
    "algorithm.step_weight": "use `algorithm.propagation: {rule: gigpo, step_weight: 1}`",
    "algorithm.sub_reward_origin": "use `algorithm.propagation: {rule: own, sub_reward_origin: 0}`",
    "algorithm.tau": "leave it out; a gate is open or closed",
    "algorithm.value_prior": "use `algorithm.propagation: {rule: gagpo, value_prior: 1}`",
    "algorithm.w_m": "use `algorithm.propagation: {rule: calibrated, w_m: 1}`",
    "algorithm.w_o": "use `algorithm.propagation: {rule: own, w_o: 1}`",
    "algorithm.w_r": "use `algorithm.propagation: {rule: own, w_r: 1}`",
    "argument judge.device": "leave it out; a judge has no model of its own",
    "argument judge.path": "serve it by `vllm serve` and set `endpoint`, or name a frozen policy in `policy`",
    "audit.max_decisions": "leave it out; `audit.max_token_frac` limits the decisions, of which there are at most 256",
    "creditflow calibrate": "compute it with SQL over `creditflow.runs.sql.connect(ledger)`",
    "creditflow diff": "use `creditflow report RUN RUN`; `creditflow recredit` prints how credit moves",
    "creditflow guard": "use `creditflow check`, which validates the rules; a run's `events.jsonl` has their events",
    "creditflow simulate": "use `creditflow compare RECIPE --vary algorithm.propagation=A,B`",
    "creditflow.integrations": "use `creditflow.plugins.trl` or `creditflow.plugins.verifiers.export`",
    "creditflow.rewards.builtin.implicit_process": "use `process_model`, or write a function",
    "creditflow.traces": "use `creditflow.plugins.traces`",
    "critic.central": "use `critic.context: trajectory`; each policy's critic reads all steps of its agents",
    "data.curriculum": "leave it out; list addresses of several levels in `data.train_files`, with a `weight` each",
    "recipe booking": "write a workflow of your own with `topologies.dialogue`",
    "recipe code_team": "use `gsm8k_team` as the example, and `code_tests` as the reward",
    "recipe logic_single": "use `sums_single`, or a workflow of your own on the tasks of `logic_team`",
    "reward.functions.fn=first_ok": "write a function that calls the others, or use `sum`",
    "reward.functions.fn=gate": "write a function that calls the others, or use `sum`",
    "reward.functions.fn=implicit_process": "use `process_model`, or write a function",
    "reward.functions.fn=product": "write a function that calls the others, or use `sum`",
    "template debate": "use `loop`, or `topologies.debate` in its `team.py`",
    "template http": "use `chain`, and call its agents as `examples/frameworks/with_openai.py` does",
    "template planner": "use `router`, or `topologies.planner_executor_verifier` in its `team.py`",
    "tool recall": "write a function of your own",
    "tool search": "write a function of your own",
    "tool store": "write a function of your own",
    "trainer.sequential_ratio_max": "leave it out; every training step updates all policies",
    "trainer.update_schedule": "leave it out; every training step updates all policies",
}
"""Removed name -> advice. A name is a dotted key (`algorithm.tau`), a key with a value
(`algorithm.propagation=replay`), a command (`creditflow diff`), a module that a recipe may name
(`creditflow.integrations`), a shipped recipe (`recipe logic_single`), a ready-made tool, a template
of `creditflow init`, or an argument of a reward function (`argument judge.path`)."""


def removed_hint(key: str, value: object = None) -> str:
    """`; removed in 0.1: <advice>` for a removed key or a removed value of a key; empty for other names."""
    advice = REMOVED.get(key) or REMOVED.get(f"{key}={value}")
    return f"; removed in 0.1: {advice}" if advice else ""
