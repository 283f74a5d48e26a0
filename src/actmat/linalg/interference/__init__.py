"""The interference family (ACTMat, WUDI, RegMean and their variants): rules, sums and solvers."""
