"""Merging without data: estimates of the layers' inputs, and lengths of the merged delta, tried on trained experts."""
