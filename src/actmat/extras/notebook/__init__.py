"""Progress in notebooks."""
