"""Conversions of sharded modules: `to`, `cuda`, `half`, `to_empty` and the like."""

import contextlib

import torch

from flatshard._fsdp.forward import state_of
from flatshard._tensor.memory import local_of
from flatshard._tensor.sharded_tensor import become, with_local
from flatshard.torch_versions import parameters_of


@contextlib.contextmanager
def converting(module, fn):
    """Inside, nn.Module converts buffers and ignored parameters of `module`. The shards
    stay where they are and take the values. Until the first forward they change their
    dtype, too, and the first forward shards them anew.

    Args:
        fn: function of a tensor that returns the converted one.

    Raises:
        NotImplementedError: `fn` gives shards another device, or another dtype later.
    """
    states = [s for m in module.modules() if (s := state_of(m)) is not None]
    parameters = [p for s in states for p in s.parameters]
    for state in states:
        for p in state.parameters:
            _check(fn, p, may_change_dtype=state.root is None)
    for state in states:
        # As for a tensor on meta: `to` raises, what follows to_empty gives values.
        if not state.initialized and not fn(torch.empty(0, device="meta")).is_meta:
            state.initialized = True
    for p in parameters:
        local = local_of(p.shard).detach()
        with torch.no_grad():
            moved = fn(local)
            if moved.dtype != local.dtype:
                become(p.shard, with_local(p.shard, moved))
            elif moved.data_ptr() != local.data_ptr():
                local.copy_(moved)
    with _hidden(states):
        yield


def _check(fn, p, may_change_dtype):
    local = local_of(p.shard)
    probe = fn(local.new_empty(1))
    same_dtype = probe.dtype == local.dtype or may_change_dtype
    if not same_dtype or probe.device != local.device:
        raise NotImplementedError(
            f"parameter {p.title}: cannot move a sharded module from "
            f"{local.dtype} on {local.device} to {probe.dtype} on {probe.device}; "
            "convert the module before fully_shard (its dtype until the first "
            "forward), or use mp_policy"
        )


@contextlib.contextmanager
def _hidden(states):
    """nn.Module passes over parameters that are None."""
    hidden = []
    try:
        parameters = [p for state in states for p in state.parameters]
        own = {id(tensor) for p in parameters for tensor in (p.shard, p.whole)}
        for module, name in [site for p in parameters for site in p.sites]:
            shown = parameters_of(module()) if module() is not None else {}
            found = shown.get(name)
            if id(found) in own:
                hidden.append((shown, name, found))
                shown[name] = None
        yield
    finally:
        for shown, name, found in hidden:
            shown[name] = found
