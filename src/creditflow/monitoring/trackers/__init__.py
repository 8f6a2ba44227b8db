"""The destinations of a run's metrics, one a file. Each file registers its tracker; `base` holds their interface."""
