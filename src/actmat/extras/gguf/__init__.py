"""GGUF files, for reading: header, names, tensors."""
