"""Datasets of each kind of input have the bytes that version 0.2.0 first wrote: format,
hashes, splits, and order of documents."""

import hashlib
import json
import struct

import pytest
from flatshard import import_tokens, prepare
from tests.data.corpora import gzipped, options_of, write

ROWS = [{"text": f"row {i} é " + "the cat sat " * (i % 9), "id": i} for i in range(90)]
VOCAB = {c: i for i, c in enumerate(["<|end|>", "<s>", "a", "b", "c", "th", "t", "h"])}
VOCAB |= {c: len(VOCAB) + i for i, c in enumerate("Ġeséowr0123456789Ã©")}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": i,
            "content": text,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            "special": True,
        }
        for i, text in enumerate(["<|end|>", "<s>"])
    ],
    "pre_tokenizer": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    },
    "decoder": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    },
    "model": {"type": "BPE", "vocab": VOCAB, "merges": ["t h"]},
}
CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "<|end|>",
    "chat_template": "{% for m in messages %}{{ m.role[0] }} {{ m.content }}<|end|>"
    "{% endfor %}",
}
CHATS = [
    {
        "messages": [
            {"role": r, "content": c} for r, c in zip("abab", "wxyz", strict=True)
        ]
    },
    {"prompt": "the cat", "completion": "sat"},
]
CHATS[0]["messages"][1]["role"] = CHATS[0]["messages"][3]["role"] = "assistant"


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def words(form, values):
    return struct.pack(f"<{len(values)}{form}", *values)


TOKENS = [i * i % 97 for i in range(3000)]
FILES = {
    **{f"texts/{i % 3}/{i}.txt": f"text {i} é\n" + "x" * 7 * i for i in range(40)},
    "texts/README.md": "r",
    "texts/a.png": b"\x89PNG\0",
    "wide/a.txt": b"\xff\xfe" + "é\U0001f600\n".encode("utf-16-le") + b"\x3d\xd8b\0",
    "wide/b.txt": b"\xef\xbb\xbfmarked",
    "latin/a.txt": b"line\ncaf\xe9 \xe2\x82x",
    "one/book.txt": "0123456789abcdefghij" * 9,
    "json/a.jsonl": jsonl(ROWS)
    + '\n{"text": null}\r\n{"x": NaN, "text": "\\ud83d a"}\n',
    "json/b.json": json.dumps(ROWS[:5], indent=1),
    "json/c.json": "".join(json.dumps(row, indent=1) + "\n" for row in ROWS[:5]),
    "json/d.jsonl.gz": gzipped(jsonl(ROWS[:9])) + gzipped(jsonl(ROWS[9:])),
    "chats/a.jsonl": jsonl(CHATS * 9),
    "tokenizer/tokenizer.json": json.dumps(TOKENIZER),
    "tokenizer/tokenizer_config.json": json.dumps(CONFIG),
    "tokens/a.bin": words("H", TOKENS),
    "tokens/b.bin": words("i", [20240801, 1, 900, *[0] * 253])
    + words("I", TOKENS[:900]),
    "tokens/m.bin": words("i", TOKENS[:60]),
    "tokens/m.idx": b"MMIDIDX\0\0"
    + struct.pack("<QBqq", 1, 4, 3, 3)
    + words("i", [10, 20, 30])
    + words("q", [0, 40, 120])
    + words("q", [0, 2, 3]),
}
BPE = {"tokenizer": "tokenizer"}
NO_TOKENIZER = {"tokenizer": "none", "vocab_size": 100, "end_of_document": 0}
CORPORA = {
    "texts": (prepare, "texts", {"validation_fraction": 0.2, "shard_tokens": 999}),
    "wide": (prepare, "wide", {}),
    "latin": (prepare, "latin", {"format": "text"}),
    "bytes": (prepare, "latin", {"format": "bytes"}),
    "one": (prepare, "one", {"validation_fraction": 0.1}),
    "json": (prepare, "json", {}),
    "bpe": (prepare, "json", BPE),
    "bpe_of_one": (prepare, "one", BPE),
    "bpe_with_begin": (prepare, "texts/**/*.txt", {**BPE, "bos": "none"}),
    "chats": (prepare, "chats", {**BPE, "chat": True}),
    "chats_last": (prepare, "chats", {**BPE, "chat": True, "train_on": "last"}),
    "chats_all": (prepare, "chats", {**BPE, "chat": True, "train_on": "all"}),
    "tokens": (import_tokens, "tokens/*", NO_TOKENIZER),
    "tokens_of_bpe": (
        import_tokens,
        "tokens/m.bin",
        {**BPE, "vocab_size": 100, "validation": "tokens/a.bin"},
    ),
}
HASHES = {
    "texts": "901ad658924627d5",
    "wide": "e93f48aff5a95b36",
    "latin": "2758ae749bedb1fa",
    "bytes": "bd340441ac8bb33b",
    "one": "7a990e4b98229c3e",
    "json": "02a103e52377956f",
    "bpe": "6f8c58c0f5f3c0a4",
    "bpe_of_one": "48fec02c3b797677",
    "bpe_with_begin": "21df9cc090acd6a9",
    "chats": "f56d029eb9d3d125",
    "chats_last": "ed89acc5a7ce24a5",
    "chats_all": "5b8e322cd93288ef",
    "tokens": "790fbb0b0789d753",
    "tokens_of_bpe": "e06364a6c38d9a5f",
}


def hash_of(folder):
    """Returns a digest of the names and the content of a dataset's files."""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix == ".bin" or path.name == "meta.json":
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("name", CORPORA)
def test_golden_corpora(tmp_path, monkeypatch, name):
    module, inputs, more = CORPORA[name]
    if "tokenizer" in more.values():
        pytest.importorskip("tokenizers")
    if "chat" in more:
        pytest.importorskip("transformers")
        pytest.importorskip("jinja2")
    monkeypatch.chdir(write(tmp_path, FILES))
    function = getattr(module, module.__name__.rpartition(".")[2])
    function(options_of(module, tmp_path, [inputs], more))
    assert hash_of(tmp_path / "out") == HASHES[name]
