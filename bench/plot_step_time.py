"""Draws step times that bench/compare.py measured, with the limit, as an SVG.

python3 bench/plot_step_time.py outputs/compare/compare.json --to step_time.svg

A panel for each sequence length has FSDP2's fastest setting and Flatshard. A line shows
the time of the GEMMs, attention, and other kernels of a step on an otherwise idle GPU.
Needs matplotlib.
"""

import json
import re
from pathlib import Path

from harness.command_line import Parser

# ms, Llama-3-8B on an H200.
LIMITS = {8192: 715, 2048: 185}


def bars(result):
    """Returns {seq: {"FSDP2": ms, "Flatshard": ms}} of the fastest of each."""
    found = {}
    for row in result["rows"]:
        best = found.setdefault(int(re.search(r"seq (\d+)", row["name"])[1]), {})
        who = "FSDP2" if row["name"].startswith("FSDP2") else "Flatshard"
        best[who] = min(best.get(who, float("inf")), row["ms"])
    return found


def main():
    parser = Parser(__doc__).options("to")
    parser.add_argument("compare", type=Path, help="compare.json")
    args = parser.parse_args()
    try:
        import matplotlib
    except ImportError:
        parser.exit(1, "expected matplotlib: pip install -r requirements-dev.txt\n")
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flatshard"  # the same bytes each time
    from matplotlib import pyplot

    result = json.loads(args.compare.read_text())
    found = bars(result)
    size = (4 * len(found), 4)
    figure, panels = pyplot.subplots(1, len(found), figsize=size, squeeze=False)
    for panel, (seq, ms) in zip(panels[0], found.items()):
        names = ["FSDP2", "Flatshard"]
        drawn = panel.bar(names, [ms[n] for n in names], color=["#b0b0b0", "#2f6fb3"])
        panel.bar_label(drawn, fmt="%.0f")
        panel.margins(y=0.1)  # for the labels
        if seq in LIMITS:
            panel.axhline(LIMITS[seq], color="#c03020", linestyle="--", linewidth=1)
            panel.text(-0.45, LIMITS[seq], f" limit {LIMITS[seq]}", va="bottom")
        panel.set_title(f"seq {seq}")
        panel.set_ylabel("ms per step")
    figure.suptitle(f"Llama-3-8B, ZeRO-3, {result['machine']}")
    figure.tight_layout()
    figure.savefig(args.to, metadata={"Date": None})


if __name__ == "__main__":
    main()
