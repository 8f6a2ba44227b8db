"""Parts of a run that every engine shares."""
