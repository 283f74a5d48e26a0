"""Configurations of mergekit as actmat runs them, against mergekit itself."""
