"""Parameters of tensor subclasses that choose themselves which tensors are all-gathered.

FSDP2's protocol: `fsdp_pre_all_gather` of a rank's piece returns plain tensors to
all-gather, and `fsdp_post_all_gather` makes of them the tensor that modules compute
with. The core all-gathers these tensors as bytes, as frozen parameters that no module
shows. A trainable parameter has a second place in the core, only for its gradient.
"""

import inspect

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from flatshard import _C
from flatshard._fsdp.parameter import GATHERED
from flatshard._tensor.even_shard import EvenShard
from flatshard._tensor.memory import local_of, storage_of
from flatshard._tensor.sharded_tensor import contiguous_stride
from flatshard.torch_versions import keeps_version

# The parameters of the two signatures, without self.
_SHORT, _LONG = 1, 5


def instead_of(tensor):
    """Returns a hint for FP8 weights of libraries that an option replaces."""
    library = type(tensor).__module__.split(".")[0]
    if library not in ("torchao", "transformer_engine"):
        return ""
    return f". For FP8 weights give ShardOptions(fp8=Float8Policy(...)) and not {library}'s"


def follows_protocol(tensor):
    """Returns whether `tensor` is of a subclass that follows the protocol."""
    names = "fsdp_pre_all_gather", "fsdp_post_all_gather"
    return all(hasattr(tensor, name) for name in names)


def may_follow_protocol(tensor):
    """Returns whether pieces of `tensor` are of its subclass, so that the tensors they
    choose can be all-gathered. Some get the protocol's functions after fully_shard."""
    if follows_protocol(tensor):
        return True
    kind = type(tensor)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    try:
        piece = torch.chunk(tensor.detach(), 1)[0]
        zeros = tensor.new_zeros((1, *tensor.shape[1:]))
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return type(piece) is type(zeros) is kind


def is_extended(tensor):
    """Returns whether an Extension all-gathers it. DTensors have none."""
    if type(tensor) in (nn.Parameter, DTensor):
        return False
    return may_follow_protocol(tensor)


class _Leaf(torch.autograd.Function):
    """Passes the gradient of what modules compute with to the core's parameter."""

    @staticmethod
    def forward(ctx, whole, tensor):
        ctx.dtype = whole.dtype
        return tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        if type(grad) is not torch.Tensor:
            plain = torch.empty(grad.shape, dtype=ctx.dtype, device=grad.device)
            plain.copy_(grad)
            grad = plain
        return grad, None


