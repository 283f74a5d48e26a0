"""Imported in a process that reads remote inputs: small files then take many small ranges."""

from actmat.checkpoints import ranges

ranges.BLOCK_BYTES = 512
ranges.SMALL_BYTES = 256
