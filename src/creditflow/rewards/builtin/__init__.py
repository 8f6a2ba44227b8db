"""Ready-made reward functions, one file each."""
