"""The OpenAI-compatible server for agents of other frameworks."""
