"""Parameters that are DTensors over another mesh dimension: tensor parallelism.

The core shards the tensor that this rank has of such a parameter, as any other. Modules
see a DTensor over the unsharded one while their unit computes, and users see a DTensor
over both meshes, with FSDP2's placements.
"""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from flatshard._tensor.mesh import joined_meshes, meshes_around, root_names
from flatshard._tensor.row_spec import dtensor
from flatshard._tensor.sharded_tensor import contiguous_stride


class TensorParallel:
    """How one such parameter is shown.

    Attributes:
        made: the tensor that modules see while the unit computes, once it has been
            needed.
        mesh: DeviceMesh of the shard: fully_shard's mesh and the parameter's own.
        shape, stride: of the full tensor.
    """

    def __init__(self, tensor, device_mesh, name):
        """
        Args:
            tensor: as the user passed it.
            device_mesh: of fully_shard.

        Raises:
            ValueError: the meshes do not go together.
        """
        self.made = None
        self._whole = None
        self._num_slice_dims = 0
        self._spec = tensor._spec
        self.shape, self.stride = tensor.shape, tensor.stride()
        own = tensor.device_mesh.mesh_dim_names or ()
        if set(own) & set(device_mesh.mesh_dim_names or ()):
            raise ValueError(
                f"parameter {name} is a DTensor over {tensor.device_mesh}, and "
                f"fully_shard's mesh {device_mesh} shares dimensions with it: expected "
                "other dimensions of one mesh, such as mesh['tp'] and mesh['dp']"
            )
        if not all(p.is_shard() or p.is_replicate() for p in tensor.placements):
            raise ValueError(
                f"parameter {name} has placements {tensor.placements}: expected Shard "
                "and Replicate"
            )
        self.mesh = _joined(device_mesh, tensor.device_mesh)
        if self.mesh is None:
            raise ValueError(
                f"parameter {name} is a DTensor over {tensor.device_mesh}, and "
                f"fully_shard's mesh is {device_mesh}: expected dimensions of one mesh, "
                "such as mesh['tp'] and mesh['dp'] of init_device_mesh(..., "
                "mesh_dim_names=('dp', 'tp'))"
            )

    def become_slice(self, device_mesh, part, whole):
        """Records that the user's tensor is a slice, along its first dimension, of a larger
        one. Ranks that differ along other dimensions have other slices.

        Args:
            device_mesh: of fully_shard.
            part, whole: the core's meshes: for `device_mesh`, and for the model.
        """
        own = self._spec.mesh
        around = meshes_around(device_mesh, part, whole, own.mesh_dim_names)
        self.mesh = joined_meshes([device_mesh, *around, own])
        self._num_slice_dims = len(around)
        rows = math.prod([self.shape[0], *(mesh.size() for mesh in around)])
        self.shape = torch.Size([rows, *self.shape[1:]])
        self.stride = contiguous_stride(self.shape)

    def placements(self, device_mesh, dim, is_cut):
        """Returns the placements of the shard.

        Args:
            device_mesh: of fully_shard.
            dim: along which it is split among the ranks of its last dimension.
            is_cut: False: they all have the full tensor.
        """
        outer = [Replicate()] * (device_mesh.ndim - 1)
        inner = self._inner_placements()
        parts = 1
        for i, placement in enumerate(inner, device_mesh.ndim):
            if placement.is_shard(dim):
                parts *= self.mesh.size(i)
        own = Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)
        return [*outer, own if is_cut else Replicate(), *inner]

    def cuts(self):
        """Returns (dim, size, start, end) of each dimension that is split: the core's
        tensor has the indices start to end, out of `size` of the full tensor."""
        ranges = {}
        inner = self._inner_placements()
        for i, placement in enumerate(inner, self.mesh.ndim - len(inner)):
            if placement.is_replicate():
                continue
            dim = placement.dim
            begin, end = ranges.get(dim, (0, self.shape[dim]))
            length = -(-(end - begin) // self.mesh.size(i))  # as torch.chunk
            first = min(begin + self.mesh.get_local_rank(i) * length, end)
            ranges[dim] = first, min(first + length, end)
        return [(dim, self.shape[dim], *ends) for dim, ends in ranges.items()]

    def names_with_equal(self):
        """Returns the root mesh's dimensions along which ranks have equal values."""
        mesh = self._spec.mesh
        names = zip(mesh.mesh_dim_names, self._spec.placements)
        return root_names(mesh, [name for name, p in names if p.is_replicate()])

    def _inner_placements(self):
        """Returns the placements over the dimensions of its mesh that fully_shard does
        not use."""
        return [Shard(0)] * self._num_slice_dims + [*self._spec.placements]

    @property
    def spec(self):
        """The DTensorSpec of the user's tensor."""
        return self._spec

    @property
    def own_mesh(self):
        """The DeviceMesh of the user's tensor."""
        return self._spec.mesh

    def bind(self, whole):
        """Makes `whole` the core's parameter."""
        self.made, self._whole = None, whole

    @property
    def tensor(self):
        """Returns the tensor that modules see. The core calls it while its parameter
        has values."""
        trains = self._whole.requires_grad
        if self.made is None or self.made.requires_grad != trains:
            self.made = self.make()
        return self.made

    def make(self):
        """Returns another such tensor, with the same values."""
        with torch.inference_mode(False), torch.enable_grad():
            if self._whole.requires_grad:
                made = _Shown.apply(self._whole, self._spec)
                made._is_param = True  # isinstance(it, nn.Parameter)
                return made
            return nn.Parameter(dtensor(self._whole.detach(), self._spec), False)

    def renew(self):
        """Drops the tensor, so that another one is made. Called by the core when a forward
        starts to show it. autograd runs the youngest nodes first, so gradients of one that
        an earlier step made would come after the backward of the full model."""
        self.made = None

    def point(self):
        """Does nothing: the DTensor is a view of the core's parameter. Called by the core
        when the parameter gets values."""

    def clear(self):
        """Does nothing. Called by the core when its parameter loses its values."""


def _joined(first, second):
    """Returns the mesh of the dimensions of both; None where they are not of one
    mesh."""
    try:
        mesh = joined_meshes([first, second])
    except RuntimeError:
        return None
    return mesh if mesh.mesh.unique().numel() == mesh.mesh.numel() else None


class _Shown(torch.autograd.Function):
    """A DTensor over the core's parameter. Its gradient gets the same placements."""

    @staticmethod
    def forward(ctx, whole, spec):
        ctx.spec = spec
        return DTensor(whole.view_as(whole), spec, requires_grad=True)

    @staticmethod
    def backward(ctx, grad):
        if grad.placements != ctx.spec.placements:
            grad = grad.redistribute(placements=ctx.spec.placements)
        return arrived(grad.to_local()), None


def arrived(tensor):
    """Returns `tensor` after waiting for its asynchronous collective. A compiler adds its
    own wait."""
    if torch.compiler.is_compiling() or not hasattr(tensor, "wait"):
        return tensor
    return tensor.wait()


def plain_value(tensor):
    """Returns the tensor of a parameter that the core shards: of a DTensor, this rank's
    part."""
    return tensor._local_tensor if is_tensor_parallel(tensor) else tensor.detach()


def is_tensor_parallel(tensor):
    """Returns whether a tensor is a DTensor of a class other than Flatshard's
    shards."""
    return type(tensor) is DTensor
