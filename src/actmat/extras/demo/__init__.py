"""The embedded demo: train a base and its experts on real data, merge them with every method, compare."""
