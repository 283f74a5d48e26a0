"""Adapters whose deltas are formed from more than two factors, or from the base: one file per family.

A family is a `Reader`: what of its config it claims, and the `Change`s that its stored tensors make.
"""
