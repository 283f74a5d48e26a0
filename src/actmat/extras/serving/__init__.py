"""Commands that load a finished output."""
