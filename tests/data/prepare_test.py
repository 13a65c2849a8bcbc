"""Datasets of byte tokens: documents, splits, errors, and what a call leaves."""

import os
import signal
import subprocess
import sys

import pytest
from flatshard import prepare
from flatshard._data import command, survey

from tests.data.corpora import (
    gzipped,
    made,
    output_of,
    problem,
    read_meta,
    texts,
    write,
)


def numbered(folder, count, first=0):
    return write(folder, {f"in/{i}.txt": f"text {i}" for i in range(first, count)})


def test_bytes_round_trip(tmp_path):
    wanted = [b"text %d \xff\xfe\n" % i + b"x" * 7 * i for i in range(60)]
    write(tmp_path, {f"in/{i % 3}/{i}.txt": text for i, text in enumerate(wanted)})
    write(tmp_path, {"in/empty.txt": ""})
    more = {"validation_fraction": 0.25, "shard_tokens": 1000, "format": "bytes"}
    _, meta = made(tmp_path, tmp_path / "in/**/*.txt", **more)
    assert (meta["vocab_size"], meta["end_of_document"]) == (257, 256)
    assert meta["dtype"] == "uint16" and meta["num_documents"] == 60
    assert len(meta["splits"][0]["shard_tokens"]) > 5
    train, validation = texts(tmp_path / "out"), texts(tmp_path / "out", "validation")
    assert sorted(train + validation) == sorted(wanted)
    assert 1 <= len(validation) <= 30
    assert read_meta(tmp_path / "out") == meta


def test_same_input_same_files(tmp_path):
    numbered(tmp_path, 9)
    _, first = made(tmp_path, tmp_path / "in")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    made(tmp_path, tmp_path / "in")
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    write(tmp_path, {"in/new.txt": "more"})
    assert made(tmp_path, tmp_path / "in")[1]["input_hash"] != first["input_hash"]


def test_the_split_of_a_document_depends_on_its_name_alone(tmp_path):
    numbered(tmp_path, 50)
    made(tmp_path, tmp_path / "in", validation_fraction=0.3)
    before = set(texts(tmp_path / "out", "validation"))
    numbered(tmp_path, 90, 50)
    made(tmp_path, tmp_path / "in", validation_fraction=0.3)
    assert before < set(texts(tmp_path / "out", "validation"))


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_two_documents_fill_both_splits(tmp_path, fraction):
    write(tmp_path, {"in/a": "one", "in/b": "two"})
    made(tmp_path, tmp_path / "in", validation_fraction=fraction)
    for split in ("train", "validation"):
        assert len(texts(tmp_path / "out", split)) == 1


def test_one_document_gives_its_end_to_validation(tmp_path):
    write(tmp_path, {"book.txt": "0123456789abcdefghij"})
    made(tmp_path, tmp_path / "book.txt", validation_fraction=0.1)
    assert texts(tmp_path / "out") == [b"0123456789abcdefgh"]
    assert texts(tmp_path / "out", "validation") == [b"ij"]
    made(tmp_path, tmp_path / "book.txt", validation_fraction=0)
    assert not list((tmp_path / "out").glob("validation*"))


@pytest.mark.parametrize(
    ("code", "change", "text"),
    [
        ("config", {"validation_fraction": 1}, "expected a number in [0, 1), got 1"),
        ("config", {"shard_tokens": 0}, "shard_tokens: expected at least 1"),
        ("config", {"end_of_document": "</s>"}, "--end-of-document belongs to a"),
        ("config", {"begin_of_document": "<s>"}, "--begin-of-document belongs to a"),
        ("config", {"parse_special": True}, "--parse-special belongs to a tokenizer"),
        ("config", {"output": ""}, "expected an output folder"),
        (
            "config",
            {"tokenizer": "/none.json"},
            "folder that has one, got '/none.json'",
        ),
        ("config", {"tokenizer": "gpt2"}, "hf download gpt2 --local-dir models/gpt2"),
        ("config", {"text_field": "body"}, "--text-field belongs to files of rows"),
        ("config", {"train_on": "all"}, "--train-on belongs to --chat"),
    ],
)
def test_errors_leave_nothing_behind(tmp_path, code, change, text):
    write(tmp_path, {"in/a": "text", "in/b": ""})
    assert text in problem(tmp_path, tmp_path / "in", code=code, **change)


