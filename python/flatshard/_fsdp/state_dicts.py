"""state_dict and load_state_dict of modules whose parameters belong to a unit."""

import weakref

import torch
from torch.distributed.tensor import DTensor

from flatshard._fsdp.parameter import subclass_of
from flatshard._tensor.sharded_tensor import ShardedTensor
from flatshard._tensor.writes import writes
from flatshard.torch_versions import parameters_of


class _StateDicts:
    """The hooks of state dicts of a module whose parameters, if any, belong to a
    unit. Copies of the module have hooks that do nothing: they belong to none."""

    def __init__(self, state=None):
        self._unit = weakref.ref(state) if state is not None else lambda: None

    def __reduce__(self):
        return _StateDicts, ()

    def before_save(self, module, prefix, keep_vars):
        if (state := self._unit()) is not None:
            state.show_shards()

    def before(self, module, state_dict, prefix, local_metadata, *_):
        if (state := self._unit()) is not None:
            state.show_shards()
            _before_load(state, module, state_dict, prefix, local_metadata)

    def after(self, module, incompatible_keys):
        if (state := self._unit()) is not None:
            _after_load(state, module)


def watch_state_dicts(module, state):
    """Watches the state dicts of a module whose parameters, if any, belong to the unit
    `state`."""
    watch = _StateDicts(state)
    module.register_state_dict_pre_hook(watch.before_save)
    module.register_load_state_dict_pre_hook(watch.before)
    module.register_load_state_dict_post_hook(watch.after)


def _before_load(state, module, state_dict, prefix, local_metadata):
    state.parameters.loads_by_assign = local_metadata.get(
        "assign_to_params_buffers", False
    )
    for name, parameter in parameters_of(module).items():
        value = state_dict.get(prefix + name)
        if state.parameters.loads_by_assign:
            if isinstance(parameter, ShardedTensor) and (kind := subclass_of(value)):
                raise NotImplementedError(
                    f"load_state_dict(assign=True): {prefix + name} is a {kind}, a "
                    "subclass that the shard would treat as a plain tensor; load its "
                    "plain values"
                )
            continue
        if (
            isinstance(parameter, ShardedTensor)
            and isinstance(value, torch.Tensor)
            and not isinstance(value, DTensor)
        ):
            raise ValueError(
                f"load_state_dict: {prefix + name} is a full tensor, but the model's is "
                "sharded. For a state dict of full tensors call torch.distributed."
                "checkpoint.state_dict.set_model_state_dict(model, state_dict, "
                "options=StateDictOptions(full_state_dict=True)), with "
                "broadcast_from_rank0=True when only rank 0 has it"
            )
    if not state.parameters.loads_by_assign:
        # torch need not warn that copies to meta do nothing
        state.note_values(
            p
            for p in state.parameters.all
            if any(m() is module and prefix + n in state_dict for m, n in p.sites)
        )


def _after_load(state, module):
    """Copies values that load_state_dict(assign=True) put into modules as other parameters
    to the shards, and restores these."""
    if any(module is m() for m in state.modules):
        writes.note_unit(state)
    if not state.parameters.loads_by_assign:
        return
    for p in state.parameters:
        for site in p.sites:
            owner = site[0]()
            found = None if owner is None else parameters_of(owner).get(site[1])
            if owner is not module or found is None:
                continue
            if p.is_face(found):
                continue
            if found.shape != p.shard.shape:
                raise ValueError(
                    f"parameter {site[1]} was replaced by one of shape "
                    f"{tuple(found.shape)}, expected {tuple(p.shard.shape)}"
                )
            state.note_values([p])
            p.write(found)
            p.digest = None
            parameters_of(owner)[site[1]] = p.shard
            writes.note_unit(state)
