"""Trains tiny models with TRL in a separate process: `python trl_worker.py FOLDER`. Prints JSON in its last line."""

import dataclasses
import json
import string
import sys
from pathlib import Path
from unittest.mock import AsyncMock

import numpy as np
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from creditflow import credit_options, outcome, reward
from creditflow.credit import assign
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.errors import BatchError, ConfigError
from creditflow.plugins.trl import CreditGRPOTrainer, _expect_tested
from creditflow.rollout import AgentSpec, ChatReply, FrozenModel, Sampling

FOLDER = Path(sys.argv[1])
TASKS = [{"prompt": [{"role": "user", "content": f"say {word}"}], "answer": word} for word in ("a", "bc", "d", "ef")]
CREDIT = credit_options(propagation="threshold", propagation_threshold=0.3, outcome_to="answer", group_by="agent")
TOKENS = credit_options(
    propagation="own", adv_estimator="reinforce_plus_plus", gamma_token=0.5, outcome_to="answer", group_by="agent"
)
NEUTRAL = credit_options(propagation="identical", reward_decomp=False, group_by="task", norm_adv_by_std_in_grpo=False)


def share_of_letters(text):
    return round(4 * sum(c in string.ascii_letters for c in text) / max(len(text), 1)) / 4


async def team(task, team):
    text = await team.writer(task.text)
    for _ in range(1 + len(task.ground_truth) + (share_of_letters(text) > 0)):  # trajectories differ in length
        text = await team.critic(f"{task.text}: {text}")
    return text


async def alone(task, team):
    return await team.writer(task.text)


@reward(agent_match="critic|writer")
def letters(step, trajectory):
    return share_of_letters(step.response)


@reward
def letters_of_turn(step, trajectory):
    return share_of_letters(step.response)


@outcome
def right(trajectory):
    return share_of_letters(trajectory.answer)


def parts():
    folder = tiny_byte_model()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {
        "model": model,
        "processing_class": AutoTokenizer.from_pretrained(folder),
        "train_dataset": Dataset.from_list(TASKS),
    }


def config(**options):
    options = {"max_completion_length": 6, **options}
    return trl.GRPOConfig(
        output_dir=str(FOLDER / "trl"), use_cpu=True, bf16=False, max_steps=2, per_device_train_batch_size=8,
        gradient_accumulation_steps=2, num_generations=4, learning_rate=1e-2,
        gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
        seed=3, **options,
    )  # fmt: skip


class Spy(CreditGRPOTrainer):
    """Keeps the assignments, and the rows and advantages in TRL's loss."""

    def __init__(self, *given, **named):
        self.batches, self.seen, self.fillers = [], [], 0
        super().__init__(*given, **named)

    def assign_credit(self, batch):
        self.batches.append(batch)
        return super().assign_credit(batch)

    def _compute_loss(self, model, inputs):
        for i, advantage in enumerate(inputs["advantages"]):
            prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
            response = inputs["completion_ids"][i][inputs["completion_mask"][i].bool()].tolist()
            mask = (inputs["completion_mask"] * inputs["tool_mask"])[i]
            if mask.sum() == 0:
                self.fillers += 1
            else:
                sampled = mask.nonzero().flatten().tolist()
                self.seen.append([prompt, response[: sampled[-1] + 1], advantage[sampled].tolist()])
        return super()._compute_loss(model, inputs)


def expected(batch, options):
    """The rows that TRL must see, from the same trajectories."""
    made = assign(batch, options)
    advantage_T = made.token_advantages().astype(np.float32)
    return [
        [
            batch.prompt_ids[batch.prompt_offsets[s] : batch.prompt_offsets[s + 1]].tolist(),
            batch.response_ids[batch.token_offsets[s] : batch.token_offsets[s + 1]].tolist(),
            advantage_T[batch.token_offsets[s] : batch.token_offsets[s + 1]].tolist(),
        ]
        for s in np.flatnonzero(made.groups.trained_S)
    ]


def train_team(options, folder=None):
    trainer = Spy(
        **parts(), args=config(), workflow=team, agents={"writer": "Write.", "critic": "Judge."},
        rewards=[letters, right], credit=options, run_folder=folder,
    )  # fmt: skip
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    return {
        "seen": sorted(trainer.seen),
        "expected": sorted(row for batch in trainer.batches for row in expected(batch, options)),
        "fillers": trainer.fillers,
        "moved": not all(map(torch.equal, before, trainer.model.parameters())),
        "log": trainer.state.log_history[0],
        "outcome": float(trainer.batches[0].outcome.mean()),
    }


