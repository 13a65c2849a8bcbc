"""Fully sharded data-parallel training of PyTorch modules.

The names are FSDP2's (torch.distributed.fsdp). The work is done by a C++ core.
"""

from flatshard import _build, torch_fit


def _check_torch():
    problem = torch_fit.misfit(_build, torch_fit.installed_torch())
    if problem:
        raise ImportError(problem)


_check_torch()

import torch.distributed.tensor  # types that the extension meets


def _load_core():
    try:
        from flatshard import _C
    except ImportError as error:
        raise ImportError(
            f"the extension flatshard._C cannot be loaded ({error}); build it for this "
            "Python and torch: pip install --no-build-isolation --force-reinstall ."
        ) from error
    return _C


_load_core()

from flatshard import _C, checkpoint, diagnostics, float8, optim, weights
from flatshard._C import ConfigError, Error
from flatshard._fsdp import chosen_inputs  # the engine calls it
from flatshard._fsdp.backward_pass import BackwardPass
from flatshard._fsdp.configure import configure
from flatshard._fsdp.forward import UnshardHandle
from flatshard._fsdp.fully_shard import fully_shard
from flatshard._fsdp.graphed_callables import cuda_graph_stats, make_graphed_callables
from flatshard._fsdp.initialize import reset_parameters
from flatshard._fsdp.loss import linear_cross_entropy
from flatshard._fsdp.module import FSDPModule
from flatshard._fsdp.options import ModelOptions, ShardOptions
from flatshard._fsdp.policies import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from flatshard._fsdp.wrapping import register_fsdp_forward_method, share_comm_ctx
from flatshard._tensor import shard_operations  # registers them
from flatshard.checkpoint.hf import load_hf
from flatshard.float8.policy import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8Policy,
    MXFP8BlockScaling,
)
from flatshard.moe.expert_parallel import expert_parallel
from flatshard.moe.overlap import overlap_microbatches
from flatshard.moe.shard_moe import MoeMeshes, moe_meshes, shard_moe

__version__ = _C.version
__all__ = [
    "BackwardPass",
    "CPUOffloadPolicy",
    "ConfigError",
    "Error",
    "FSDPModule",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8Policy",
    "MXFP8BlockScaling",
    "MixedPrecisionPolicy",
    "ModelOptions",
    "MoeMeshes",
    "OffloadPolicy",
    "ShardOptions",
    "UnshardHandle",
    "checkpoint",
    "configure",
    "cuda_graph_stats",
    "diagnostics",
    "expert_parallel",
    "float8",
    "fully_shard",
    "linear_cross_entropy",
    "load_hf",
    "make_graphed_callables",
    "moe_meshes",
    "optim",
    "overlap_microbatches",
    "register_fsdp_forward_method",
    "reset_parameters",
    "shard_moe",
    "share_comm_ctx",
    "weights",
]
