"""Load models with transformers and PEFT, from files or from a merge in memory."""
