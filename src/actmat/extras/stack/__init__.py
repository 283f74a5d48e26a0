"""Stacks: layers of several checkpoints, one after the other."""
