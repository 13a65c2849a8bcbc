"""Tokens per second and peak memory of `flatshard data prepare`, alternating with
`datasets.map` and, with --other, with another build of the program.

python3 bench/prepare.py build/flatshard --work outputs/prepare --megabytes 1000

JSON lines and a byte-pair tokenizer of 128,000 words are made once in --work, of the
texts below --texts (*.py, *.txt, *.md, *.rst). It needs `pip install 'flatshard[data]'
datasets` in this Python."""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from harness.command_line import Parser

MAP = """
import sys
from datasets import load_dataset
from transformers import AutoTokenizer
rows, tokenizer, out, cache = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(tokenizer)
data = load_dataset("json", data_files=rows, split="train", cache_dir=cache)
data = data.map(
    lambda rows: tokenizer(rows["text"]), batched=True, num_proc=2,
    remove_columns=data.column_names,
)
data.save_to_disk(out)
"""


def documents(folder):
    for path in sorted(Path(folder).rglob("*")):
        if path.suffix in (".py", ".txt", ".md", ".rst") and path.is_file():
            text = path.read_text(errors="replace")
            yield from (text[at : at + 8000] for at in range(0, len(text), 8000))


def make_rows(path, folder, nbytes):
    """Writes JSON lines of documents, again from the first one where there are too few."""
    with open(path, "w") as file:
        while file.tell() < nbytes:
            for text in documents(folder):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                if file.tell() >= nbytes:
                    break


def make_tokenizer(folder, texts, nbytes=40_000_000):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def some():
        left = nbytes
        for text in documents(texts):
            yield text
            left -= len(text)
            if left < 0:
                return

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=128_000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(some(), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def run(command):
    """Returns seconds, seconds of all cores, and the peak memory in MB of the process
    and of those that it started."""
    begin = time.monotonic()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
    environment["FLATSHARD_PYTHON"] = sys.executable
    child = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, env=environment
    )
    peak = 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    while child.poll() is None:
        peak = max(peak, memory_of(child.pid))
        time.sleep(0.05)
    if child.returncode:
        sys.exit(f"{command[0]} ended with {child.returncode}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - begin, cores, peak


def memory_of(pid):
    """Returns the proportional memory in MB of a process and of those below it."""
    total, pids = 0, [pid]
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(x.split()[1]) for x in lines if x.startswith("Pss:"))
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            pids += map(int, children.split())
        except OSError:  # it has ended
            continue
    return total // 1000


def main():
    parser = Parser(__doc__)
    parser.add_argument("program", help="the trainer")
    parser.add_argument(
        "--work", type=Path, required=True, help="a folder for its files"
    )
    parser.add_argument("--megabytes", type=int, default=1000, help="of JSON lines")
    parser.add_argument("--texts", default=sysconfig.get_paths()["purelib"])
    parser.add_argument("--other", help="another build of the program")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    options = parser.parse_args()
    work = options.work
    work.mkdir(exist_ok=True)
    rows, tokenizer = work / f"{options.megabytes}.jsonl", work / "tokenizer"
    if not tokenizer.exists():
        make_tokenizer(tokenizer, options.texts)
    if not rows.exists():
        make_rows(rows, options.texts, options.megabytes * 1_000_000)
    out = work / "out"
    prepare = ["data", "prepare", "--force", "--input", rows, "--tokenizer", tokenizer]
    prepare += ["--validation-fraction", "0", "--output", out]
    names = {"flatshard": [options.program, *prepare]}
    if options.other:
        names["other"] = [options.other, *prepare]
    arguments = [rows, tokenizer, work / "map", work / "cache"]
    names["datasets.map"] = [sys.executable, "-c", MAP, *arguments]
    runs = {name: [] for name in names}
    for at in range(options.rounds):
        # The order alternates, since the machine may be shared.
        for name, command in list(names.items())[:: -1 if at % 2 else 1]:
            for folder in ("map", "cache"):
                shutil.rmtree(work / folder, ignore_errors=True)
            runs[name].append(run(command))
            seconds, cores, peak = runs[name][-1]
            text = f"{seconds:7.1f} s, {cores:7.1f} s of cores, peak {peak} MB"
            print(f"{name:<12} {text}", flush=True)
    count = json.loads((out / "meta.json").read_text())["num_tokens"]
    print(f"{count} tokens of {options.megabytes} MB")
    for name, found in runs.items():
        # Ratios within a round, since the machine may be shared.
        pairs = list(zip(found, runs["flatshard"], strict=True))
        wall, cores = (
            statistics.median(theirs[i] / mine[i] for theirs, mine in pairs)
            for i in (0, 1)
        )
        rate = count / statistics.median(seconds for seconds, *_ in found) / 1e6
        print(
            f"{name:<12} {rate:.3f} M tokens/s; flatshard: {wall:.2f} times as fast, "
            f"{cores:.2f} by seconds of cores"
        )


if __name__ == "__main__":
    main()
