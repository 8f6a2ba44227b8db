"""Reward functions with the signatures of verl, TRL and verifiers, as their users write them."""

import asyncio
import functools
import re

from creditflow.data import Score

CALLS: list[str] = []


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    CALLS.append(solution_str)
    extra_info["nested"]["seen"] = True
    right = solution_str.strip() == ground_truth
    return {"score": float(right), "acc": right, "pred": solution_str, "turns": extra_info["num_turns"]}


async def compute_score_later(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    await asyncio.sleep(0)
    return min(1.0, float(solution_str == ground_truth) + bonus)


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    return [float(text == truth) for text, truth in zip(solution_strs, ground_truths, strict=True)]


def math_style(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if solution_str == ground_truth else -1.0


def with_router(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    return 0.0


def think_format_reward(completions, **kwargs):
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content, re.DOTALL) else 0.0 for content in contents]


def accuracy_reward(completions, solution, log_extra=None, log_metric=None, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    rewards = [float(text == truth) if truth else None for text, truth in zip(contents, solution, strict=True)]
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_metric("characters", sum(map(len, contents)) / len(contents))
    return rewards


def unique_letters(completions, **kwargs):
    return [min(1.0, len(set(completion)) / 10) for completion in completions]


async def judged(prompts, completions, completion_ids, trainer_state, **kwargs):
    await asyncio.sleep(0)
    assert prompts[0][0]["role"] == "user"
    assert len(prompts) == len(completions) == len(completion_ids) == 1
    return [min(1.0, (len(ids) + trainer_state.global_step) / 10) for ids in completion_ids]


def of_level(completions, level, **kwargs):
    return [1.0 if one == "hard" else None for one in level]


def exact_answer(completion, answer, parser):
    return 1.0 if parser.parse_answer(completion) == answer else 0.0


async def by_state(state, info, task, **kwargs):
    await asyncio.sleep(0)
    assert set(state) >= {"prompt", "completion", "answer", "info", "task", "trajectory"}
    return info["weight"] if task == "test" and state["trajectory"][-1]["completion"] else 0.0


class Upper:
    """A parser of verifiers."""

    def parse_answer(self, completion):
        return completion[-1]["content"].upper()


upper = Upper()


def ambiguous(completions, state):
    return [0.0]


def of_group(completions, states):
    return [0.0] * len(states)


def half_native(trajectory, completion):
    return 0.0


def native_with_option(step, trajectory, state=None):
    return 0.0


def only_by_position(completions, /):
    return [0.0]


def two_rewards(completions, **kwargs):
    return [0.0, 1.0]


def without_score(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}


def values_and_notes(trajectory):
    return [[0.25, 0.75] if step.index % 2 else Score(0.5, reason="ü") for step in trajectory.steps]


def tag_reward(completions, tags, **kwargs):
    """Share of the tags, which a partial binds."""
    return [sum(tag in completion[0]["content"] for tag in tags) / len(tags) for completion in completions]


bound_tag_reward = functools.update_wrapper(functools.partial(tag_reward, tags=("7", "<think>")), tag_reward)
