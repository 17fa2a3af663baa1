"""Weights from the trainer's workers to the engines, through vLLM's weight-transfer framework."""