def test_inputs_without_documents(tmp_path):
    write(tmp_path, {"in/a": "text", "in/b": ""})
    text = problem(tmp_path, "/none/*.txt", code="io")
    assert "--input '/none/*.txt' matches no file" in text
    text = problem(tmp_path, tmp_path / "in/b")
    assert (
        "none of 1 files has a document, so the dataset would be empty: b (empty"
        in text
    )
    text = problem(tmp_path, tmp_path / "in", code="config", tokenizer=tmp_path / "in")
    assert "has no tokenizer.json; transformers writes one with" in text


def test_binary_files_of_folders_are_skipped(tmp_path):
    files = {f"in/{i}.png": b"\x89PNG\0" for i in range(4)}
    write(tmp_path, {"in/a.txt": "text", "in/module.pyc": "no NUL", **files})
    found, _ = made(tmp_path, tmp_path / "in", validation_fraction=0)
    assert found.found.describe_skipped(2) == (
        "0.png (binary), 1.png (binary) and 3 more"
    )
    assert texts(tmp_path / "out") == [b"text"]
    # An explicitly named file is an error, unless --format bytes accepts it.
    (tmp_path / "out/meta.json").rename(tmp_path / "meta.json")
    text = problem(tmp_path, tmp_path / "in/0.png", output=tmp_path / "named")
    assert "in/0.png" in text and "--format bytes" in text
    text = problem(tmp_path, tmp_path / "in/*.p*", output=tmp_path / "named")
    assert "none of 5 files has a document" in text
    made(
        tmp_path,
        tmp_path / "in/0.png",
        output=tmp_path / "named",
        format="bytes",
        validation_fraction=0,
    )
    assert texts(tmp_path / "named") == [b"\x89PNG\0"]


def test_each_line_of_jsonl_is_a_document(tmp_path):
    rows = '{"text": "one", "id": 1}\n\n{"text": ""}\r\n{"text": null}\n'
    rows += '{"text": "tw\\u00f6\\n"}'
    write(tmp_path, {"in/a.jsonl": rows, "in/b.txt": "three", "in/c.jsonl": "\n"})
    found, _ = made(tmp_path, tmp_path / "in", validation_fraction=0)
    assert texts(tmp_path / "out") == [b"one", "twö\n".encode(), b"three"]
    assert found.num_empty == 2
    assert found.found.skipped == [("c.jsonl", "without documents")]
    # Rows are split by their names, as files are.
    made(tmp_path, tmp_path / "in", validation_fraction=0.01)
    assert len(texts(tmp_path / "out")) == 2
    assert len(texts(tmp_path / "out", "validation")) == 1


def test_one_corpus_of_all_kinds_and_a_summary(tmp_path):
    files = {
        "in/a.jsonl": '{"text": "one", "score": NaN}\n{"text": ""}',
        "in/b.JSON": '[{"text": "two"}]',
        "in/c.txt": b"\xff\xfet\0h\0r\0e\0e\0",
        "in/README.md": "readme",
        "in/photo.png": b"\x89PNG\0",
    }
    write(tmp_path, files)
    (tmp_path / "in/d.txt").symlink_to("c.txt")
    found, meta = made(tmp_path, tmp_path / "in", validation_fraction=0)
    assert texts(tmp_path / "out") == [b"one", b"two", b"three"]
    assert found.describe_files() == (
        "2 of rows (2 JSON, 0 Parquet), 1 of plain text, 1 links followed, 3 skipped"
    )
    assert found.found.describe_skipped() == (
        "README.md (beside the data), d.txt (a link to a file that is included), "
        "photo.png (binary)"
    )
    assert (found.num_documents, found.num_empty, found.nbytes) == (3, 1, 11)
    # The same names and sizes, other texts.
    write(tmp_path, {"in/b.JSON": '[{"text": "owt"}]'})
    _, other = made(tmp_path, tmp_path / "in", validation_fraction=0)
    assert other["input_hash"] != meta["input_hash"]


def test_text_that_is_no_utf8_is_an_error_or_replaced(tmp_path, capfd):
    write(tmp_path, {"a.txt": b"line\ncaf\xe9", "b.txt.gz": gzipped("b")})
    text = problem(tmp_path, tmp_path / "a.txt")
    assert "a.txt:2: expected UTF-8, got the byte 0xe9 (byte 8 of the text)" in text
    more = {"format": "text", "validation_fraction": 0}
    found, _ = made(tmp_path, tmp_path / "*.*", **more)
    assert "1 bytes that are not UTF-8 became U+FFFD" in capfd.readouterr().err
    assert texts(tmp_path / "out") == ["line\ncaf\ufffd".encode(), b"b"]
    assert "2 of plain text, 1 compressed" in found.describe_files()
    more = {"format": "bytes", "tokenizer": "/none"}
    text = problem(tmp_path, tmp_path / "a.txt", code="config", **more)
    assert "--format bytes: expected --tokenizer bytes" in text


