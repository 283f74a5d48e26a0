"""One GPU in one command, see `benchmarks.gpu.__main__`."""
