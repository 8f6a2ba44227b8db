"""The distributed engine: a plug-in to verl, through its registries and subclasses; imported where verl is wanted."""
