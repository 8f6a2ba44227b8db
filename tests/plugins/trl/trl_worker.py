"""Trains tiny models with TRL in a separate process: `python trl_worker.py FOLDER`. Prints JSON in its last line."""

import json
import string
import sys
from pathlib import Path

import numpy as np
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from creditflow import credit_options, outcome, reward
from creditflow.credit import assign
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.errors import ConfigError
from creditflow.plugins.trl import CreditGRPOTrainer

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
                of_tokens = advantage.expand(mask.shape)[mask.bool()].tolist()
                self.seen.append([prompt, response, of_tokens])
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
    ours = CreditGRPOTrainer(
        **parts(),
        args=config(**options),
        workflow=alone,
        agents={"writer": ""},
        rewards=[right],
        credit=NEUTRAL,
        **more,
    )
    ours.train()
    theirs = trl.GRPOTrainer(**parts(), args=config(**options), reward_funcs=plain, **more)
    theirs.train()
    return {
        "adapters_only": all("lora_" in name for name, weight in ours.model.named_parameters() if weight.requires_grad),
        "losses": [[row["loss"] for row in one.state.log_history if "loss" in row] for one in (ours, theirs)],
        "norms": [[row["grad_norm"] for row in one.state.log_history if "loss" in row] for one in (ours, theirs)],
        "rewards": [[row["reward"] for row in one.state.log_history if "loss" in row] for one in (ours, theirs)],
        "same_weights": all(map(torch.equal, ours.model.parameters(), theirs.model.parameters())),
    }


def end_of_turn():
    """The responses of a model whose template ends a turn with another token than the tokenizer's end."""
    trained = parts()
    tokenizer = trained["processing_class"]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|user|>{% endfor %}"
    replies = []

    async def recorded(task, team):
        replies.append(await team.writer(task.text))
        return replies[-1]

    trainer = CreditGRPOTrainer(
        **trained, args=config(max_completion_length=64), workflow=recorded, agents={"writer": ""}, rewards=[right],
        credit=NEUTRAL,
    )  # fmt: skip
    trainer.train()
    end = tokenizer.convert_tokens_to_ids("<|user|>")
    return {
        "ends": [end, tokenizer.eos_token_id],
        "responses": [reply.step.response_ids for reply in replies[:16]],
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
    ]
    messages = []
    for case in cases:
        try:
            CreditGRPOTrainer(**parts(), **given | case)
        except ConfigError as error:
            messages.append(str(error))
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


if __name__ == "__main__":
    done = {"steps": train_team(CREDIT, FOLDER / "run"), "tokens": train_team(TOKENS)}
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    done |= {"neutral": train_neutral(), "lora": train_neutral(peft_config=adapters)}
    print(json.dumps({**done, "end_of_turn": end_of_turn(), "refused": refused()}))
