"""Files that several tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RECIPES = ROOT / "src" / "creditflow" / "recipes"
TOYS = ROOT / "tests" / "recipes"
TOY = TOYS / "toy.yaml"
SAMPLES = ROOT / "tests" / "samples"
GSM8K = SAMPLES / "gsm8k_64.jsonl"
TRACES = ROOT / "tests" / "plugins" / "traces" / "recorded"
