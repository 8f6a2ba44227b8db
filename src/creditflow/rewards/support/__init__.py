"""Parts that several ready-made reward functions share."""
