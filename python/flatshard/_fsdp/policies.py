"""Options of `fully_shard`: plain values, with FSDP2's names and meanings."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

# Its default and its offloading are compared by type only: FSDP2's own classes
# are accepted wherever these are.


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype each representation of a unit's values has.

    Attributes:
        param_dtype: of the all-gathered parameters, so of forward and backward.
            None: the parameters' own.
        reduce_dtype: of gradients on the wire. None: as FSDP2 of the torch that is
            installed, so `param_dtype` up to torch 2.14, and since 2.15 the dtype that
            the parameters have.
        output_dtype: floating-point outputs of the unit's forward are cast to
            it. None: left as they are.
        cast_forward_inputs: cast floating-point inputs of the unit's forward to
            `param_dtype`.
        param_dtype_override_fn: called with each parameter in fully_shard. The
            parameter's own dtype as result: it is all-gathered in that. None or
            `param_dtype`: in `param_dtype`. Equal on all ranks.

    The sharded parameters, their gradients and the optimizer's state keep the
    dtype that the parameters had.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[torch.Tensor], torch.dtype | None] | None = (
        field(default=None, kw_only=True)
    )


@dataclass
class OffloadPolicy:
    """Nothing is offloaded."""


@dataclass
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer state in host memory.

    Parameters are DTensors with local tensors on the CPU, also frozen ones, so
    optimizers update there. Each all-gather copies this rank's part to the device
    first, and each reduction copies its result back. Backward returns when the last
    copy has arrived. Gradients that are not reduced yet stay on the device.

    Attributes:
        pin_memory: the host memory is pinned, so copies run in parallel with kernels.
    """

    pin_memory: bool = True
