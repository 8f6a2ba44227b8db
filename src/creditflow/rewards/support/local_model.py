"""A causal language model from a Hugging Face folder that answers chat messages greedily, for local judges."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from creditflow._utils.huggingface import n_tokens, position_limit
from creditflow.rollout.chat import ChatModel, ChatTokenizer
from creditflow.rollout.client import Generation, GenerationRequest


class LocalModel(ChatModel):
    """Model and tokenizer as a greedy `rollout.ModelClient` (its generations carry no log-probs)."""

    version = 0

    def __init__(self, folder: Path, model: Any, tokenizer: Any, device: Any) -> None:
        """Use as the argument `make` of `load_model`."""
        self.model = model
        self.device = device
        self.chat_tokenizer = ChatTokenizer(tokenizer, model.generation_config.eos_token_id, n_tokens(model))
        self.end_ids = sorted(self.chat_tokenizer.end_ids)
        self.max_positions = position_limit(model.config).tokens

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate greedily, in batches that are padded on the left."""
        if any(request.temperature for request in requests):
            raise ValueError("a local model answers greedily: expected temperature 0")
        generations: dict[int, Generation] = {}
        for batch in self._that_fit(requests):
            replies = self._generate([requests[k] for k in batch])
            generations |= dict(zip(batch, replies, strict=True))
        return [generations[k] for k in range(len(requests))]

    def _that_fit(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """Split the requests into batches (of indices) in which no row passes the model's last position.

        Rows that have ended are fed until the longest response ends; beyond the limit they would change the other rows
        (`PositionLimit`).
        """
        batches: list[list[int]] = []
        longest = most = 0
        for k in sorted(range(len(requests)), key=lambda k: len(requests[k].prompt_ids)):
            longest, most = len(requests[k].prompt_ids), max(most, requests[k].max_tokens)
            if batches and longest + most <= self.max_positions:
                batches[-1].append(k)
            else:
                batches.append([k])
                most = requests[k].max_tokens
        return batches

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        import torch
        from transformers import GenerationConfig

        width = max(len(request.prompt_ids) for request in requests)
        ids = torch.full((len(requests), width), self.chat_tokenizer.pad_id)
        mask = torch.zeros((len(requests), width), dtype=torch.long)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, width - len(request.prompt_ids) :] = 1
        greedily = GenerationConfig(
            max_new_tokens=max(request.max_tokens for request in requests),
            do_sample=False,
            num_beams=1,
            eos_token_id=self.end_ids or None,
            pad_token_id=self.chat_tokenizer.pad_id,
        )
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids.to(self.device), attention_mask=mask.to(self.device), generation_config=greedily
            )
        rows: list[list[int]] = out[:, width:].tolist()
        return [self._generation(row, request.max_tokens) for row, request in zip(rows, requests, strict=True)]

    def _generation(self, row: Sequence[int], limit: int) -> Generation:
        """The response up to the first end-of-sequence token; the rest of the row is padding."""
        end = next((t for t, token in enumerate(row[:limit]) if token in self.end_ids), None)
        if end is None:
            return Generation(tuple(row[:limit]), (), "length")
        return Generation(tuple(row[: end + 1]), (), "stop")
