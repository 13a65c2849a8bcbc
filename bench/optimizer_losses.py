"""Trains the demo's model with several optimizers: validation losses, as a picture.

python3 bench/optimizer_losses.py --to docs/optimizers.svg

float32 states are trained with --seeds seeds, everything else with the first seed. The
exit status is 1 when int8 states end farther from float32 states with the same seed than
the seeds end from each other. Run `scripts/demo_data` first: it prepares the dataset.
One rank, on a GPU when there is one, where --jobs runs may train at the same time. --out
stores the losses as losses.json, and --losses draws such a file again without training.
--to needs matplotlib.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import programs
from harness.command_line import Parser
from harness.tables import head, row

WEIGHTS = ["precision.main_params=bfloat16", "precision.compute=bfloat16"]
INT8 = ["optimizer.state_dtype=int8"]
REFERENCE, CHECKED = "AdamW, float32 states", "AdamW, int8 states"
# name: further settings, the color of its curve
WAYS = {
    REFERENCE: ([], "#888888"),
    "AdamW, bfloat16 states": (["optimizer.state_dtype=bfloat16"], "#2f6fb3"),
    CHECKED: (INT8, "#c03020"),
    "AdamW, int8 states, bfloat16 weights, stochastic rounding": (
        [*INT8, *WEIGHTS, "optimizer.stochastic_rounding=true"],
        "#d99020",
    ),
    "AdamW, int8 states, bfloat16 weights": ([*INT8, *WEIGHTS], "#9050a0"),
    "Muon": (["optimizer.name=muon"], "#2a9050"),
}


def train(args, name, seed):
    """Returns the validation losses of a run as (step, loss)."""
    folder = args.out / programs.file_name(name, "seed", seed)
    settings = [
        f"run.seed={seed}",
        "run.save_weights=false",
        f"data.train={args.data}",
        f"data.validation={args.data}",
        f"training.steps={args.steps}",
        f"validation.freq={args.freq}",
        *WAYS[name][0],
    ]
    programs.train(
        args.program, args.config, folder, settings, f"--device={args.device}"
    )
    rows = programs.metrics(folder)
    return [
        (row["step"], row["validation_loss"])
        for row in rows
        if "validation_loss" in row
    ]


def train_all(args):
    """Returns the curves of all ways, each with its name and seed."""

    def curve_of(way):
        name, seed = way
        curve = train(args, name, seed)
        print(f"{name}, seed {seed}: {curve[-1][1]:.4f}", file=sys.stderr)
        return {"name": name, "seed": seed, "validation_losses": curve}

    seeds = range(1, args.seeds + 1)
    ways = [
        (name, seed)
        for name in WAYS
        for seed in seeds
        if seed == 1 or name == REFERENCE
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        return list(pool.map(curve_of, ways))


def ends_of(curves, name):
    """Returns the last losses of a way, by seed."""
    return [c["validation_losses"][-1][1] for c in curves if c["name"] == name]


def print_table(curves):
    """Returns whether int8 states end within the spread of the seeds."""
    steps = curves[0]["validation_losses"][-1][0]
    reference = ends_of(curves, REFERENCE)
    head("", f"validation loss after {steps} steps", "less float32, seed 1", left=(0,))
    for curve in curves:
        end = curve["validation_losses"][-1][1]
        name = f"{curve['name']}, seed {curve['seed']}"
        row(name, f"{end:.4f}", f"{end - reference[0]:+.4f}")
    spread = max(reference) - min(reference)
    apart = abs(ends_of(curves, CHECKED)[0] - reference[0])
    print(f"spread of the seeds {spread:.4f}, int8 states {apart:.4f}")
    return apart <= spread


def draw(curves, to):
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flatshard"  # the same bytes each time
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 4.5))
    for curve in curves:
        name, seed = curve["name"], curve["seed"]
        steps, losses = zip(*curve["validation_losses"])
        style = {"color": WAYS[name][1], "linewidth": 1.2}
        if seed > 1:
            style["linestyle"] = ":"
        seeds = ", seeds dotted" if name == REFERENCE else ""
        panel.plot(
            steps, losses, label=f"{name}{seeds}" if seed == 1 else None, **style
        )
    last = [curve["validation_losses"][-1][1] for curve in curves]
    least = min(last)
    panel.set_ylim(least - 0.05, least + 1.2)
    panel.set_xlabel("step")
    panel.set_ylabel("validation loss, nats per byte")
    panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(to, metadata={"Date": None})


def main():
    parser = Parser(__doc__).options("program", steps=500, seeds=3, freq=25, jobs=1)
    parser.options(
        config="examples/demo.toml",
        data=Path("outputs/demo/data"),
        device="auto",
        out=Path("outputs/optimizer_losses"),
    )
    parser.add_argument("--losses", type=Path, help="losses.json of an earlier call")
    parser.add_argument("--to", type=Path, help="an SVG to draw the curves into")
    args = parser.parse_args()
    if args.losses:
        found = json.loads(args.losses.read_text())
    else:
        found = {"machine": programs.machine(), "curves": train_all(args)}
        programs.write_json(args.out / "losses.json", found)
    within = print_table(found["curves"])
    if args.to:
        draw(found["curves"], args.to)
    return int(not within)


if __name__ == "__main__":
    sys.exit(main())
