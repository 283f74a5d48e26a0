"""Code that several methods share; every other file of `methods` is one method, or their contract."""
