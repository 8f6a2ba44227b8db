"""Tasks of reasoning-gym by address, and the scorers of its families as an outcome."""
