"""`configure`, and the keywords of `fully_shard` that options replaced."""

import warnings
from dataclasses import fields, replace

from torch import nn

from flatshard._fsdp.options import ModelOptions, ShardOptions
from flatshard._tensor.places import units_in


def configure(model: nn.Module, options: ModelOptions) -> nn.Module:
    """Sets the options of a model.

    Call it once with the outermost module, before `fully_shard` is applied to any part
    of it. Call it after `fully_shard` only if `copy_engines` does not change. Equal on
    all ranks.

    Returns:
        `model`.

    Raises:
        TypeError: not a module, or not a ModelOptions.
        RuntimeError: the model ran before.
        ValueError: parts of the model are sharded already, with another `copy_engines`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"configure: expected a module, got {type(model).__name__}")
    if not isinstance(options, ModelOptions):
        raise TypeError(
            f"configure: expected a ModelOptions, got {type(options).__name__}"
        )
    units = units_in(model)
    for unit in units:
        unit.life.check("configure")
        asked = unit.sharding.model_options.copy_engines
        if asked != options.copy_engines:
            raise ValueError(
                f"configure: copy_engines={options.copy_engines!r}, but parts of the "
                f"model are sharded already with {asked!r}; call "
                "configure before fully_shard"
            )
    for unit in units:
        unit.sharding.model_options = options
    for module in model.modules():
        module.__dict__["_flatshard_options"] = options
    return model


def options_of(modules) -> ModelOptions:
    """Returns the options that `configure` gave the model that `modules` are part of, or
    the defaults."""
    return modules[0].__dict__.get("_flatshard_options") or ModelOptions()


_OF_UNITS = tuple(field.name for field in fields(ShardOptions))
_OF_MODELS = tuple(field.name for field in fields(ModelOptions))
_RENAMED = {"slots_on_demand": "buffers_on_demand"}

# FullyShardedDataParallel's keywords.
_INSTEAD_OF_FSDP1 = {
    name: f", a keyword of FSDP1: {instead}"
    for name, instead in {
        "process_group": "give mesh=, such as DeviceMesh.from_group(group, 'cuda')",
        "sharding_strategy": "give reshard_after_forward=False for SHARD_GRAD_OP, a mesh "
        "of two dimensions for HYBRID_SHARD, strategy='zero0' for NO_SHARD, and nothing "
        "for FULL_SHARD",
        "cpu_offload": "give offload_policy=CPUOffloadPolicy()",
        "auto_wrap_policy": "call fully_shard on each block, and on the full model last",
        "backward_prefetch": "leave it out; units are all-gathered ahead. "
        "configure(model, ModelOptions(prefetch=...)) sets how many",
        "forward_prefetch": "leave it out; units are all-gathered ahead. "
        "configure(model, ModelOptions(prefetch=...)) sets how many",
        "mixed_precision": "give mp_policy=MixedPrecisionPolicy(param_dtype=..., "
        "reduce_dtype=...)",
        "ignored_modules": "give ignored_params= their parameters",
        "ignored_states": "give ignored_params= a set of parameters",
        "param_init_fn": "call flatshard.reset_parameters(model, init_fn=...) after the "
        "last fully_shard",
        "device_id": "leave it out; parameters go to the device of the mesh",
        "sync_module_states": "load the same values on all ranks; set_model_state_dict("
        "..., options=StateDictOptions(broadcast_from_rank0=True)) broadcasts them",
        "limit_all_gathers": "leave it out; all-gathers are always limited",
        "use_orig_params": "leave it out; parameters always keep their names",
        "device_mesh": "give mesh=",
    }.items()
}


def take_keywords(options, model_options, keywords):
    """Moves former keywords of `fully_shard` into the options that replaced them.

    Returns:
        options, model_options.

    Raises:
        TypeError: a keyword that never was one, or is in `options` as well.
    """
    keywords = {_RENAMED.get(k, k): value for k, value in keywords.items()}
    for name in keywords:
        if name not in _OF_UNITS + _OF_MODELS:
            raise TypeError(
                f"fully_shard() got an unexpected keyword argument {name!r}"
                + _INSTEAD_OF_FSDP1.get(name, "")
            )
        is_of_unit = name in _OF_UNITS
        instead = (
            f"options=ShardOptions({name}=...)"
            if is_of_unit
            else f"flatshard.configure(model, ModelOptions({name}=...))"
        )
        if is_of_unit and options is not None:
            raise TypeError(
                f"fully_shard: {name} in addition to options; give {instead}"
            )
        warnings.warn(
            f"fully_shard: the keyword {name} is deprecated and will be removed in the "
            f"next version; use {instead}",
            FutureWarning,
            stacklevel=4,  # the caller of fully_shard
        )
    of_unit = {k: v for k, v in keywords.items() if k in _OF_UNITS}
    of_model = {k: v for k, v in keywords.items() if k in _OF_MODELS}
    options = ShardOptions(**of_unit) if options is None else options
    if of_model:
        model_options = replace(model_options, **of_model)
    return options, model_options
