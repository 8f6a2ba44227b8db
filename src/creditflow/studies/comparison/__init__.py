"""Train variants of a recipe with the same seeds, each run in a separate process."""
