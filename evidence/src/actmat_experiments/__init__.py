"""The experiments of the ACTMat paper, the analyses of its theorems, and the studies built on them."""
