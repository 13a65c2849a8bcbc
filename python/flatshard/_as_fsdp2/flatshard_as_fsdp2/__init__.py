"""Flatshard in place of FSDP2, see flatshard/as_fsdp2.py.

This package is outside `flatshard`, because it is imported when Python starts, also
in processes that never import torch.
"""
