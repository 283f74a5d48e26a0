"""Mixtures of experts made of dense models (mergekit-moe): router, attention of one model, MLPs of several."""
