"""Versions and features of this build of Flatshard."""

VERSION: str
TORCH: str
CUDA: str
