"""Adapters whose deltas are formed from more than two factors, or from the base: one file per family.

A family is a `Reader`, which claims configs and turns stored tensors into `Change`s.
"""
