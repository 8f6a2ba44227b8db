"""The server for agents of other frameworks, in the dialects of OpenAI and Anthropic."""
