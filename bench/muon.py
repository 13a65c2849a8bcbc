"""Times one update of Muon for the matrices of some layers, by Flatshard and by PyTorch.

python3 bench/muon.py build/flatshard_muon --model 8B --layers 8

Both update float32 weights on one GPU, and Flatshard writes bfloat16 compute weights in
addition. torch.optim.Muon has one parameter per matrix, so each expert is one, and its
gate and up are separate.
"""

import statistics

import torch

from harness.command_line import Parser
from harness.programs import rows_of, write_json
from harness.tables import by_turns, head, row

# {model: the matrices of a layer and how many there are of each}
LAYERS = {
    "8B": [
        ((4096, 4096), 2),
        ((1024, 4096), 2),
        ((14336, 4096), 2),
        ((4096, 14336), 1),
    ],
    "30B-A3B": [
        ((4096, 2048), 1),
        ((512, 2048), 2),
        ((2048, 4096), 1),
        ((768, 2048), 256),
        ((2048, 768), 128),
    ],
}


def torch_ms(model, layers, updates):
    """Returns the median milliseconds of one step of torch.optim.Muon."""
    parameters = [
        torch.nn.Parameter(torch.randn(shape, device="cuda") * 0.02)
        for _ in range(layers)
        for shape, count in LAYERS[model]
        for _ in range(count)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.Muon(parameters, lr=1e-3, weight_decay=0.1)
    times = []
    for _ in range(updates + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        optimizer.step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    del optimizer, parameters
    torch.cuda.empty_cache()
    return statistics.median(times[2:])


def main():
    parser = Parser(__doc__).options("json", layers=8, updates=8, pairs=2)
    parser.add_argument("program", help="build/flatshard_muon")
    parser.add_argument("--model", choices=LAYERS, default="8B")
    args = parser.parse_args()

    def run(way, _):
        if way == "torch.optim.Muon":
            return torch_ms(args.model, args.layers, args.updates)
        numbers = str(args.layers), str(args.updates)
        return rows_of(args.program, args.model, *numbers)[0]["ms"]

    runs = by_turns(["torch.optim.Muon", "Flatshard"], args.pairs, run)
    peer = statistics.median(runs["torch.optim.Muon"])
    head("optimizer", "ms", "of PyTorch's")
    for way, each in runs.items():
        ms = statistics.median(each)
        row(way, f"{ms:.1f}", f"{ms / peer:.2f}")
    write_json(args.json, runs)


if __name__ == "__main__":
    main()
