"""Diffusion models: pipelines of diffusers, LyCORIS files, other layouts of one model."""
