"""Devices that matrices are merged on: names, memory, copies, and tensors that are read into them."""
