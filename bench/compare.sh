#!/bin/sh
# Flatshard beside PyTorch's FSDP2 + torch.compile, one call on one machine:
#   bench/compare.sh --nproc 8
# Prints a table, and writes it with all logs below outputs/compare (--help).
exec python3 "$(dirname "$0")/compare.py" "$@"
