"""Convert published data sets to tasks with verl's columns."""

EXTRA = "report"
