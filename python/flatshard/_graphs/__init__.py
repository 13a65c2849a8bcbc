"""What the forward of a unit depends on that is replayed as CUDA graphs."""
