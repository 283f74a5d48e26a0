"""Executors: one file for each place that units can run in; `base.Executor` is the contract."""
