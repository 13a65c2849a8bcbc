"""Chats from JSON rows to a dataset with masks, and datasets of tokenizers."""

import json
import subprocess
import sys

import pytest
from tests.data.corpora import made, problem, read_meta, split_of, write

tokenizers = pytest.importorskip("tokenizers")

ROWS = [
    {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "you"},
        ]
    },
    {"prompt": "say [x]", "completion": "[x]\nno"},
]
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def jsonl(*rows):
    return "\n\n".join(map(json.dumps, rows)) + "\n"


@pytest.fixture
def chats(tmp_path):
    """A folder with chats.jsonl and a byte-level tokenizer with a chat template."""
    pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*SPECIAL, *letters])}
    bpe = Tokenizer(models.BPE(vocab, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(SPECIAL)
    files = {
        "tokenizer/tokenizer.json": bpe.to_str(),
        "tokenizer/tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
        ),
        "tokenizer/chat_template.jinja": TEMPLATE,
        "chats.jsonl": jsonl(*ROWS),
    }
    return write(tmp_path, files)


def options(folder, **more):
    defaults = {"chat": True, "tokenizer": folder / "tokenizer"}
    return {**defaults, "validation_fraction": 0, **more}


def test_a_mask_beside_the_tokens(chats):
    _, meta = made(chats, chats / "chats.jsonl", **options(chats))
    # The template's end is the end of the document, and no other is added.
    assert meta["version"] == 2 and "begin_of_document" not in meta
    assert meta["splits"][0]["num_tokens"] == 9 + 17
    assert meta["splits"][0]["trained_tokens"] == (3 + 1) + (6 + 1)
    documents, masks = split_of(chats / "out")
    assert [len(ids) for ids in documents] == [9, 17]
    assert [ids[-1] for ids in documents] == [0, 0] and meta["end_of_document"] == 0
    assert masks[0] == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_a_single_chat_gives_its_end_to_validation(chats):
    write(chats, {"chats.jsonl": jsonl(ROWS[1])})
    more = options(chats, validation_fraction=0.5)
    made(chats, chats / "chats.jsonl", **more)
    (train, train_mask), (rest, rest_mask) = (
        split_of(chats / "out", name) for name in ("train", "validation")
    )
    assert (len(train[0]), len(rest[0])) == (9, 9)
    assert sum(train_mask[0]) + sum(rest_mask[0]) == 7 + 1  # each has an end


def test_a_template_without_an_end_gets_one(chats):
    template = TEMPLATE.replace("<|end|>", "")
    write(chats, {"tokenizer/chat_template.jinja": template})
    for train_on, trained in {"assistant": 0, "all": 1}.items():
        made(chats, chats / "chats.jsonl", **options(chats, train_on=train_on))
        documents, masks = split_of(chats / "out")
        assert documents[0][-1] == 0 and masks[0][-1] == trained


def test_errors_name_file_and_line(chats):
    # In a list, the line on which the row starts.
    rows = '[{"prompt": "a", "completion": "b"},\n\n{"prompt": "a"}]'
    write(chats, {"chats.jsonl": rows, "a.txt": "text"})
    text = problem(chats, chats / "chats.jsonl", **options(chats))
    assert f"{chats / 'chats.jsonl'}:3: expected the field 'messages', or" in text
    assert "found prompt" in text
    text = problem(chats, chats / "a.txt", **options(chats))
    assert "a.txt: --chat needs JSON rows" in text
    (chats / "tokenizer/chat_template.jinja").unlink()
    write(chats, {"chats.jsonl": jsonl(*ROWS)})
    text = problem(chats, chats / "chats.jsonl", code="config", **options(chats))
    assert "has no chat template" in text


def test_options_and_rows_set_variables_of_the_template(chats):
    row = {"prompt": "a", "completion": "b"}
    own = {**row, "chat_template_kwargs": {"style": "of the row"}}
    template = "{{ style }}" + TEMPLATE
    write(
        chats,
        {"chats.jsonl": jsonl(row, own), "tokenizer/chat_template.jinja": template},
    )
    more = options(chats, chat_template_kwargs='{"style": "brief"}')
    made(chats, chats / "chats.jsonl", **more)
    lengths = [len(ids) for ids in split_of(chats / "out")[0]]
    assert lengths[1] - lengths[0] == len("of the row") - len("brief")
    more = options(chats, chat_template_kwargs="brief", output=chats / "other")
    text = problem(chats, chats / "chats.jsonl", code="config", **more)
    assert "expected JSON in --chat-template-kwargs" in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"train_on": "some"}, "--train-on: expected assistant, all or last, got some"),
        ({"tokenizer": "bytes"}, "byte tokens have none"),
        ({"text_field": "x"}, "--text-field does not go with --chat"),
        ({"begin_of_document": "x"}, "--begin-of-document does not go with --chat"),
        ({"parse_special": True}, "--parse-special does not go with --chat"),
        ({"format": "parquet"}, "expected --format auto or json, got parquet"),
    ],
)
def test_options_of_chats(tmp_path, change, text):
    write(tmp_path, {"tokenizer/tokenizer.json": "{}", "a.jsonl": "{}"})
    more = options(tmp_path, **change)
    assert text in problem(tmp_path, tmp_path / "a.jsonl", code="config", **more)


