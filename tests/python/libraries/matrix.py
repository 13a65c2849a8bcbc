"""Runs the cases of libraries with FSDP2 and with Flatshard, and compares.

usage: python -m tests.python.libraries.matrix [--quick] [--to FOLDER] [-k REGEX]
                                              [MODULE ...]

scripts/library_matrix calls this with the Python whose libraries are to be tried.
Prints a line for each case, with the largest difference of its numbers, and `N passed,
N failed`. A case passes if Flatshard's numbers are FSDP2's within TOLERANCE. Modules
whose library is not installed are left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

# {module: the library that it needs}
MODULES = {
    "accelerate_cases": "accelerate",
    "trainer_cases": "transformers",
    "trl_cases": "trl",
    "lightning_cases": "lightning",
    "qlora_cases": "bitsandbytes",
    "torchao_cases": "torchao",
}
LIBRARIES = (
    "torch",
    "accelerate",
    "transformers",
    "peft",
    "trl",
    "lightning",
    "bitsandbytes",
    "torchao",
)
# CI runs these. Each needs a few seconds.
QUICK = (
    r"accelerate_cases\.(plain|tied|accumulate|bf16|hsdp|cpu_ram_efficient_loading"
    r"|prepare_twice|save_state_sharded|save_state_full|lora)$"
    r"|trainer_cases\.(train|train_twice|resume_full|best_model_sharded)$"
)
# Of float32 in another order of sums, relative to numbers above 1.
TOLERANCE = 1e-5
# A bfloat16 sum in another order differs by a unit in the last place, 2**-8. An optimizer
# step of 1e-2 passes on a part of it.
BF16_TOLERANCE = 2e-2
# {case: reason} of those that FSDP2 does not pass.
ONLY_FLATSHARD = {
    **{
        f"{cases}.{optimizer}_of_flatshard": "an optimizer of flatshard.optim"
        for cases in ("accelerate_cases", "trainer_cases")
        for optimizer in ("int8_adamw", "muon")
    },
    "accelerate_cases.encoder_decoder": "transformers 5: the embedding becomes two copies",
    "trainer_cases.adafactor": "Adafactor mixes tensors and DTensors",
    "trl_cases.sft_best_model": "an evaluation leaves the list unit of the head sharded",
}


def versions():
    """Returns {library: version} of those that are installed."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def start(args, way, to):
    command = [sys.executable, "-m", "tests.python.libraries.run_cases"]
    if way == "flatshard":
        command = [sys.executable, "-m", "flatshard.as_fsdp2", "--require", *command]
    command += ["--to", to / way, "-k", args.k, *args.modules]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    (to / way).mkdir(parents=True)
    with open(to / f"{way}.log", "w") as log:
        return subprocess.Popen(
            list(map(str, command)),
            env=os.environ | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def rows_of(folder):
    path = folder / "cases.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["case"]: row for row in map(json.loads, lines)}


def leaves(value, path=""):
    """Yields (path, value) of what is in nested dicts and lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{i}")
    else:
        yield path, value


def difference(a, b):
    """Returns the largest relative difference of two leaves; inf: no numbers, unequal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return float("inf")
        a, b = a.double(), b.double()
        scale = torch.clamp(torch.maximum(a.abs(), b.abs()), min=1.0)
        return ((a - b).abs() / scale).max().item() if a.numel() else 0.0
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) / max(1.0, abs(a), abs(b))
    return 0.0 if a == b else float("inf")


def compare(first, second):
    """Returns (the largest difference, where it is)."""
    a, b = dict(leaves(first)), dict(leaves(second))
    worst = 0.0, ""
    for path in a.keys() | b.keys():
        found = difference(a.get(path), b.get(path))
        if not found <= worst[0]:
            worst = found, path
    return worst


def judge(name, rows, to):
    """Returns (whether the case passed, what happened)."""
    errors = {way: row["error"] for way, row in rows.items() if row["error"]}
    if "flatshard" in errors:
        also = "" if "fsdp2" not in errors else f"; FSDP2: {errors['fsdp2']}"
        return False, f"{errors['flatshard']}{also}"
    if "fsdp2" in errors:
        expected = ONLY_FLATSHARD.get(name)
        return expected is not None, f"only Flatshard: {expected or errors['fsdp2']}"
    results = [
        torch.load(to / way / f"{name}.pt", weights_only=True)
        for way in ("fsdp2", "flatshard")
    ]
    worst, where = compare(*results)
    limit = BF16_TOLERANCE if "bf16" in name or "autocast" in name else TOLERANCE
    return worst <= limit, f"{worst:.0e}{'' if worst <= limit else f' at {where}'}"


def run(args, to):
    """Returns the number of cases that passed, and of the others."""
    processes = [start(args, way, to) for way in ("fsdp2", "flatshard")]
    codes = [process.wait() for process in processes]
    rows = {way: rows_of(to / way) for way in ("fsdp2", "flatshard")}
    passed = failed = 0
    for name in dict.fromkeys([*rows["fsdp2"], *rows["flatshard"]]):
        of_case = {way: rows[way].get(name) for way in rows}
        if None in of_case.values():
            ok, text = False, "did not run with both"
        else:
            ok, text = judge(name, of_case, to)
        passed, failed = passed + ok, failed + (not ok)
        print(f"{'ok    ' if ok else 'FAILED'}  {name:48} {text}", flush=True)
    if any(codes):
        failed += 1
        print(f"FAILED  the processes ended with {codes}; see {to}/*.log")
    return passed, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, help="a folder to keep results and logs")
    parser.add_argument("-k", default="", help="only cases whose names have it")
    parser.add_argument("--quick", action="store_true", help="a part of the cases")
    parser.add_argument("modules", nargs="*", default=list(MODULES))
    args = parser.parse_args()
    found = versions()
    print(*(f"{library} {number}" for library, number in found.items()), flush=True)
    args.modules = [name for name in args.modules if MODULES[name] in found]
    if not args.modules:
        print("left out: the modules' libraries are not installed\n0 passed, 0 failed")
        return
    if args.quick:
        args.k, args.modules = QUICK, ["accelerate_cases", "trainer_cases"]
    with tempfile.TemporaryDirectory() as folder:
        to = args.to or Path(folder)
        passed, failed = run(args, to / f"transformers-{found.get('transformers')}")
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0 or passed == 0)


if __name__ == "__main__":
    main()
