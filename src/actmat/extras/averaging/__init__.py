"""Averages of checkpoints of one training run."""
