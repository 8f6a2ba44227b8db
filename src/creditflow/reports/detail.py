"""JSON of a trajectory's graph and of a step with the terms of its advantage. Computes no credit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from creditflow._utils.files import json_ready
from creditflow.credit import Assignment, explain
from creditflow.credit.records import NOTHING, UNKNOWN
from creditflow.data import TRAJECTORY_STATUSES, TrajectoryBatch
from creditflow.errors import UnknownIdError
from creditflow.reports.index import policies_of
from creditflow.reports.text import SHOWN, cut
from creditflow.reports.why import first_error, is_trained, terms, tree
from creditflow.rollout.chat import pieces
from creditflow.runs import Ledger, Recorded

Pieces = Callable[[Sequence[int]], list[str]]
"""Maps token ids to the text of each token; joined, the texts are the response."""
_TOKENS = 4_000
_TEXT, _SHORT = 4_000_000, 400
"""Maximum characters of the texts of one trajectory; each text may have 400."""


def trajectory_graph(recorded: Recorded, trajectory_id: str) -> dict[str, Any]:
    """The graph of a trajectory: nodes are steps with their texts and scores, edges lead from parents.

    `flow` is the credit received along an edge.

    Raises UnknownIdError if the training step has no such trajectory.
    """
    batch, a = recorded.batch, recorded.assignment
    n = _place(batch.trajectory_ids, trajectory_id, "trajectory", recorded.step)
    at = np.flatnonzero(batch.trajectory_of_step == n)
    wrong = first_error(a, batch, at.tolist())
    score = batch.outcome_scores[n]
    longest = max(_SHORT, min(SHOWN, _TEXT // (2 * max(1, at.size))))
    return {
        "training_step": recorded.step,
        "trajectory_id": trajectory_id,
        "task": cut(batch.tasks[n].text),
        "ground_truth": cut(str(batch.tasks[n].ground_truth)),
        "answer": None if batch.answers[n] is None else cut(str(batch.answers[n])),
        "outcome": None if score is None or score.status != "ok" else score.value,
        "outcome_range": None if score is None else score.range,
        "outcome_said": "not scored" if score is None else f"{score.status} {score.reason}".strip(),
        "outcomes": {
            agent: own.value if own.status == "ok" else f"{own.status} {own.reason}".strip()
            for agent, own in (batch.outcomes_of_agents[n] if batch.outcomes_of_agents else {}).items()
        },
        "status": TRAJECTORY_STATUSES[batch.status_of_trajectory[n]],
        "steps": [_node(batch, a, s, longest) | {"first_error": s == wrong} for s in at.tolist()],
        "edges": _edges(batch, a, int(at[0]), int(at[-1]) + 1) if at.size else [],
    }


def _place(ids: Sequence[str], id: str, kind: str, training_step: int) -> int:
    if id not in ids:
        raise UnknownIdError(f"there is no {kind} {id!r} in training step {training_step}")
    return ids.index(id)


def _node(batch: TrajectoryBatch, a: Assignment | None, s: int, longest: int) -> dict[str, Any]:
    node: dict[str, Any] = {
        "id": batch.step_ids[s],
        "index": int(batch.index_of_step[s]),
        "agent": batch.agent_names[batch.agent_of_step[s]],
        "prompt": cut(batch.prompts[s], longest),
        "response": cut(batch.responses[s], longest),
        "scores": [
            {
                "name": name,
                "value": None if score.status != "ok" or isinstance(score.value, tuple) else score.value,
                "range": score.range,
                "by_token": isinstance(score.value, tuple),
                "status": score.status,
                "reason": cut(score.reason, 500),
                "weight": score.weight,
            }
            for name, score in batch.raw_scores[s].items()
        ],
    }
    if a is not None:
        node |= {
            "sub_reward": float(a.rewards.sub_reward_S[s]) if a.rewards.scored_S[s] else None,
            "failed": bool(a.rewards.failed_S[s]),
            "gate_open": None if a.credit.gate_open_S is None else bool(a.credit.gate_open_S[s]),
            "threshold": None if a.credit.threshold_S is None else float(a.credit.threshold_S[s]),
            "trained": bool(is_trained(a)[s]),
            "credit": float(a.credit.total_S[s]),
            "advantage": float(a.advantage.advantage_S[s]),
        }
    return dict(json_ready(node))


def _edges(batch: TrajectoryBatch, a: Assignment | None, start: int, stop: int) -> list[dict[str, Any]]:
    first, last = np.searchsorted(batch.edge_child, (start, stop))
    child_E, parent_E = batch.edge_child[first:last], batch.edge_parent[first:last]
    flow_E = None if a is None else _flow(batch, a, child_E)
    gate_S = None if a is None else a.credit.gate_S
    open_E = np.ones(len(child_E)) if gate_S is None else gate_S[child_E]
    return [
        {
            "parent": int(parent - start),
            "child": int(child - start),
            "flow": None if flow_E is None else float(flow_E[e]),
            "open": float(open_E[e]),
        }
        for e, (parent, child) in enumerate(zip(parent_E, child_E, strict=True))
    ]


def _flow(batch: TrajectoryBatch, a: Assignment, child_E: Any) -> Any:
    """Credit that flows back along each edge, by docs/concepts/credit.md; None if the rule's flow is unknown."""
    flow, gate_S = a.options.propagation.flow, a.credit.gate_S
    if flow == NOTHING:
        return np.zeros(len(child_E))
    if flow == UNKNOWN or gate_S is None:
        return None
    return a.options.gamma * (batch.share_of_step * gate_S * (a.credit.own_S + a.credit.received_S))[child_E]


