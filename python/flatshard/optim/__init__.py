"""Optimizers of the core for sharded parameters: one kernel per flat buffer,
whatever the number of parameters."""

from flatshard.optim.adamw import AdamW
from flatshard.optim.muon import Muon

__all__ = ["AdamW", "Muon"]
