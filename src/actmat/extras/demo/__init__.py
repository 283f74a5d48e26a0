"""Embedded demo: train a base and experts on real data, merge them with every method, compare."""
