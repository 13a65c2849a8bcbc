"""Conversions of sharded modules: `to`, `cuda`, `half`, `to_empty` and the like."""

import contextlib

import torch

from flatshard._fsdp.forward import state_of
from flatshard._tensor.memory import local_of
from flatshard._tensor.sharded_tensor import become
from flatshard.torch_versions import parameters_of


@contextlib.contextmanager
def converting(module, fn):
    """Inside, nn.Module converts buffers and ignored parameters of `module`. The shards
    stay where they are and take the values. They change their dtype, too, and the next
    forward makes the core's units anew.

    Args:
        fn: function of a tensor that returns the converted one.

    Raises:
        NotImplementedError: `fn` gives shards another device.
    """
    states = [s for m in module.modules() if (s := state_of(m)) is not None]
    parameters = [p for s in states for p in s.all_parameters]
    for p in parameters:
        _check(fn, p)
    for state in states:
        # As for a tensor on meta: `to` raises, what follows to_empty gives values.
        if not state.initialized and not fn(torch.empty(0, device="meta")).is_meta:
            state.initialized = True
    for state in states:
        for p in state.extended:
            state.move_extended(p, fn(local_of(p.shard).detach()))
    for p in parameters:
        if p.extension is not None:
            continue
        local = local_of(p.shard).detach()
        with torch.no_grad():
            moved = fn(local)
            if moved.dtype != local.dtype:
                _change_dtype(p, fn, moved)
            elif moved.data_ptr() != local.data_ptr():
                local.copy_(moved)
    for state in states:
        if state.root is not None and not state.fits():
            state.root.is_stale = True
    with _hidden(states):
        yield


def _change_dtype(p, fn, moved):
    """Of the shard, which has the values `moved` then, and of its gradient."""
    grad = p.shard.grad
    p.shard.grad = None
    become(p.shard, p.shard.over(moved))
    if grad is not None:
        p.shard.grad = p.shard.over(fn(local_of(grad)))


def _check(fn, p):
    local = local_of(p.shard)
    probe = fn(torch.empty(1, dtype=local.dtype, device=local.device))
    if p.extension is not None and probe.dtype != local.dtype:
        raise NotImplementedError(
            f"parameter {p.title}, a tensor of a subclass, cannot change its dtype from "
            f"{local.dtype} to {probe.dtype} after fully_shard; convert the module before"
        )
    if local.is_meta and p.extension is not None:
        return
    if probe.device != local.device:
        raise NotImplementedError(
            f"parameter {p.title}: cannot move a sharded module from "
            f"{local.device} to {probe.device}, where its mesh is not; move the module "
            "before fully_shard. For parameters that rest on the CPU give "
            "offload_policy=CPUOffloadPolicy()"
        )


@contextlib.contextmanager
def _hidden(states):
    """nn.Module passes over parameters that are None."""
    hidden = []
    try:
        parameters = [p for state in states for p in state.all_parameters]
        own = {id(tensor) for p in parameters for tensor in p.faces()}
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
