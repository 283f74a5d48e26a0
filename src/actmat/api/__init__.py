"""The public functions, thin over `run` and the extras: arguments become a recipe and settings."""
