"""What the core does without: each plug-in registers through entry points, as another distribution would."""
