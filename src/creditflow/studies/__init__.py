"""Studies of credit: audits, comparisons, calibration, simulation."""
