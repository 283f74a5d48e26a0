"""The interference family (ACTMat, TACT, ACE, WUDI, RegMean and their variants): rules, sums and solvers."""