def test_options_that_belong_to_chats(tmp_path):
    write(tmp_path, {"a.txt": "a"})
    for name in ("train_on", "chat_template_kwargs"):
        text = problem(tmp_path, tmp_path / "a.txt", code="config", **{name: "all"})
        assert f"--{name.replace('_', '-')} belongs to --chat" in text


@pytest.fixture
def bpe(tmp_path):
    """A folder with a byte-level BPE of 300 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|stop|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tokenizer


def test_the_tokens_of_the_tokenizer(tmp_path, bpe):
    texts = ["the cat", "on the mat sat é", *(f"the {i} " * i for i in range(1, 300))]
    texts += ["the cat\nsat on mats " * 20_000]  # which is read in parts
    write(tmp_path, {f"in/{i:03}.txt": text for i, text in enumerate(texts)})
    more = {"tokenizer": tmp_path / "tokenizer.json", "validation_fraction": 0}
    _, meta = made(tmp_path, tmp_path / "in", **more)
    assert (meta["tokenizer"], meta["end_of_document"]) == ("tokenizer.json", 0)
    assert 257 < meta["vocab_size"] == bpe.get_vocab_size()
    wanted = [[*bpe.encode(text).ids, 0] for text in texts]
    assert split_of(tmp_path / "out")[0] == wanted
    copy, origin = tmp_path / "out/tokenizer.json", tmp_path / "tokenizer.json"
    assert copy.read_bytes() == origin.read_bytes()


def test_a_folder_and_a_token_before_each_document(tmp_path, bpe, capfd):
    files = {
        "tokenizer_config.json": '{"eos_token": "<|stop|>"}',
        "chat_template.jinja": "{{ messages }}",
        "in/a.jsonl": jsonl({"text": "the cat"}, {"text": ""}, {"text": "a <|stop|>"}),
    }
    write(tmp_path, files)
    more = {"tokenizer": tmp_path, "validation_fraction": 0}
    begin = "begin_of_document"
    _, meta = made(tmp_path, tmp_path / "in", **more, **{begin: "<|endoftext|>"})
    assert (meta["end_of_document"], meta[begin]) == (1, 0)
    assert read_meta(tmp_path / "out") == meta
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).exists()
    bpe.encode_special_tokens = True
    wanted = [[0, *bpe.encode(text).ids, 1] for text in ("the cat", "a <|stop|>")]
    assert split_of(tmp_path / "out")[0] == wanted
    warning = "texts spell out control tokens (<|stop|>). They stay text"
    assert capfd.readouterr().err.count(warning) == 1
    made(tmp_path, tmp_path / "in", **more, parse_special=True)
    assert split_of(tmp_path / "out")[0][1][-2:] == [1, 1]
    assert warning not in capfd.readouterr().err


def test_named_tokens(tmp_path, bpe):
    write(tmp_path, {"a.txt": "the cat"})
    more = {"tokenizer": tmp_path / "tokenizer.json"}
    _, meta = made(tmp_path, tmp_path / "a.txt", **more, end_of_document="<|stop|>")
    assert meta["end_of_document"] == 1
    more["output"] = tmp_path / "other"
    for name in ("end", "begin"):
        change = {f"{name}_of_document": "<none>"}
        text = problem(tmp_path, tmp_path / "a.txt", code="config", **more, **change)
        assert "has no token <none>; name" in text
        assert f"with --{name}-of-document" in text


def test_a_bad_tokenizer_file(tmp_path):
    write(tmp_path, {"a.txt": "the cat", "bad.json": "{}"})
    more = {"tokenizer": tmp_path / "bad.json"}
    text = problem(tmp_path, tmp_path / "a.txt", code="config", **more)
    assert "cannot load the tokenizer" in text


def test_a_missing_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    write(tmp_path, {"a.txt": "the cat", "tokenizer.json": "{}"})
    more = {"tokenizer": tmp_path / "tokenizer.json"}
    text = problem(tmp_path, tmp_path / "a.txt", code="config", **more)
    assert "needs the Python package 'tokenizers'" in text
    assert f"{sys.executable} -m pip install tokenizers" in text


def test_no_module_of_the_working_folder_is_imported(tmp_path, bpe):
    from tests.data.conftest import BUILD

    # A working folder with the names of modules that are imported.
    names = ("json", "tokenizers", "flatshard", "array", "prepare")
    write(tmp_path, {f"{name}.py": "raise SystemExit('mine')" for name in names})
    write(tmp_path, {"in/a.txt": "the cat"})
    script = BUILD / "python/flatshard/_run.py"
    command = ["prepare", "--input", "in", "--output", "out", "--tokenizer", "."]
    done = subprocess.run(
        [sys.executable, script, *command],
        cwd=tmp_path,
        env={"PATH": "/usr/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "wrote out" in done.stdout, done
