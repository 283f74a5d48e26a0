"""Predicted times: measured rates of a machine, the work of units at these rates, and a simulated schedule."""
