"""What the core does without: each plug-in registers through entry points, as a distribution of somebody else would."""