def test_a_corpus_is_replaced_by_force_alone(tmp_path):
    numbered(tmp_path, 2)
    made(tmp_path, tmp_path / "in")
    text = problem(tmp_path, tmp_path / "in", code="usage")
    assert "give --force to replace it" in text
    (tmp_path / "out/meta.json").unlink()
    text = problem(tmp_path, tmp_path / "in", code="usage", force=True)
    assert (
        "is not a dataset (it has no meta.json), so --force does not delete it" in text
    )


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    write(tmp_path, {"in/a": "text", "in/secret": "text"})
    if os.geteuid() != 0:
        (tmp_path / "in/secret").chmod(0)
    else:  # whom the permission bits do not stop
        real = open

        def refuse(path, *arguments, **more):
            if str(path).endswith("secret"):
                raise PermissionError(13, "Permission denied")
            return real(path, *arguments, **more)

        monkeypatch.setattr("builtins.open", refuse)
    text = problem(tmp_path, tmp_path / "in", code="io")
    assert "cannot read" in text and "in/secret: Permission denied" in text


def test_a_file_that_changes_meanwhile(tmp_path, monkeypatch):
    numbered(tmp_path, 3)

    def choose(files, fraction):
        write(tmp_path, {"in/1.txt": "longer than before"})
        return survey.choose_validation(files, fraction)

    monkeypatch.setattr(prepare, "choose_validation", choose)
    text = problem(tmp_path, tmp_path / "in", code="io")
    assert "in/1.txt changed while it was read" in text


def test_the_summary(tmp_path):
    write(tmp_path, {"in/a.txt": "some text", "in/b.txt": "mo\tre\x01" + "é" * 30})
    arguments = ["-i", tmp_path / "in/a.txt", tmp_path / "in/b.txt", "-o"]
    text = output_of(prepare, *arguments, tmp_path / "out", "--validation-fraction=0")
    assert text == (
        "files            0 of rows (0 JSON, 0 Parquet), 2 of plain text, 0 links "
        "followed, 0 skipped\n"
        "documents        2, 0 empty ones left out\n"
        "tokens per byte  1.027 (77 tokens, 75 bytes of text)\n"
        "first document   some text<|endoftext|>\n"
        f"wrote {tmp_path / 'out'}\n"
        "tokenizer        bytes\n"
        "vocab_size       257    (model.vocab_size must be at least this)\n"
        "end of document  token 256\n"
        "stored as        uint16\n"
        "train            77 tokens, 2 documents, 1 files\n"
    )
    arguments = ["-i", tmp_path / "in/b.txt", "--force", "-o"]
    text = output_of(prepare, *arguments, tmp_path / "out", "--validation-fraction=0")
    # The text ends in half of a character because 48 tokens are shown.
    assert f"first document   mo\\tre\\x01{'é' * 21} ...\n" in text


def test_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with command.Progress(2_000_000) as progress:
        progress.add(500_000)
    assert capsys.readouterr().err == "\rprepared  25% of 2.0 MB\033[K\r\033[K"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_call_leaves_the_old_corpus(tmp_path, how):
    numbered(tmp_path, 3)
    made(tmp_path, tmp_path / "in")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    # It waits before the dataset is complete.
    script = (
        "import sys, time\n"
        "from tests.data import conftest\n"
        "from flatshard import prepare\n"
        "from flatshard._data import command\n"
        "def wait(files):\n"
        "    print('waits', flush=True)\n"
        "    time.sleep(60)\n"
        "command.check_unchanged = wait\n"
        "command.run(prepare.main)\n"
    )
    arguments = ["--force", "--input", tmp_path / "in", "--output", tmp_path / "out"]
    child = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"waits\n"
    child.send_signal(how)
    child.communicate(timeout=60)
    wanted = {signal.SIGINT: 130}
    assert child.returncode == wanted.get(how, -how)
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    # The next call removes what a call that was killed left.
    write(tmp_path, {"in/9.txt": "more"})
    made(tmp_path, tmp_path / "in")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
