"""Numbers that might forecast the loss of an expert in a merge, tried on models they were not fitted to."""
