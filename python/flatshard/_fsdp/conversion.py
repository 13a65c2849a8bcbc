"""Conversions of sharded modules: `to`, `cuda`, `half`, `to_empty` and the like."""

import contextlib

import torch

from flatshard._fsdp.parameter import parameter_of_whole
from flatshard._fsdp.renewal import leave, renew, why_fixed
from flatshard._tensor.memory import local_of
from flatshard._tensor.places import parameter_of, state_of, unit_of
from flatshard._tensor.sharded_tensor import become
from flatshard._tensor.watched_tensor import refuse_to_share
from flatshard._tensor.writes import writes
from flatshard.torch_versions import parameters_of


_converted: set[int] = set()  # by a call that continues


def converting(module, fn, recurse):
    """Lets nn.Module convert buffers and ignored parameters of `module` inside. The
    shards stay the same objects and get the values. Where these have another dtype or
    are on another device, the next forward creates the core's units again. On a device
    other than the mesh has, shards have separate memory and the core's memory is freed.
    The next forward raises an error unless they are back on the mesh's device.

    Args:
        fn: function of a tensor that returns the converted one.
        recurse: also the modules below.

    Raises:
        NotImplementedError: the unit cannot change so.
    """
    below = set(module.modules()) if recurse else {module}
    states = {s for m in below if (s := state_of(m)) is not None} - _converted
    # In a list of modules each is converted separately.
    parameters = [
        (s, p)
        for s in states
        for p in s.parameters.all
        if any(m() in below for m, _ in p.sites)
    ]
    return _converting(states, parameters, fn)


def converting_part(module, fn):
    """Does the same for the parameters that a module itself has, also if it is not
    wrapped."""
    parameters = []
    for tensor in parameters_of(module).values():
        if tensor is not None:
            p = parameter_of(tensor) or parameter_of_whole(tensor)
            place = None if p is None else unit_of(p.shard)
            if place is not None and place[0] not in _converted:
                parameters.append((place[0], p))
    if not parameters:
        return contextlib.nullcontext()
    return _converting({state for state, _ in parameters}, parameters, fn)


@contextlib.contextmanager
def _converting(states, parameters, fn):
    leaving = {s for s, p in parameters if _leaves(fn, s, p)}
    for state in states:
        state.show_shards()
    for state, p in parameters:
        # The rule is the same as for a tensor on meta: `to` raises, and `fn` gives
        # values after to_empty.
        if p.on_meta and not fn(torch.empty(0, device="meta")).is_meta:
            state.note_values([p])
    for state, p in parameters:
        if p.extension is not None:
            state.move_extended(p, fn(local_of(p.shard).detach()))
            continue
        if state in leaving:
            writes.remove([p.shard])
        _convert(p, fn)
    roots = {s.root for s in leaving if s.root is not None}
    others = {unit for root in roots for unit in root.units} - leaving
    for root in roots:
        root.end()
    for state in leaving:
        leave(state)
    for unit in others:  # their cores hold the memory of all of that model
        renew(unit)
    for state in states:
        if state.root is not None and not state.fits():
            state.root.life.move("outdate")
    _converted.update(states)
    try:
        with _hidden([p for _, p in parameters]):
            yield
    finally:
        _converted.difference_update(states)


@torch.no_grad()
def _convert(p, fn):
    local = local_of(p.shard).detach()
    moved = fn(local)
    if moved.dtype == local.dtype and moved.device == local.device:
        if moved.data_ptr() != local.data_ptr():
            local.copy_(moved)
        return
    grad = p.shard.grad
    p.shard.grad = None
    become(p.shard, p.shard.over(moved))
    p.shown_dtype = None  # not the core's memory, also after a conversion back
    if moved.is_meta:
        p.on_meta = True
    elif grad is not None:
        p.shard.grad = p.shard.over(fn(local_of(grad)))


def _leaves(fn, state, p):
    """Returns whether `fn` moves the parameter to a device other than the mesh has."""
    local = local_of(p.stored_shard)
    probe = fn(torch.empty(1, dtype=local.dtype, device=local.device))
    if probe.device.type == "cpu" and probe.is_shared():
        refuse_to_share()
    if p.extension is not None and probe.dtype != local.dtype:
        raise NotImplementedError(
            f"parameter {p.title}, a tensor of a subclass, cannot change its dtype from "
            f"{local.dtype} to {probe.dtype} after fully_shard; convert the module before"
        )
    if probe.device == local.device or (local.is_meta and p.extension is not None):
        return False
    if (why := why_fixed(state, p)) is not None:
        raise NotImplementedError(
            f"parameter {p.title}: moving a sharded module from {local.device} to "
            f"{probe.device} is not supported for a unit {why}; move it before fully_shard"
        )
    if state.root is not None:
        state.root.check_may_end(f"parameter {p.title} was moved to {probe.device}")
    return probe.device != state.parameters.home


@contextlib.contextmanager
def _hidden(parameters):
    """Sets the parameters to None inside the context, so that nn.Module skips them."""
    hidden = []
    try:
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
