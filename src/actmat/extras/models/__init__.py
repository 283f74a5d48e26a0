"""Models that run, by transformers and PEFT: of files, and of a merge in memory."""
