"""bitsandbytes: 4-bit weights that are stored as floating-point numbers.

`bnb_4bit_quant_storage` chooses that, so that FSDP2 can shard them. Sharding turns such a
weight into a plain tensor, and `Linear4bit` puts a Params4bit in its place in each
forward. Flatshard's units keep their parameters, so the plain tensor gets the state that
the forward needs. Weights that are stored as integers are ignored by accelerate.
"""

import functools

MODULE = "bitsandbytes.nn.modules"
# Versions that the patch was tried with: SHA-256 of the source of the function.
TRIED = {
    "0.50.2": "9a95968c6c18b1f74a6feb0b1de2489938252a71a678722199f9cd984f0876bf",
}


def patch(modules):
    """Patches the module that was just imported."""
    find_state = getattr(modules, "fix_4bit_weight_quant_state_from_module", None)
    if find_state is None:
        return

    @functools.wraps(find_state)
    def fix_4bit_weight_quant_state_from_module(module):
        weight = module.weight
        state = getattr(module, "quant_state", None)
        if isinstance(weight, modules.Params4bit) or state is None:
            find_state(module)
        else:
            weight.quant_state = state

    modules.fix_4bit_weight_quant_state_from_module = (
        fix_4bit_weight_quant_state_from_module
    )


def make_plain(modules, ignored_params=None, mp_policy=None, **others):
    """Replaces the 4-bit weights below `modules` by plain parameters of the same bytes.

    Args:
        modules, and the rest: what fully_shard is called with.

    Raises:
        ValueError: the weights would be cast.
    """
    import torch

    ignored = {id(p) for p in ignored_params or ()}
    dtype = getattr(mp_policy, "param_dtype", None)
    for module in (inner for outer in modules for inner in outer.modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            if type(weight).__name__ != "Params4bit" or id(weight) in ignored:
                continue
            if weight.is_floating_point() and dtype not in (None, weight.dtype):
                raise ValueError(
                    f"bnb_4bit_quant_storage: expected {dtype}, the param_dtype of the "
                    f"mixed precision, got {weight.dtype}: a cast would change the bytes"
                )
            value = weight.data.as_subclass(torch.Tensor)
            setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
