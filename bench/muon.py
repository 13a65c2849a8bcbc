"""Times one update of Muon for the matrices of some layers, by Flatshard and by PyTorch.

python3 bench/muon.py build/flatshard_muon --model 8B --layers 8
python3 bench/muon.py build/flatshard --nproc 2 --layers 16

Both update float32 weights on one GPU, and Flatshard writes bfloat16 compute weights in
addition. torch.optim.Muon has one parameter per matrix, so each expert is one, and its
gate and up are separate.

With several GPUs the program is the trainer, and whole steps of 8B shapes are timed. The
peer is bench/fsdp2_llama.py: every rank all-gathers and orthogonalizes each matrix.
"Exposed" is communication that no compute hides, in percent of the step.
"""

import statistics

import torch

from harness.command_line import Parser
from harness.programs import fsdp2_steps, machine, rows_of, train_steps, write_json
from harness.tables import by_turns, head, ms_and_range, ratios, row

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
PEER = "torch.optim.Muon"


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


def compare_updates(args):
    def run(way, _):
        if way == PEER:
            return torch_ms(args.model, args.layers, args.updates)
        numbers = str(args.layers), str(args.updates)
        return rows_of(args.program, args.model, *numbers)[0]["ms"]

    runs = by_turns([PEER, "Flatshard"], args.pairs, run)
    peer = statistics.median(runs[PEER])
    head("optimizer", "ms", "of PyTorch's")
    for way, each in runs.items():
        ms = statistics.median(each)
        row(way, f"{ms:.1f}", f"{ms / peer:.2f}")
    return runs


def compare_steps(args):
    def run(way, pair):
        if way == PEER:
            options = [f"--layers={args.layers}", "--optimizer=muon", "--gqa"]
            found = fsdp2_steps(args, args.seq, options)
            exposed = ""
        else:
            settings = [f"model.layers={args.layers}", "optimizer.name=muon", *args.set]
            folder = args.out / f"muon-{pair}"
            found = train_steps(args, args.seq, settings, folder)
            exposed = f"{found['exposed_ms'] / found['ms']:.1%}"
        row(way, ms_and_range(found), f"{found['peak_GiB']:.1f}", exposed)
        return found

    print(f"{args.nproc} ranks on {machine()}, {args.layers} layers, seq {args.seq}\n")
    head("", "ms per step (range)", "peak GiB", "exposed")
    runs = by_turns([PEER, "Flatshard"], args.pairs, run)
    each, median = ratios(*runs.values())
    texts = ", ".join(f"{ratio:.3f}" for ratio in each)
    print(f"\nFlatshard / {PEER}: {texts}; median {median:.3f}")
    return runs


def main():
    parser = Parser(__doc__).options("json", "nproc", layers=8, updates=8, pairs=2)
    parser.options("config", "set", "warmup", "steps", "out", seq=4096)
    parser.add_argument("program", help="build/flatshard_muon, or build/flatshard")
    parser.add_argument("--model", choices=LAYERS, default="8B")
    args = parser.parse_args()
    runs = compare_updates(args) if args.nproc == 1 else compare_steps(args)
    write_json(args.json, runs)


if __name__ == "__main__":
    main()
