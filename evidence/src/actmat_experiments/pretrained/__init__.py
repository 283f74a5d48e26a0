"""Suites on transformers that were pretrained by others, and that pip can fetch: nothing is trained from scratch."""