def step_detail(recorded: Recorded, step_id: str, token: int | None, spelling: Spelling) -> dict[str, Any]:
    """A step: tokens with their advantages, and the terms of its advantage.

    Raises UnknownIdError if the training step has no such step, BatchError if the step has no such token.
    """
    batch, a = recorded.batch, recorded.assignment
    s = _place(batch.step_ids, step_id, "step", recorded.step)
    texts_of = spelling.for_policy(batch.policy_names[batch.policy_of_step[s]])
    detail: dict[str, Any] = {
        "trajectory_id": batch.trajectory_ids[batch.trajectory_of_step[s]],
        "policy": batch.policy_names[batch.policy_of_step[s]],
        "policy_version": int(batch.policy_version[s]),
        "tokens": _tokens(batch, a, s, texts_of),
        "tokens_in_all": int(batch.token_offsets[s + 1] - batch.token_offsets[s]),
        "spelled": texts_of is not None,
    }
    if a is not None:
        explanation = explain(a, s, token)
        detail |= {"why": tree(explanation), "terms": terms(explanation)}
    return detail


def _tokens(batch: TrajectoryBatch, a: Assignment | None, s: int, texts_of: Pieces | None) -> list[tuple[Any, ...]]:
    """A tuple of text, whether it was sampled, advantage and log-probability for each token."""
    start, stop = (int(at) for at in batch.token_offsets[s : s + 2])
    stop = min(stop, start + _TOKENS)
    ids = batch.response_ids[start:stop].tolist()
    texts = [f"[{id}]" for id in ids] if texts_of is None else texts_of(ids)
    advantage_T = np.zeros(stop - start) if a is None else a.token_advantages()[start:stop]
    mask, logprobs = batch.response_mask[start:stop].tolist(), batch.logprobs[start:stop].tolist()
    return [
        (text, bool(sampled), advantage, logprob if math.isfinite(logprob) else None)
        for text, sampled, advantage, logprob in zip(texts, mask, advantage_T.tolist(), logprobs, strict=True)
    ]


class Spelling:
    """The texts of a run's tokens, by the tokenizer of each policy in the newest checkpoint, or the one beside the run.

    Only `tokenizer.json` is read, which contains no code. A character of several tokens is placed at the last of them.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._folder = ledger.path
        self._trained = [name for name, trained in policies_of(ledger).items() if trained]
        self._found: dict[str, Pieces] = {}

    def for_policy(self, policy: str) -> Pieces | None:
        """The texts for a policy's tokens; None without a readable tokenizer, which may appear later."""
        if policy not in self._found and (tokenizer := self._tokenizer(policy)) is not None:
            self._found[policy] = partial(pieces, partial(tokenizer.decode, skip_special_tokens=False))
        return self._found.get(policy)

    def _tokenizer(self, policy: str) -> Any:
        from tokenizers import Tokenizer

        checkpoints = self._folder.glob("checkpoints/global_step_*/**/tokenizer.json")
        files = [file for file in checkpoints if self._serves(file.parts[len(self._folder.parts) + 2 : -1], policy)]
        files += self._folder.glob("tokenizer/tokenizer.json") if self._serves((), policy) else ()
        for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
            try:
                return Tokenizer.from_file(str(file))
            except Exception:  # the library raises a plain Exception for a file that is not a tokenizer
                continue
        return None

    def _serves(self, folders: tuple[str, ...], policy: str) -> bool:
        """Whether these folders of a checkpoint hold a policy's tokenizer.

        Without a policy's name, they hold that of the only trained policy or, from verl, that of the first.
        """
        leads = self._trained[:1] in ([], [policy])
        unnamed = {(): leads and len(self._trained) < 2, ("actor", "huggingface"): leads}
        return unnamed.get(folders, policy in folders[:2])
