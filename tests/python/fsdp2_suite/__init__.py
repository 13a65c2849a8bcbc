"""PyTorch's own FSDP2 tests on this machine's CPUs, with Flatshard or FSDP2."""
