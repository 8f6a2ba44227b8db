"""Model folders of a recipe, and generated tiny models."""
