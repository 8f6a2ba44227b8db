"""Rollouts of verifiers' environments: roles are agents, and every call of a role is a step."""
