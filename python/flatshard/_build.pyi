"""What this Flatshard was built with."""

VERSION: str
TORCH: str
CUDA: str
