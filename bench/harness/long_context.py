"""Long sequences in plain PyTorch: losses in chunks, and recomputed blocks whose inputs are
stored in host memory."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def loss_of_chunk(hidden, weight, targets):
    logits = (hidden @ weight.T).float()
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)


def chunked_loss(hidden, weight, targets, chunk, loss=loss_of_chunk):
    """Returns the sum of the losses of all tokens; the logits of one chunk exist at once.

    Args:
        hidden: [tokens, dim], after the last norm.
        weight: of the head.
        targets: [tokens]; -100 is left out.
        chunk: tokens, or 0 for all at once.
        loss: loss_of_chunk, or a compiled one.
    """
    if not chunk:
        return loss(hidden, weight, targets)
    return sum(
        checkpoint(loss, x, weight, t, use_reentrant=False, preserve_rng_state=False)
        for x, t in zip(hidden.split(chunk), targets.split(chunk))
    )


class HostCopies:
    """Copies the inputs of recomputed blocks to pinned memory and back, on two streams.

    The backward of a block starts the upload for the previous block.
    """

    def __init__(self):
        on_gpu = torch.cuda.is_available()
        self.streams = [torch.cuda.Stream() for _ in range(2)] if on_gpu else None
        self.waiting = []

    def download(self, x):
        if self.streams is None:
            self.waiting.append([x.clone(), None, None])
            return self.waiting[-1]
        stream = self.streams[0]
        stream.wait_stream(torch.cuda.current_stream())
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(x, non_blocking=True)
        x.record_stream(stream)
        self.waiting.append([host, None, stream.record_event()])
        return self.waiting[-1]

    def upload(self, entry):
        host, _, downloaded = entry
        if self.streams is None:
            entry[1] = host
            return
        stream = self.streams[1]
        entry[1] = torch.empty_like(host, device="cuda", pin_memory=False)
        stream.wait_stream(torch.cuda.current_stream())  # the memory's last reader
        stream.wait_event(downloaded)
        with torch.cuda.stream(stream):
            entry[1].copy_(host, non_blocking=True)
        entry[2] = stream.record_event()

    def take(self, entry):
        """Returns the input on the GPU, and starts the upload of the one before."""
        if entry[1] is None:
            self.upload(entry)
        while self.waiting and self.waiting.pop() is not entry:
            pass
        if self.streams is not None:
            torch.cuda.current_stream().wait_event(entry[2])
        taken, entry[1] = entry[1], None
        if self.waiting:
            self.upload(self.waiting[-1])
        return taken


class HostCheckpoint(nn.Module):
    """Recomputes a block in the backward. Host memory stores its first input."""

    def __init__(self, block, copies):
        super().__init__()
        self.block, self.copies = block, copies

    def forward(self, x, *args, **kwargs):
        place = x.data_ptr()

        def pack(tensor):
            moved = tensor.data_ptr() == place and tensor.shape == x.shape
            return self.copies.download(tensor) if moved else tensor

        def unpack(packed):
            return self.copies.take(packed) if isinstance(packed, list) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return checkpoint(self.block, x, *args, use_reentrant=False, **kwargs)
