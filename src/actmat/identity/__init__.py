"""Principle 1: configs, tokens, labels and files of two inputs compared, with what follows for the output."""
