"""Masks that sparsify deltas, the thresholds they need, and the two ways of adding masked deltas up."""