class Extension:
    """All-gathers one parameter.

    Attributes:
        shard: as in the Parameter.
        tensor: what modules see while the unit computes.
    """

    def __init__(self, p, tensor, mesh, mp_policy):
        """
        Args:
            p: the Parameter.
            tensor: as the user passed it.
            mesh: DeviceMesh.
        """
        self.title = p.label
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.requires_grad = tensor.requires_grad
        self.tensor = None
        self.hidden = []  # the core's parameters of what is all-gathered
        # Not p, because it refers to this object.
        self._module = p.sites[0][0]
        self._whole = None
        self.shard = None
        self._mesh = mesh
        self._mp_policy = mp_policy
        self._param_dtype = p.param_dtype
        self._stride = contiguous_stride(self.shape)
        self._piece = self._cut(tensor.detach())
        self._inputs = []
        self._metadata = None
        self._raw = None
        self._owned = []  # (storage, bytes) that fsdp_post_all_gather allocated
        self._shard_mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]

    # -- the shard -------------------------------------------------------------------

    @torch.no_grad()
    def _cut(self, tensor):
        """Returns this rank's piece, split as in FSDP2: with the operations that subclasses
        implement for it."""
        ranks = self._mesh.size(self._mesh.ndim - 1)
        rank = self._mesh.get_local_rank(self._mesh.ndim - 1)
        chunks = list(torch.chunk(tensor, ranks, dim=0))
        padded = tensor.new_zeros(chunks[0].size())
        if rank >= len(chunks):
            return padded.narrow(0, 0, 0)
        piece = chunks[rank]
        padded.narrow(0, 0, piece.size(0)).copy_(piece)
        return padded.narrow(0, 0, piece.size(0))

    def make_shard(self):
        placements = [Replicate()] * (self._mesh.ndim - 1) + [Shard(0)]
        piece, self._piece = self._piece, None
        data = EvenShard.wrap(piece, self._mesh, placements, self.shape, self._stride)
        self.shard = nn.Parameter(data, requires_grad=self.requires_grad)
        return self.shard

    # -- the core's parameters -------------------------------------------------------

    def members(self):
        """Returns the core's parameters of what is all-gathered, to pass to `own`."""
        self._ask()
        ranks = self._shard_mesh.size()
        made = []
        for i, tensor in enumerate(self._inputs):
            shape = ranks, tensor.numel() * tensor.element_size()
            memory = torch.empty(shape, dtype=torch.uint8, device="meta")
            made.append(
                _C.Member(
                    name=f"{self.title}.gathered_{i}",
                    whole=memory,
                    values=memory,
                    compute_dtype=None,
                    reduce_dtype=torch.float32,
                    float8=False,
                    trainable=False,
                    apart=GATHERED,
                    has_weights=True,
                    granularity="chunk",
                )
            )
        return made

    def own(self, core, first, whole):
        """Makes the parameters of `core` from number `first` on those that belong to
        `members`.

        Args:
            whole: the core's parameter with the gradient; None for a frozen one.

        Returns:
            The number after them.
        """
        end = first + len(self._inputs)
        self.hidden = [core.whole(i) for i in range(first, end)]
        self._rows = [core.shard(i) for i in range(first, end)]
        self._raw, self.tensor, self._owned = None, None, []
        self._whole = whole
        return end

    @torch.no_grad()
    def refresh(self):
        """Updates the tensors to all-gather. Called before a forward if the piece may have
        been written."""
        self._ask()
        for row, tensor in zip(self._rows, self._inputs):
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            if flat.numel() != row.numel():
                raise RuntimeError(
                    f"parameter {self.title}: fsdp_pre_all_gather gave "
                    f"{tuple(tensor.shape)} {tensor.dtype}, of another size than before; "
                    "expected inputs of one size"
                )
            row.view(-1).copy_(flat)
        if self._rows and not self._mesh.size(self._mesh.ndim - 1) > 1:
            self.point()

    def _ask(self):
        piece = local_of(self.shard)
        if not follows_protocol(piece):
            raise NotImplementedError(
                f"parameter {self.title}: its piece is a {type(piece).__name__} without "
                "fsdp_pre_all_gather and fsdp_post_all_gather, and sharding would turn it "
                "into a plain tensor: put nn.Parameter(its plain values) in its place "
                "before fully_shard, name it in ignored_params, or give the subclass "
                f"these functions{instead_of(piece)}"
            )
        number = len(inspect.signature(piece.fsdp_pre_all_gather).parameters)
        if number not in (_SHORT, _LONG):
            raise TypeError(
                f"parameter {self.title}: expected fsdp_pre_all_gather(mesh) or "
                "fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy), "
                f"got {number} parameters"
            )
        arguments = [self._shard_mesh]
        if number == _LONG:
            arguments += [self.shape, self._stride, self._module(), self._mp_policy]
        with torch.no_grad():
            inputs, self._metadata = piece.fsdp_pre_all_gather(*arguments)
        self._inputs = list(inputs)

    # -- what modules see ------------------------------------------------------------

    def renew(self):
        """Does nothing, because each forward shows the same tensor. Called by the core when
        a forward starts to show it."""

    @torch.no_grad()
    def point(self):
        """Lets the core's parameters refer to the all-gathered tensors."""
        with torch.inference_mode(False), torch.no_grad():
            outputs = tuple(
                hidden.view(-1).view(tensor.dtype).view(-1, *tensor.shape[1:])
                for hidden, tensor in zip(self.hidden, self._inputs)
            )
            piece = local_of(self.shard)
            dtype = self._param_dtype or self.dtype
            if self._raw is not None:
                for storage, nbytes in self._owned:
                    storage.resize_(nbytes)
                with keeps_version(self._raw):
                    piece.fsdp_post_all_gather(
                        outputs, self._metadata, dtype, out=self._raw
                    )
                return
            made, inner = piece.fsdp_post_all_gather(outputs, self._metadata, dtype)
            gathered = set(map(storage_of, outputs))
            for tensor in inner:
                storage = tensor.untyped_storage()
                if storage_of(tensor) not in gathered:
                    self._owned.append((storage, storage.nbytes()))
            self._raw = torch.as_strided(made, self.shape, self._stride, 0)
        if not self.requires_grad:
            self.tensor = nn.Parameter(self._raw, requires_grad=False)
            return
        with torch.inference_mode(False), torch.enable_grad():
            self.tensor = _Leaf.apply(self._whole, self._raw)

    def clear(self):
        """Frees the all-gathered tensors."""
        for storage, _ in self._owned:
            storage.resize_(0)
