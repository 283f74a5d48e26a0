"""Observe a forward pass: the inputs of every linear map of a model, without padding."""
