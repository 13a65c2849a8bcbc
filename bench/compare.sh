#!/bin/sh
# Compares Flatshard with PyTorch's FSDP2 + torch.compile on one machine, in one call:
#   bench/compare.sh --nproc 8
# Prints a table, and writes it with all logs below outputs/compare (--help).
exec python3 "$(dirname "$0")/compare.py" "$@"
