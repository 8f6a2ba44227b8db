"""Log-probs and entropies of tokens from hidden states, one token at a time."""

import torch


def token_logprobs_one_by_one(hidden, weight, bias, temperature, token_ids):
    """Log-prob and entropy of each token, by their definitions."""
    logprobs, entropies = [], []
    for h, T, token in zip(hidden, temperature, token_ids, strict=True):
        logits = torch.stack([(h * row).sum() for row in weight])
        if bias is not None:
            logits = logits + bias
        probabilities = torch.exp(logits / T) / torch.exp(logits / T).sum()
        logprobs.append(torch.log(probabilities[token]))
        entropies.append(-(probabilities * torch.log(probabilities)).sum())
    return torch.stack(logprobs), torch.stack(entropies)