def train_neutral(**more):
    def plain(completions, **_):
        return [share_of_letters(completion[0]["content"]) for completion in completions]

    options = {"scale_rewards": "none", "beta": 0.1}
    made = {"workflow": alone, "agents": {"writer": ""}, "rewards": [right], "credit": NEUTRAL}
    return compared(
        lambda: CreditGRPOTrainer(**parts(), args=config(**options), **made, **more),
        lambda: trl.GRPOTrainer(**parts(), args=config(**options), reward_funcs=plain, **more),
    )


def compared(*makers):
    """Train our trainer and TRL's; their losses, gradients, rewards and weights."""
    trainers, logs = [], []
    for make in makers:
        trainers.append(make())
        trainers[-1].train()
        logs.append([row for row in trainers[-1].state.log_history if "loss" in row])
    ours, theirs = (trainer.model for trainer in trainers)
    return {
        "adapters_only": all("lora_" in name for name, weight in ours.named_parameters() if weight.requires_grad),
        "losses": [[row["loss"] for row in log] for log in logs],
        "norms": [[row["grad_norm"] for row in log] for log in logs],
        "rewards": [[row["reward"] for row in log if "reward" in row] for log in logs],
        "same_weights": all(map(torch.equal, ours.parameters(), theirs.parameters())),
    }


TOOL_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{{ c.function.arguments }}{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = {  # every lower-case letter of a response is a call of `look`
    "type": "array",
    "x-regex-iterator": "([a-z])",
    "items": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "properties": {
                    "name": {"const": "look"},
                    "arguments": {"type": "object", "properties": {"letter": {"type": "string"}}},
                },
            },
        },
    },
}


def look(letter: str) -> str:
    """Look around.

    Args:
        letter: The thing to look at.
    """
    return f"{letter}!"


SAID = []
"""Number of the model's messages in each completion of the last batch."""


def length(completions, **_):
    """One unknown reward in each batch; all others are up to 2."""
    SAID[:] = [sum(message["role"] == "assistant" for message in messages) for messages in completions]
    rewards = [min(len(completion), 4) / 2 for completion in completions]
    return [None, *rewards[1:]]


class Meadow:
    def reset(self, **row):
        self.looks = 0
        return " there"

    def look(self, letter: str) -> str:
        """Look around.

        Args:
            letter: The thing to look at.
        """
        self.looks += 1
        return look(letter)

    def get_reward(self):
        return min(self.looks, 4) / 4


def turn_parts(limits=None, **more):
    """Arguments for rollouts of TRL with turns that end soon and call tools often."""
    given = parts() | more
    tokenizer = given["processing_class"]
    given["model"].generation_config.eos_token_id = [*range(24), tokenizer.eos_token_id]
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_schema = {
        "type": "object",
        "properties": {"role": {"const": "assistant"}, "content": {"type": "string"}, "tool_calls": CALLS},
    }
    limits = {"max_completion_length": 64, "max_tool_calling_iterations": 3, **(limits or {})}
    return given | {"args": config(scale_rewards="none", num_iterations=2, **limits)}


def train_turns():
    """Credit per turn, with scores of turns and TRL's reward as the outcome."""
    trainer = Spy(
        **turn_parts(tools=[look], reward_funcs=[length]),
        rewards=[letters_of_turn],
        credit=CREDIT,
        outcome_range=(0, 2),
    )
    trainer.train()
    batch = trainer.batches[-1]
    return {
        "seen": sorted(trainer.seen),
        "expected": 2 * [row for batch in trainer.batches for row in expected_turns(batch, CREDIT)],
        "turns": np.bincount(batch.trajectory_of_step).tolist(),
        "said": SAID,
        "outcomes": [None if np.isnan(value) else value for value in batch.outcome.tolist()],
    }


def expected_turns(batch, options):
    """The rows that TRL must see, each with the advantages of its turns."""
    rows = {}
    for s, (prompt, response, advantages) in zip(
        np.flatnonzero(assign(batch, options).groups.trained_S), expected(batch, options), strict=True
    ):
        first, _, before = rows.setdefault(int(batch.trajectory_of_step[s]), (prompt, [], []))
        rows[int(batch.trajectory_of_step[s])] = [first, (prompt + response)[len(first) :], before + advantages]
    return list(rows.values())


