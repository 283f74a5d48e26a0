"""Checks of deltas that were added to a base."""
