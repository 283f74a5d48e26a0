"""Numerics of the analyses and of the study of forecasts; torch and `actmat.linalg` only."""
