"""A generated model of ten words, of which one is a call of the tool, so that a random model calls it often."""

from pathlib import Path

from creditflow.engines.models.tiny import save_tiny_llama

CALL = '<tool_call>{"name":"shop_price","arguments":{"item":"tea"}}</tool_call>'
WORDS = ("<|end|>", "?", "system", "user", "assistant", "tool", CALL, "3", "5", "yes")
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def save_model(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>"])
    save_tiny_llama(folder, tokenizer, hidden=32, layers=1, positions=512, seed=0, chat_template=TEMPLATE)
    return folder
