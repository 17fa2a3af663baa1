"""Trajectories to rewards: the user's function, remote servers, verifiers.

Nothing is imported here: child processes import this package and must start quickly. Use ``reward.factory``.
"""
