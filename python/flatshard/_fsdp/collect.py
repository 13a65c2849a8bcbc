"""Collects the modules and parameters of a unit."""

import weakref

import torch
from torch import nn

from flatshard._fsdp.extension import instead_of, may_follow_protocol
from flatshard._fsdp.former import former_name
from flatshard._tensor.even_shard import EvenShard
from flatshard._tensor.sharded_tensor import ShardedTensor
from flatshard._tensor.tensor_parallel import is_tensor_parallel
from flatshard.torch_versions import parameters_of

TRAINABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def modules_of_unit(modules, is_unit):
    """Returns the modules whose parameters belong to a unit of `modules`: all below
    them except the modules of other units. Each once."""
    found = {}
    for module in modules:
        _walk(module, is_unit, found)
    return list(found.values())


# Not an inner function: if it calls itself, it is a cycle that would keep the model
# until the garbage collector runs.
def _walk(module, is_unit, found):
    if id(module) in found or is_unit(module):
        return
    found[id(module)] = module
    for child in module.children():
        _walk(child, is_unit, found)


def named_places(root):
    """Yields (name, module, key, tensor) of each place below `root` that has a
    parameter."""
    for prefix, module in root.named_modules():
        for key, tensor in parameters_of(module).items():
            if tensor is not None:
                yield full_name(prefix, key), module, key, tensor


def full_name(prefix, name):
    """Returns the name of something in the module that has the name `prefix`."""
    return f"{prefix}.{name}" if prefix else name


def collect_parameters(modules, owned, ignored):
    """Returns the parameters to shard, each once with all its places.

    Args:
        modules: those given to fully_shard, for names in messages.
        owned: modules_of_unit(modules).
        ignored: ids of parameters to leave as they are.
    """
    names = {}
    for number, root in enumerate(modules):
        prefix = str(number) if len(modules) > 1 else ""
        for name, module in root.named_modules(prefix=prefix):
            names.setdefault(id(module), name)
    found = {}
    for module in owned:
        prefix = names[id(module)]
        for name, tensor in parameters_of(module).items():
            if tensor is None or id(tensor) in ignored:
                continue
            first = tensor, full_name(prefix, name), []
            found.setdefault(id(tensor), first)[2].append((weakref.ref(module), name))
    for tensor, name, _ in found.values():
        _check_parameter(tensor, name)
    return list(found.values())


def _check_parameter(tensor, name):
    if (former := former_name(tensor)) is not None:
        raise ValueError(
            f"parameter {name} is shared with a unit that was wrapped before, as "
            f"{former}; wrap one module that contains both, and do not wrap them inside it"
        )
    if isinstance(tensor, (ShardedTensor, EvenShard)):
        raise ValueError(
            f"parameter {name} is sharded already, by another unit: call fully_shard on "
            "inner modules first, and on the modules around them afterwards. A unit "
            "consists of the parameters that no earlier call has sharded"
        )
    if is_tensor_parallel(tensor):
        return
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        raise ValueError(
            f"parameter {name} has no shape yet ({type(tensor).__name__}): run the "
            "module once before fully_shard"
        )
    if type(tensor) is not nn.Parameter and not may_follow_protocol(tensor):
        raise NotImplementedError(
            f"parameter {name} is a {type(tensor).__name__}, a subclass without "
            "fsdp_pre_all_gather and fsdp_post_all_gather, and sharding would turn it into "
            "a plain tensor: put nn.Parameter(its plain values) in its place before "
            f"fully_shard, or name it in ignored_params{instead_of(tensor)}"
        )
    if tensor.requires_grad and tensor.dtype not in TRAINABLE:
        raise ValueError(
            f"parameter {name} is of type {tensor.dtype} and trainable; expected one of "
            f"{', '.join(map(str, TRAINABLE))}. Freeze it (requires_grad_(False)), or "
            "name it in ignored_params"
        )
