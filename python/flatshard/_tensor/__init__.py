"""Sharded parameters as DTensors: how they are cut, operations on them, and what counts
writes to them."""
