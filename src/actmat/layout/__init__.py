"""Layouts of tensors: roles, orientation, packed linear maps, ties."""
