"""Experts: sources of deltas for the tensors of one base, as full checkpoints or as adapters."""
