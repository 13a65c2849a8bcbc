#!/usr/bin/env python3
"""The commands of docs/guides/pretrain.md, and so examples/pretrain_1b.toml, on a tiny
model: texts become a dataset, two ranks train on it from random weights, resume, and
the export has the loss of the run.

Exits with 77 (skipped) without tokenizers.

usage: pretrain_guide.py PROGRAM
"""

import json
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.guide import Guide  # noqa: E402
from tests.support.program import expect  # noqa: E402

SMALL = [
    "model.dim=48",
    "model.layers=2",
    "model.heads=4",
    "model.kv_heads=2",
    "model.head_dim=12",
    "model.ffn_dim=96",
    "model.vocab_size=260",
    "model.max_seq_len=64",
    "training.steps=80",
    "training.seq_len=64",
    "training.global_batch_size=8",
    "training.local_batch_size=2",
    "optimizer.lr=1e-2",
    "lr_scheduler.warmup_steps=5",
    "precision.compute=float32",
    "validation.freq=20",
    "validation.sequences=8",
    "checkpoint.interval=20",
    "metrics.log_freq=10",
]


def write_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate(["<|endoftext|>", *letters])}
    merges = [("t", "h"), ("th", "e")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    bpe = Tokenizer(models.BPE(vocab, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|endoftext|>"])
    folder.mkdir(parents=True)
    bpe.save(str(folder / "tokenizer.json"))


def write_texts(folder):
    folder.mkdir(parents=True)
    rows = [
        {"text": f"Once upon a time the fox met the {i % 7}. " * (1 + i % 4)}
        for i in range(300)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def follow(guide):
    said = guide.run("data prepare")
    expect("documents        300" in said, said)
    guide.run("data info")
    expect("GPU-hours" in guide.run("plan"), "plan: expected GPU-hours")
    guide.run("plan")  # --sweep

    guide.run("train")
    rows = guide.rows("outputs/pretrain_1b/metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    expect(losses[0] > 5 and losses[-1] < 1.2, f"losses {losses}")
    guide.settings = [*guide.settings, "training.steps=84"]
    guide.run("train")  # --resume
    rows = guide.rows("outputs/pretrain_1b/metrics.jsonl")
    expect(max(row["step"] for row in rows) == 84, "the run did not resume")
    said = guide.run("checkpoint list")
    expect("84" in said, said)
    guide.run("report")

    loss = guide.loss("evaluate --run")
    expect(loss < 1.2, f"loss {loss}")
    documents = guide.rows("losses.jsonl")
    expect(all(row["bytes"] >= row["tokens"] - 1 for row in documents), documents[0])
    guide.run("export")
    exported = guide.loss("evaluate --hf")
    # Weights in bfloat16.
    expect(abs(exported - loss) < 0.05, f"from {loss} to {exported}")
    said = guide.run("generate")
    expect("Once upon a time the fox met the" in said, said)


def main():
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        return SKIPPED
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        guide = Guide("pretrain.md", sys.argv[1], folder, SMALL)
        write_tokenizer(folder / "models/tokenizer")
        write_texts(folder / "texts/web")
        follow(guide)
        guide.end()
    print("passed: texts became a model that continues them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
