"""Methods of the literature beyond those of the core: one file each, by entry points of `actmat.methods`."""
