"""Weight initialization of modules that were made on the meta device."""

import hashlib
from collections.abc import Callable

import torch
from torch import nn

from flatshard._fsdp.parameter import Parameter
from flatshard._tensor.memory import local_of
from flatshard._tensor.places import units_in
from flatshard.torch_versions import parameters_of


def reset_parameters(
    model: nn.Module, seed: int = 0, init_fn: Callable[[nn.Module], None] | None = None
) -> None:
    """Initializes every sharded parameter, module by module.

    Each module draws them from a generator seeded by (seed, the module's name):
    they do not depend on the number of ranks. Only one module is unsharded at a time.
    Not collective.

    Args:
        model: the root module, for names.
        seed: of the generators.
        init_fn: called with each module that directly has parameters. None: the
            module's `reset_parameters()`.

    Raises:
        ValueError: a module with parameters and without reset_parameters().
    """
    places: dict[int, list[tuple[str, Parameter]]] = {}
    for state in units_in(model):
        state.parameters.refuse_extended(
            "reset_parameters", "call to_empty() and write its values"
        )
        state.show_shards()
        state.note_other_values()
        for p in state.parameters:
            for site, name in p.sites:
                places.setdefault(id(site()), []).append((name, p))
    done: set[int] = set()
    for full_name, module in model.named_modules():
        own = places.get(id(module))
        if own is None:
            continue
        if init_fn is None and not hasattr(module, "reset_parameters"):
            raise ValueError(
                f"module {full_name or 'root'} ({type(module).__name__}) has parameters "
                "and no reset_parameters(); give init_fn"
            )
        _reset_module(module, own, _seed(seed, full_name), init_fn, done)


def _reset_module(module, own, seed, init_fn, done):
    whole = {}
    for name, p in own:
        local = local_of(p.shard)
        whole[name] = nn.Parameter(
            torch.empty(p.shard.shape, dtype=local.dtype, device=local.device),
            requires_grad=p.shard.requires_grad,
        )
        parameters_of(module)[name] = whole[name]
    device = next(iter(whole.values())).device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            with torch.no_grad():
                if init_fn is None:
                    module.reset_parameters()
                else:
                    init_fn(module)
        for name, p in own:
            if id(p) not in done:  # a tied one has the values of its first place
                done.add(id(p))
                p.write(whole[name])
    finally:
        for name, p in own:
            parameters_of(module)[name] = p.shard


def _seed(seed, name):
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
