#!/usr/bin/env python3
"""Runs the commands of docs/guides/finetune.md, and so examples/finetune_chat.toml, on
a tiny model, and the commands of docs/guides/generate.md. Chats become a dataset with
masks, two ranks train on them, and run and export answer as they were taught.

Exits with 77 (skipped) without transformers.

usage: finetune_guide.py PROGRAM
"""

import json
import re
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.guide import Guide  # noqa: E402
from tests.support.program import expect  # noqa: E402

SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if enable_thinking is defined and not enable_thinking %}b{% endif %}"
    "{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content }}<|end|>{%- endgeneration -%}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMALL = [
    "training.steps=60",
    "training.seq_len=64",
    "training.global_batch_size=8",
    "training.local_batch_size=2",
    "optimizer.lr=1e-2",
    "lr_scheduler.warmup_steps=5",
    "precision.compute=float32",
    "validation.freq=30",
    "validation.sequences=8",
    "checkpoint.interval=60",
    "metrics.log_freq=10",
]


def write_model(folder):
    """A tiny Llama with random weights, and a byte-level tokenizer with a template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*SPECIAL, *letters])}
    bpe = Tokenizer(models.BPE(vocab, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=SPECIAL[0],
        additional_special_tokens=SPECIAL[1:],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)


def write_chats(path):
    """Writes questions of any length. The first letter selects one of two answers."""
    rows = []
    for i in range(160):
        first = "ab"[i % 2]
        question = first + "xyz"[i % 3] * (i % 17)
        answer = {"a": "yes", "b": "no"}[first]
        rows.append({"prompt": question, "completion": answer})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main():
    try:
        import jinja2  # noqa: F401
        import transformers
    except ImportError:
        return SKIPPED
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        guide = Guide("finetune.md", sys.argv[1], folder, SMALL)
        write_model(folder / "models/base")
        write_chats(folder / "chats.jsonl")
        follow(guide, folder)
        guide.end()
        guide = Guide("generate.md", sys.argv[1], folder, SMALL)
        follow_generate(guide, folder)
        guide.end()

        exported = folder / "outputs/finetune_chat/hf"
        tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
        model = transformers.AutoModelForCausalLM.from_pretrained(exported)
        for question, answer in (("axx", "yes"), ("byyy", "no")):
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )["input_ids"]
            out = model.generate(ids, max_new_tokens=8, do_sample=False)
            text = tokenizer.decode(out[0, ids.shape[1] :])
            expect(text == answer + "<|end|>", f"{question}: {text!r}")
    print("passed: chats became a model that answers")
    return 0


def follow(guide, folder):
    said = guide.run("data prepare --chat")
    expect(re.search(r"\((\d+) of them trained\)", said), said)
    shown = guide.run("data show")
    expect("<|assistant|>[[yes<|end|>]]" in shown, shown)
    expect("--- document 2: " in shown, shown)
    before = guide.loss("evaluate --hf models/base")

    said = guide.run("plan")
    expect("tokens/s" in said, said)
    said = guide.run("train")
    full = re.search(r"data: .*chats: (\d+) documents .* ([\d.]+) % full", said)
    expect(full and float(full[2]) > 80, said)
    rows = guide.rows("outputs/finetune_chat/metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    expect(losses[0] > 4 and losses[-1] < 0.2, f"losses {losses}")
    guide.run("report")

    after = guide.loss("evaluate --run")
    expect(before > 4 and after < 0.2, f"from {before} to {after}")
    documents = guide.rows("losses.jsonl")
    # An answer and the token that ends it. That token has no text.
    kinds = {(row["tokens"], row["bytes"]) for row in documents}
    expect(kinds == {(4, 3), (3, 2)}, f"documents {kinds}")
    tokens = sum(row["tokens"] for row in documents)
    mean = sum(row["loss"] * row["tokens"] for row in documents) / tokens
    expect(abs(mean - after) < 1e-4, f"documents have {mean}, all {after}")

    # Its question starts with neither letter.
    said = guide.run("generate --run outputs/finetune_chat --chat --prompt")
    expect(len(said.splitlines()) >= 1, said)
    messages = [{"role": "user", "content": "ayy"}]
    (folder / "messages.json").write_text(json.dumps(messages))
    said = guide.run("generate --run outputs/finetune_chat --chat --messages")
    expect(said.splitlines()[0] == "yes", said)

    exported = guide.loss("evaluate --hf outputs/finetune_chat/hf")
    expect(abs(exported - after) < 1e-3, f"from {after} to {exported}")
    guide.run("generate --hf outputs/finetune_chat/hf --chat")
    guide.run("export")


def follow_generate(guide, folder):
    """The page of `generate`, with the model that has learnt to answer."""
    (folder / "outputs/run").symlink_to(folder / "outputs/finetune_chat")
    (folder / "models/chat").symlink_to(folder / "outputs/finetune_chat/hf")
    guide.run("generate --run outputs/run --prompt")
    (folder / "prompts.txt").write_text("a\nbb\n\nccc\n")
    said = guide.run("generate --run outputs/run --prompts")
    expect("of 3 prompts at a time" in said, said)
    guide.run("generate --hf models/chat --chat --system")
    questions = ["axx", "byyyyyy", "az"]
    rows = [{"messages": [{"role": "user", "content": q}]} for q in questions]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "conversations.jsonl").write_text("".join(lines))
    # It draws, and is certain.
    said = guide.run("generate --hf models/chat --chat --messages")
    answers = [
        f"--- prompt {i}\n{answer}\n"
        for i, answer in enumerate(("yes", "no", "yes"), start=1)
    ]
    expect(said.startswith("".join(answers)), said)
    # The template starts the question with b.
    said = guide.run("generate --hf models/chat --chat --prompt")
    expect(said.splitlines()[0] == "no", said)


if __name__ == "__main__":
    sys.exit(main())
