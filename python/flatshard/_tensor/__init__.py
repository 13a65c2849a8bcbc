"""Sharded parameters as DTensors: how they are split, operations on them, and what counts
writes to them."""
