"""Prompts to trajectories: engines, the actor around them, and the driver's dispatcher."""
