"""Studies of credit: audits, reassignment, comparisons of runs."""
