"""Steps of post-processing, by entry points of `actmat.post`."""
