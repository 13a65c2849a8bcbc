"""Megatron-FSDP's names for its users.

    megatron_fsdp                   flatshard.megatron (first version)
    megatron_fsdp.experimental      flatshard.megatron.v2

Two names mean different things in the two versions. `fully_shard` of this module is
the function of the first version: its second argument is an optimizer, and in the second
version a mesh. `fully_shard_optimizer` of this module accepts both argument lists. The
second version's other names are here too.

The functions translate arguments and return what `flatshard.fully_shard` returns. An
argument without a counterpart raises an error that names it, unless it has its default.
"""

from flatshard._fsdp.module import FSDPModule
from flatshard.megatron import v2
from flatshard.megatron.float8 import FullyShardFP8Policy
from flatshard.megatron.precision import (
    FullyShardMixedPrecisionPolicy,
    MixedPrecisionPolicy,
)
from flatshard.megatron.v1 import fully_shard, fully_shard_model, fully_shard_optimizer
from flatshard.megatron.v2 import (
    FsdpContext,
    Placements,
    fully_shard_context,
    load_checkpoint,
    microbatch,
    save_checkpoint,
)

__all__ = [
    "FSDPModule",
    "FsdpContext",
    "FullyShardFP8Policy",
    "FullyShardMixedPrecisionPolicy",
    "MixedPrecisionPolicy",
    "Placements",
    "fully_shard",
    "fully_shard_context",
    "fully_shard_model",
    "fully_shard_optimizer",
    "load_checkpoint",
    "microbatch",
    "save_checkpoint",
    "v2",
]
