"""The forms in which inference engines receive tensors."""

import os
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flatshard.torch_versions import shared_memory_handle
from flatshard.weights.source import Source, Stream


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor in a bucket: the fields of SGLang's FlattenedTensorMetadata."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int  # bytes, as all places


@dataclass(frozen=True)
class Bucket:
    """Tensors in one.

    Attributes:
        flattened_tensor: uint8, the bytes of all tensors.
        metadata: the place of each.
    """

    flattened_tensor: torch.Tensor
    metadata: list[TensorInfo]

    @property
    def names(self) -> list[str]:
        return [info.name for info in self.metadata]

    @property
    def dtypes(self) -> list[str]:
        """Returns the names of dtypes in a request, such as "bfloat16"."""
        return [str(info.dtype).removeprefix("torch.") for info in self.metadata]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(info.shape) for info in self.metadata]


def buckets(source: Source, nbytes: int) -> Stream[Bucket]:
    if nbytes < 1:
        raise ValueError(f"nbytes: expected at least 1, got {nbytes}")
    return Stream(_buckets(source, nbytes))


def _buckets(source, nbytes):
    sizes = [(meta, _nbytes(meta)) for meta in source.metadata()]
    tensors = iter(source)
    try:
        while sizes:
            infos, end = [], 0
            while sizes and (not infos or _fits(*sizes[0], end, nbytes)):
                (name, dtype, shape), size = sizes.pop(0)
                shape = torch.Size(shape)
                infos.append(TensorInfo(name, shape, dtype, end, end + size, size))
                end += size
            yield _filled(infos, end, tensors)
    finally:
        tensors.close()


def _fits(meta, size, end, nbytes):
    """Returns whether a bucket has room for a tensor at `end`. SGLang makes a view of it,
    so it starts at a multiple of its elements' size."""
    return end % meta.dtype.itemsize == 0 and end + size <= nbytes


def _filled(infos, nbytes, tensors):
    flat = None
    for info in infos:
        _, tensor = next(tensors)
        if flat is None:
            flat = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
        part = flat[info.start_idx : info.end_idx]
        part.copy_(tensor.reshape(-1).view(torch.uint8))
    return Bucket(flat, infos)


def _nbytes(meta):
    return meta.dtype.itemsize * torch.Size(meta.shape).numel()


class IpcTensor(NamedTuple):
    """A tensor that another process on the same GPU can open.

    Attributes:
        handle: by the UUID of the GPU, a function and its arguments: function(*arguments)
            returns the tensor in the other process.
    """

    name: str
    dtype: torch.dtype
    shape: tuple
    handle: dict


def handles(source: Source) -> Stream[list[IpcTensor]]:
    if source.device.type != "cuda":
        raise ValueError(
            f"ipc_handles: expected a model on a GPU, got one on {source.device}; use "
            "stream"
        )
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get(
        "PYTORCH_ALLOC_CONF", ""
    )
    if "expandable_segments:true" in allocator.lower().replace(" ", ""):
        raise ValueError(
            "ipc_handles: memory of expandable segments cannot be opened by another "
            "process; leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or use "
            "stream"
        )
    return Stream(_handles(source))


def _handles(source):
    uuid = str(torch.cuda.get_device_properties(source.device).uuid)
    groups = source.iter_groups()
    try:
        for group in groups:
            yield [
                IpcTensor(
                    name,
                    tensor.dtype,
                    tuple(tensor.shape),
                    {uuid: shared_memory_handle(tensor)},
                )
                for name, tensor in group
            ]
    finally:
        groups.close()
