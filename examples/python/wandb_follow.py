"""Follows a run's metrics.jsonl and logs it to Weights & Biases, until the run ends.

usage: pip install wandb && python wandb_follow.py outputs/run
"""

import json
import sys
import time
import tomllib
from pathlib import Path

import wandb

folder, seen, ended = Path(sys.argv[1]), 0, False
config = tomllib.loads((folder / "config.toml").read_text())
with wandb.init(project="flatshard", name=folder.name, config=config) as run:
    run.define_metric("*", step_metric="step")
    while not ended:
        rows = (folder / "metrics.jsonl").read_text().split("\n")[:-1]
        for row in map(json.loads, rows[seen:]):
            run.log({k: v for k, v in row.items() if k not in ("time", "start")})
            ended = "ended" in row
        seen = len(rows)
        time.sleep(0 if ended else 5)
