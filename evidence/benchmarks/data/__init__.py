"""The data of the suites, made again from public originals."""
