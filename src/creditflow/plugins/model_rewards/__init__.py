"""Rewards by a model beside the policy: a process reward model, and the gain in the truth's log-probability."""
