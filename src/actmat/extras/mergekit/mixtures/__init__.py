"""Mixtures of experts from dense models (mergekit-moe): a router, one model's attention, several models' MLPs."""
