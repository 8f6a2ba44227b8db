"""Credit assignment for teams of LLM agents."""