def train_left_out():
    """Rollouts without a reward, and cut ones, which credit leaves out; the means of groups here are NumPy's."""

    def some(completions, **_):
        return [None if i % 4 == 1 else share_of_letters(each[0]["content"]) for i, each in enumerate(completions)]

    trained = parts()
    ends = trained["model"].generation_config.eos_token_id = [*range(48), trained["processing_class"].eos_token_id]
    credit = dataclasses.replace(NEUTRAL, mask_truncated=True)
    trainer = Spy(**trained, args=config(max_completion_length=12), reward_funcs=[some], credit=credit)
    trainer.train()
    expected_rows = []
    for batch in trainer.batches:
        responses = [ids.tolist() for ids in np.split(batch.response_ids, batch.token_offsets[1:-1])]
        complete = np.array([ids[-1] in ends for ids in responses])
        kept = np.where(complete & (np.arange(len(responses)) % 4 != 1), batch.outcome, np.nan).reshape(-1, 4)
        advantages = (kept - np.nanmean(kept, axis=1, keepdims=True)).ravel().tolist()
        expected_rows += [[ids, a] for ids, a in zip(responses, advantages, strict=True) if not np.isnan(a)]
    seen = sorted([ids, advantages[0]] for _, ids, advantages in trainer.seen)
    return {"seen": seen, "expected": sorted(expected_rows)}


def train_neutral_turns(**limits):
    """One credit for all turns, beside TRL's own training in the same environment."""
    return compared(
        lambda: CreditGRPOTrainer(**turn_parts(limits, environment_factory=Meadow), credit=NEUTRAL),
        lambda: trl.GRPOTrainer(**turn_parts(limits, environment_factory=Meadow)),
    )


def end_of_turn():
    """The responses of a model whose template ends a turn with another token than the tokenizer's end."""
    trained = parts()
    tokenizer = trained["processing_class"]
    tokenizer.chat_template = "{% for m in messages %}{{ mark }}{{ m.content }}<|user|>{% endfor %}"
    replies, judge = [], AsyncMock(FrozenModel, **{"chat.return_value": ChatReply("yes", "stop")})

    async def recorded(task, team):
        replies.append(await team.writer(task.text))
        await team.judge(replies[-1])
        return replies[-1]

    trainer = CreditGRPOTrainer(
        **trained, workflow=recorded, rewards=[right], credit=NEUTRAL,
        args=config(max_completion_length=64, chat_template_kwargs={"mark": "!"}),
        agents={"writer": "", "judge": AgentSpec(policy="judge")}, frozen={"judge": judge},
    )  # fmt: skip
    trainer.train()
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    return {
        "prompt": replies[0].step.prompt,
        "ends": [end, tokenizer.eos_token_id],
        "responses": [reply.step.response_ids for reply in replies[:16]],
        "judged": [judge.chat.await_count, judge.aclose.await_count],
        "clipped": trainer.state.log_history[0]["completions/clipped_ratio"],
    }


def refused():
    """The messages for unsupported options."""
    given = {"workflow": alone, "agents": {"writer": ""}, "rewards": [right]}
    cases = [
        {"args": config(loss_type="grpo")},
        {"args": config(), "credit": credit_options(adv_estimator="gae")},
        {"args": config(), "reward_funcs": [right]},
        {"args": config(), "rewards": [right, right]},
        {"args": config(), "workflow": None, "reward_funcs": [length]},
        {"args": config(max_completion_length=1 << 20)},
        {"args": config(), "sampling": Sampling(max_tokens=7)},
        {"args": config(), "rewards": []},
        {"args": config(), "credit": credit_options(propagation={"rule": "threshold", "theta": {"kind": "tuned"}})},
        {"args": config(), "outcome_range": (0, 2)},
        {"args": config(), "workflow": None, "agents": None, "outcome_range": (0, 1, 2)},
        {
            "args": config(),
            "workflow": None,
            "agents": None,
            "reward_funcs": [lambda completions, **_: [1.1] * len(completions)],
        },
    ]
    messages = []
    for case in cases:
        try:
            CreditGRPOTrainer(**parts(), **given | case).train()
        except (ConfigError, BatchError) as error:
            messages.append(str(error))
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


def changed():
    """The message for a TRL with another loss."""
    file = FOLDER / "other" / "trainer" / "grpo_trainer.py"
    file.parent.mkdir(parents=True)
    text = Path(trl.__file__).parent.joinpath("trainer", "grpo_trainer.py").read_text()
    file.write_text(text.replace("    def _compute_loss", "\n    def _compute_loss"))  # blank lines do not count
    _expect_tested(FOLDER / "other")
    file.write_text(text.replace("advantages = inputs[", "advantages = -inputs["))
    try:
        _expect_tested(FOLDER / "other")
    except ConfigError as error:
        return str(error)


if __name__ == "__main__":
    done = {"steps": train_team(CREDIT, FOLDER / "run"), "tokens": train_team(TOKENS)}
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    done |= {
        "turns": train_turns(),
        "neutral_turns": train_neutral_turns(),
        "changed": changed(),
        "left_out": train_left_out(),
    }
    done["cut_turns"] = train_neutral_turns(max_completion_length=9, mask_truncated_completions=True)
    done |= {"neutral": train_neutral(), "lora": train_neutral(peft_config=adapters)}
    print(json.dumps({**done, "end_of_turn": end_of_turn(), "refused": refused()}))
