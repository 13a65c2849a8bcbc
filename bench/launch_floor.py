"""Measures what CUDA and NCCL alone take of the host for one unit of ZeRO-3, in us.

torchrun --nproc-per-node 2 bench/launch_floor.py

A unit cannot be cheaper than its launches: an all-gather per direction, in the backward
a reduce-scatter and a copy into what it reduces, and the events that order three
streams. They are called straight from the libraries, in the order of a step, without
anything that decides, checks or allocates. The cost of calling from Python is measured
with a function that does nothing, and subtracted. bench/python_hooks.py has the hooks.
"""

import ctypes
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_void_p

import torch
import torch.distributed as dist

from harness.command_line import Parser
from harness.cuda import check, library
from harness.ranks import join, say
from harness.steps import time_steps

NCCL_FLOAT, NCCL_SUM, COPY_ON_DEVICE, NO_TIMING = 7, 0, 3, 2


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * 128)]


class Unit:
    """Holds what a unit needs, and the calls of its forward and its backward: each a
    function and its arguments."""

    def __init__(self, dim):
        self.cuda, self.nccl = library("libcudart.so"), library("libnccl.so")
        rank, size = dist.get_rank(), dist.get_world_size()
        comms = [self._connect(rank, size) for _ in ("gather", "reduce")]
        self.streams = [torch.cuda.Stream(priority=-1) for _ in ("gather", "reduce")]
        gather, reduce = (c_void_p(s.cuda_stream) for s in self.streams)
        compute = c_void_p(torch.cuda.current_stream().cuda_stream)
        numel = dim * dim
        self.memory = [
            torch.zeros(n, device="cuda") for n in (numel // size, numel, numel)
        ]
        shard, whole, grad = (c_void_p(t.data_ptr()) for t in self.memory)
        part, dtype = c_size_t(numel // size), c_int(NCCL_FLOAT)
        weights = (shard, whole, part, dtype, comms[0], gather)
        grads = (whole, shard, part, dtype, c_int(NCCL_SUM), comms[1], reduce)
        pack = (whole, grad, c_size_t(4 * numel), c_int(COPY_ON_DEVICE), compute)
        self.forward = [
            *self._order(compute, gather),  # the memory is free
            (self.nccl.ncclAllGather, weights),
            *self._order(gather, compute),
        ]
        self.backward = [
            *self.forward,
            (self.cuda.cudaMemcpyAsync, pack),
            *self._order(compute, reduce),
            (self.nccl.ncclReduceScatter, grads),
            *self._order(reduce, compute),
        ]

    def _connect(self, rank, size):
        unique = UniqueId()
        if rank == 0:
            check(self.nccl.ncclGetUniqueId(byref(unique)))
        box = [bytes(unique)]
        dist.broadcast_object_list(box)
        ctypes.memmove(byref(unique), box[0], len(box[0]))
        comm = c_void_p()
        check(self.nccl.ncclCommInitRank(byref(comm), c_int(size), unique, c_int(rank)))
        return comm

    def _order(self, before, after):
        """Returns calls that let `after` wait for what `before` has so far."""
        event = c_void_p()
        check(self.cuda.cudaEventCreateWithFlags(byref(event), c_uint(NO_TIMING)))
        return [
            (self.cuda.cudaEventRecord, (event, before)),
            (self.cuda.cudaStreamWaitEvent, (after, event, c_uint(0))),
        ]


def idle(calls):
    """Returns as many calls, with the same arguments, of a function that does nothing."""
    nothing = ctypes.CDLL(None).labs
    return [(nothing, arguments) for _, arguments in calls]


def us_per_unit(calls, args):
    """Returns the least and the median over the steps."""

    def step():
        for _ in range(args.units):
            for function, arguments in calls:
                function(*arguments)

    found = time_steps(step, args, together=True)
    return [1e3 * found[key] / args.units for key in ("host_ms_least", "host_ms")]


def main():
    parser = Parser(__doc__).options(units=64, warmup=5, steps=40)
    parser.add_argument("--dim", type=int, default=256, help="a unit has dim^2 weights")
    args = parser.parse_args()
    join()
    unit = Unit(args.dim)
    for calls in (unit.forward, unit.backward):
        for function, arguments in calls:
            check(function(*arguments))
    for name, calls in (("forward", unit.forward), ("backward", unit.backward)):
        whole, python = us_per_unit(calls, args), us_per_unit(idle(calls), args)
        least, median = (w - p for w, p in zip(whole, python))
        say(
            f"{name}: {least:.1f} us a unit at least, {median:.1f} in the median "
            f"(less {python[1]:.1f} for calling from Python)"
        )
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
