"""Merges in parts, by processes that share a folder: job arrays of a cluster."""
