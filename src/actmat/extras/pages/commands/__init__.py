"""Commands that write or open pages."""
