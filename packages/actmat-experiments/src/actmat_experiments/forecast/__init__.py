"""Which numbers forecast what an expert loses in a merge? Candidates, tried on models they were not fitted to."""
