"""The learned parts of rules from batches: calibrated weights, models of scores and outcomes, and their history."""
