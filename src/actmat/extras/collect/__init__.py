"""Collection of statistics on data, and comparison of models on data."""
