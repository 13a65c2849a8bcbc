"""Makes the helpers of torch.testing run their ranks on CPUs, and swaps FSDP2.

The stand-in for GPUs here counts four devices and has no memory: tests that measure a
GPU's memory or the time of its kernels fail with FSDP2 and Flatshard alike.
"""

import contextlib
import functools
import importlib
import os
import sys
import types
import unittest

NUM_DEVICES = 4

# The modules with names of FSDP2 that test modules import.
_HOLDERS = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.testing._internal.common_fsdp",
)
_SWAPPED = (
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)


class _Stream:
    """A stream of a device that has finished all launches."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False


def _stand_in(torch):
    nothing = _nothing
    zero = _zero
    stand_ins = {
        "device_count": lambda: NUM_DEVICES,
        "current_device": zero,
        "current_stream": lambda *args: _Stream(),
        "default_stream": lambda *args: _Stream(),
        "Stream": lambda *args, **kwargs: _Stream(),
        "Event": lambda *args, **kwargs: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": nothing,
        "set_device": nothing,
        "empty_cache": nothing,
        "manual_seed": torch.manual_seed,
        "_sleep": nothing,
        "is_initialized": lambda: True,
    }
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.set_device_index = nothing
    # Whether a test may run: some require eight ranks whatever there is.
    torch.accelerator.device_count = lambda: 64
    for name in ("Event", "device_count", "manual_seed", "empty_cache", "set_device"):
        setattr(torch.cpu, name, stand_ins[name])
    for name in ("cuda", "npu"):
        setattr(torch.nn.Module, name, lambda self, device=None: self)
        setattr(torch.Tensor, name, lambda self, device=None, **kwargs: self)
    torch.npu = torch.cuda
    torch.Tensor.pin_memory = lambda self, device=None: self


def _nothing(*args, **kwargs):
    return None


def _zero(*args, **kwargs):
    return 0


def _unchanged(*args, **kwargs):
    """A decorator with arguments that leaves the test as it is."""
    return lambda test: test


def _start_by_fork(case):
    import torch

    case._start_processes(torch.multiprocessing.get_context("fork").Process)


def prepare():
    """Imports torch and its helpers, and changes these. Before any test module."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Nothing here may make torch's pool of threads: ranks are forked from this process.
    import torch

    # They have names of FSDP2 that no user's import changes.
    import torch.distributed._composable.replicate  # noqa: F401
    import torch.distributed.checkpoint.state_dict  # noqa: F401
    import torch.distributed.pipelining  # noqa: F401
    from torch.testing._internal import (
        common_cuda,
        common_distributed,
        common_fsdp,
        inductor_utils,
    )
    from torch.testing._internal.distributed._tensor import common_dtensor

    _stand_in(torch)
    common_cuda.TEST_CUDA = True
    common_cuda.TEST_MULTIGPU = True
    common_fsdp.DEVICE_COUNT = NUM_DEVICES
    common_dtensor.DEVICE_COUNT = NUM_DEVICES
    cases = common_distributed.MultiProcessTestCase
    cases._spawn_processes = _start_by_fork
    # Ranks that are threads of one process become processes.
    common_fsdp.FSDPTestMultiThread = common_fsdp.FSDPTest
    if hasattr(common_fsdp, "FSDPTestContinuous"):
        common_fsdp.FSDPTestContinuous = common_fsdp.FSDPTest
    for name in (
        "skip_if_lt_x_gpu",
        "requires_nccl",
        "requires_nccl_version",
        "requires_accelerator_dist_backend",
        "requires_world_size",
    ):
        if hasattr(common_distributed, name):
            setattr(common_distributed, name, _unchanged)
    # Older tests import these names.
    common_fsdp.test_compiled_fsdp = common_fsdp.compiled_fsdp_test
    inductor_utils.HAS_CUDA = False
    common_dtensor.skip_if_lt_x_gpu = _unchanged
    _stand_in_for_npu(common_fsdp)
    common_fsdp.get_devtype = lambda: torch.device("cpu")


def _stand_in_for_npu(common_fsdp):
    """Ascend's fork of PyTorch has tests of newer versions, for its own device."""
    module = types.ModuleType("torch_npu")
    module.FSDPNPUTest = common_fsdp.FSDPTest
    module.SupportedDevices = _unchanged
    module.skipIfUnsupportMultiNPU = _unchanged
    for name in (
        "torch_npu",
        "torch_npu.testing",
        "torch_npu.testing.common_distributed",
        "torch_npu.testing.common_utils",
        "torch_npu.testing._internal",
        "torch_npu.testing._internal.common_fsdp",
    ):
        sys.modules[name] = module


def set_timeout(seconds):
    from torch.testing._internal import common_distributed

    common_distributed.get_timeout = lambda test_id: seconds


def swap(options):
    """Replaces FSDP2's names with Flatshard's where test modules import them.

    Args:
        options: of fully_shard, for all calls.
    """
    import flatshard

    for holder in _HOLDERS:
        try:
            module = importlib.import_module(holder)
        except ImportError:
            continue
        for name in _SWAPPED:
            if hasattr(module, name):
                own = getattr(flatshard, name, None) or _missing(name)
                if name == "fully_shard" and options:
                    own = functools.partial(own, **options)
                    functools.update_wrapper(own, flatshard.fully_shard)
                setattr(module, name, own)


def _missing(name):
    @functools.wraps(_missing)
    def missing(*args, **kwargs):
        raise unittest.SkipTest(f"flatshard has no {name}")

    return missing
