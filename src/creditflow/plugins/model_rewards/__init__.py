"""Rewards by a model beside the policy: a process reward model."""
