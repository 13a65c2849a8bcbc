"""Sharded parameters as DTensors: how they are cut, and operations on them."""
