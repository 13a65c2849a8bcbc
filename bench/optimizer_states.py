"""Times one AdamW update with 8-bit states: Flatshard's kernel and its peers.

python3 bench/optimizer_states.py build/flatshard_kernels --json states.json

Peers are torch.optim.AdamW(fused=True) with float32 states, torchao's AdamW8bit and
bitsandbytes' AdamW8bit (`pip install torchao bitsandbytes`; a peer that is not installed
is left out). They update 1.0e9 float32 parameters in 40 tensors and alternate, and the
median of the rounds counts. Flatshard's kernel updates one shard of 2^26 elements, and
its time is scaled to 1.0e9. One GPU with 48 GB of free memory, two minutes.
"""

import importlib
import statistics

import torch

from harness.command_line import Parser
from harness.programs import rows_of, write_json
from harness.tables import head, row

TENSORS, NUMEL, SHARD = 40, 25_000_000, 1 << 26
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def torch_fused(parameters):
    return torch.optim.AdamW(parameters, fused=True, **OPTIONS)


def torchao_8bit(parameters):
    return importlib.import_module("torchao.optim").AdamW8bit(parameters, **OPTIONS)


def bitsandbytes_8bit(parameters):
    return importlib.import_module("bitsandbytes.optim").AdamW8bit(
        parameters, **OPTIONS
    )


PEERS = {
    "torch fused, float32 states": torch_fused,
    "torchao AdamW8bit": torchao_8bit,
    "bitsandbytes AdamW8bit": bitsandbytes_8bit,
}


class Peer:
    """An optimizer with its own parameters."""

    def __init__(self, make):
        self.parameters = [
            torch.nn.Parameter(torch.randn(5000, NUMEL // 5000, device="cuda"))
            for _ in range(TENSORS)
        ]
        for parameter in self.parameters:
            parameter.grad = torch.randn_like(parameter)
        self.optimizer = make(self.parameters)
        self.first_ms = self.milliseconds()
        self.milliseconds()

    def milliseconds(self):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.optimizer.step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def main():
    parser = Parser(__doc__).options("json", rounds=15)
    parser.add_argument("program", help="build/flatshard_kernels")
    args = parser.parse_args()
    done = []
    for found in rows_of(args.program, "8192", "AdamW"):
        if found["op"].startswith("AdamW") and found["shape"] == "shard":
            ms = found["us"] * 1e-3 * TENSORS * NUMEL / SHARD
            done.append({"update": f"Flatshard, {found['op']}", "ms": ms})
    # All are in memory, so that they alternate.
    peers = {}
    for name, make in PEERS.items():
        try:
            peers[name] = Peer(make)
        except ImportError as error:
            print(f"{name}: left out, {error}")
    rounds = {name: [] for name in peers}
    for _ in range(args.rounds):
        for name, peer in peers.items():
            rounds[name].append(peer.milliseconds())
    for name, times in rounds.items():
        done.append(
            {
                "update": name,
                "ms": statistics.median(times),
                "first_ms": peers[name].first_ms,
            }
        )
    head("update", "ms for 1.0e9", left=(0,))
    for found in done:
        row(found["update"], f"{found['ms']:.2f}")
    write_json(args.json, done)


if __name__ == "__main__":
    main()
