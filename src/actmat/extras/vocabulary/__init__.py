"""Merges of models with different tokens: rows of token tables aligned to one vocabulary."""
