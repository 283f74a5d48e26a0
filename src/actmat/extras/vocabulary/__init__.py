"""Merges of models with different tokens: rows of their tables put in one order."""
