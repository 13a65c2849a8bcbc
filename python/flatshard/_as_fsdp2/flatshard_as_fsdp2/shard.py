"""`fully_shard` as programs for FSDP2 call it, with the options of a swap."""

import functools

from flatshard_as_fsdp2 import bitsandbytes_weights, closing, private


def names_of_flatshard(options, own):
    """Imports Flatshard and returns its objects for the names in `own`."""
    import flatshard
    from flatshard._fsdp.unit import UnitState

    options.check()
    private.refuse(flatshard.FSDPModule, UnitState)
    new = {name: getattr(flatshard, name) for name in own}
    new["fully_shard"] = _with_options(options, private.PatchedFSDPParam())
    return new


def _with_options(options, patches):
    import torch
    import torch.distributed as dist

    import flatshard

    of_unit = options.of_unit()
    of_model = options.given("copy_engines", "prefetch")
    strategy = options.given("strategy")

    def of_modules(modules):
        graphs = options.cuda_graph and _can_capture(modules)
        return flatshard.ShardOptions(**of_unit, cuda_graph=graphs)

    @functools.wraps(flatshard.fully_shard)
    def fully_shard(module, **keywords):
        patches.check()
        modules = list(module) if isinstance(module, (list, tuple)) else [module]
        if all(isinstance(m, torch.nn.Module) for m in modules):
            bitsandbytes_weights.make_plain(modules, **keywords)
        if of_model:
            for m in modules:
                flatshard.configure(m, flatshard.ModelOptions(**of_model))
        defaults = {**strategy, "options": of_modules(modules)}
        result = flatshard.fully_shard(module, **{**defaults, **keywords})
        found = flatshard.fully_shard.state(modules[0]).sharding.strategy
        closing.count_unit(found, dist.get_rank())
        return result

    return fully_shard


def _can_capture(modules):
    from flatshard._graphs.checks import check_block

    try:
        check_block(modules)
    except (ValueError, NotImplementedError):
        return False
    return True
