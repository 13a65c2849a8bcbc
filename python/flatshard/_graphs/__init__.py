"""Forwards of units that the core replays as CUDA graphs."""
