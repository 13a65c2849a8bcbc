"""Lets libraries that expect GPUs run on CPUs."""

import functools
import os

import torch


def ranks_as_gpus():
    """Lets accelerate shard on CPUs. It normally shards on accelerators only."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    torch.cpu.set_device = lambda device: None
    init = PartialState.__init__

    @functools.wraps(init)
    def on_cpu(self, cpu=False, **keywords):
        init(self, True)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = on_cpu


def reset_accelerate():
    """Lets the next Accelerator of this process use other settings."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def rank():
    return int(os.environ["RANK"])
