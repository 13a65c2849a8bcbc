"""Forwards and backwards of units as CUDA graphs."""
