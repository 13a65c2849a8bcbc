"""Formats of files, by their content and their names."""

import sys
import types

import pytest
from flatshard._data import formats
from flatshard._data.failures import Failure
from flatshard._data.formats import TextOptions, format_of, read_documents
from flatshard._data.input_files import InputFile

from tests.data.corpora import gzipped, made, problem, texts, write


@pytest.fixture
def kind(tmp_path):
    def kind(name, content, wanted="auto"):
        write(tmp_path, {name: content})
        return format_of(str(tmp_path / name), wanted)[0].name

    return kind


def test_names_and_content(kind):
    for name in "a.jsonl a.JSONL a.ndjson a.json A.Json".split():
        assert kind(name, '{"text": "a"}\n') == "json"
    assert kind("a.jsonl.gz", gzipped('{"text": "a"}\n')) == "json"
    for name in "a.txt a.py README a.md a.txt.gz".split():
        assert kind(name, "plain\n") == "text"
    for name in "a.parquet a.PARQUET 0000".split():
        assert kind(name, "PAR1...") == "parquet"
    for name, content in {"a.arrow": "ARROW1..", "b.arrow": b"\xff" * 9}.items():
        assert kind(name, content) == "arrow"
    assert kind("a.csv", "a,b") == kind("a.TSV.gz", gzipped("a\tb")) == "csv"
    assert kind("a.txt", b"\xff\xfea\0b\0") == "text"
    assert kind("a.jsonl", b"\xff\xfe{\0}\0") == "json"
    # A first line that only looks alike.
    assert kind("a.txt", "{}\n") == "text"
    assert kind("a.txt", '[1] {"a": 2}\n') == "text"
    assert kind("a.py", '{\n  "a": 1}\n') == "text"
    assert kind("a.txt", '{"text": "a"} and so on\n') == "text"


def test_format_decides(kind):
    assert kind("a.txt", "{}", "json") == "json"
    assert kind("a.json", "{}", "text") == "text"
    assert kind("a.csv", "a,b\n", "text") == "text"
    assert kind("a.zip", "PK\3\4", "bytes") == "bytes"


def test_other_formats_are_refused(tmp_path):
    write(tmp_path, {"a.txt": "a"})
    text = problem(tmp_path, tmp_path / "a.txt", code="config", format="pages")
    assert "--format: expected auto, json, parquet, arrow, csv, text or bytes" in text
    write(tmp_path, {"a.txt": '{"text": "a"}'})
    assert made(tmp_path, tmp_path / "a.txt", format="jsonl")[0].num_documents == 1


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.txt", "PK\3\4", "zip archive"),
        ("a.txt", "n" * 257 + "ustar", "tar archive"),
        ("a.jsonl", "BZh91AY", "bzip2 data"),
        ("a", b"\xfd7zXZ\0", "xz data"),
        ("a.bin", "%PDF-1.4", "a PDF"),
        ("a.xlsx", "a,b", "a table"),
        ("a.bin", "MMIDIDX\0\0", "flatshard data import"),
        ("a.parquet", "abcd", "does not start as Parquet does"),
        ("a.arrow", "abcd", "does not start as Arrow does"),
        ("a.txt", "a\0b\0c\0d\0", "UTF-16 without a byte order mark"),
        ("data", '{"text": "a"}\n', "may be one document or JSON rows"),
        ("a.txt", '[\n{"text": "a"}]', "JSON rows"),
        ("a.gz", gzipped(gzipped("a")), "compressed twice"),
        ("a.parquet.gz", gzipped("PAR1"), "Parquet within gzip"),
    ],
)
def test_what_cannot_be_read_is_named(kind, name, content, what):
    with pytest.raises(Failure) as caught:
        kind(name, content)
    for text in (name, what, "--format"):
        assert text in str(caught.value)


def test_pointers_to_data(kind):
    with pytest.raises(Failure, match="got a Git LFS pointer to it.*git lfs pull"):
        kind("a.jsonl", "version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(Failure, match="got a git-annex pointer to it"):
        kind("a.jsonl", "/annex/objects/SHA256E-s1--a.jsonl\n")


def test_a_new_format_is_one_function(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "FORMATS", dict(formats.FORMATS))

    @formats.reader("pages", "pages", magic=b"PAGES", suffixes=(".pages",))
    def read_pages(path, options):
        with open(path, "rb") as file:
            yield from enumerate(file.read().split(b"\f")[1:], 1)

    write(tmp_path, {"in/a.pages": "PAGES\fone\f\ftwo"})
    from flatshard import prepare
    from flatshard._data import survey

    monkeypatch.setattr(survey, "FORMATS", formats.FORMATS)
    monkeypatch.setattr(prepare, "FORMATS", formats.FORMATS)
    found, _ = made(tmp_path, tmp_path / "in", validation_fraction=0)
    assert texts(tmp_path / "out") == [b"one", b"two"] and found.num_empty == 1
    assert "1 of rows (0 JSON, 0 Parquet, 1 pages)" in found.describe_files()


class FakeParquet:
    """The parts of pyarrow that the reader uses, for files that are lines of text."""

    def __init__(self, path):
        with open(path) as file:
            self.rows = file.read().splitlines()[1:]
        self.schema_arrow = types.SimpleNamespace(names=["id", "text"])

    def iter_batches(self, columns):
        assert columns == ["text"]
        yield types.SimpleNamespace(column=lambda i: self)

    def to_pylist(self):
        return [row or None for row in self.rows]


def use_fake(monkeypatch, **modules):
    fake = types.ModuleType("pyarrow")
    for name in ("parquet", "ipc"):
        module = types.ModuleType(f"pyarrow.{name}")
        vars(module).update(modules.get(name, {}))
        setattr(fake, name, module)
        monkeypatch.setitem(sys.modules, f"pyarrow.{name}", module)
    monkeypatch.setitem(sys.modules, "pyarrow", fake)


def test_parquet_without_pyarrow_and_by_its_parts(tmp_path, monkeypatch):
    write(tmp_path, {"in/a.parquet": "PAR1\none\n\ntwo\n"})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    text = problem(tmp_path, tmp_path / "in", code="config")
    assert "a .parquet file needs the Python package 'pyarrow'" in text
    assert "-m pip install pyarrow" in text and "FLATSHARD_PYTHON" in text
    use_fake(monkeypatch, parquet={"ParquetFile": FakeParquet})
    text = problem(tmp_path, tmp_path / "in", text_field="body")
    assert "expected the text field 'body', found id, text; name another" in text
    made(tmp_path, tmp_path / "in", validation_fraction=0)
    assert texts(tmp_path / "out") == [b"one", b"two"]


def documents(path, format_, **options):
    file = InputFile(str(path), path.name, format=formats.FORMATS[format_])
    return list(read_documents(file, TextOptions(**options)))


def test_tables_of_arrow(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    table = pa.table(
        {"text": ["one", None, "é", ""], "n": [1, 2, 3, 4], "b": [b"\xff"] * 4}
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for name, new in {"a.arrow": pa.ipc.new_file, "b.arrow": pa.ipc.new_stream}.items():
        with new(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    wanted = [(1, b"one"), (2, b""), (3, "é".encode()), (4, b"")]
    for name in ("a.parquet", "a.arrow", "b.arrow"):
        path, format_ = tmp_path / name, format_of(str(tmp_path / name))[0].name
        assert documents(path, format_) == wanted, name
        with pytest.raises(
            Failure, match=r"row 1: expected text in the column 'n', got"
        ):
            documents(path, format_, field="n")
        with pytest.raises(Failure, match="row 1: expected UTF-8 in the column 'b'"):
            documents(path, format_, field="b")
        with pytest.raises(
            Failure, match="expected the text field 'body', found text, n"
        ):
            documents(path, format_, field="body")
        path.write_bytes(path.read_bytes()[:-60])
        with pytest.raises(Failure, match="cannot read"):
            documents(path, format_)


def test_a_folder_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(9)]})
    splits = datasets.DatasetDict({"train": rows.select(range(7)), "test": rows})
    splits.save_to_disk(str(tmp_path / "in"), num_shards={"train": 2, "test": 1})
    write(tmp_path, {"in/train/cache-1.arrow": b"\xff" * 9})
    found, _ = made(tmp_path, tmp_path / "in/train", validation_fraction=0)
    assert texts(tmp_path / "out") == [f"row {i}".encode() for i in range(7)]
    assert sorted(name for name, _ in found.found.skipped) == [
        "cache-1.arrow",
        "dataset_info.json",
        "state.json",
    ]
    assert made(tmp_path, tmp_path / "in")[0].num_documents == 16


def test_csv(tmp_path):
    write(tmp_path, {"a.csv": 'id,text\r\n1,"one, ""two""\nthree"\r\n2,\r\n3,é\r\n'})
    write(
        tmp_path, {"a.tsv.gz": gzipped("text\tid\na, b\t1\n"), "bad.csv": "text\n\xe9"}
    )
    wanted = [b'one, "two"\nthree', b"", "é".encode()]
    rows = documents(tmp_path / "a.csv", "csv")
    assert [text.replace(b"\r", b"") for _, text in rows] == wanted
    assert documents(tmp_path / "a.tsv.gz", "csv")[0][1] == b"a, b"
    with pytest.raises(Failure, match="expected the text field 'body', found id, text"):
        documents(tmp_path / "a.csv", "csv", field="body")
    (tmp_path / "bad.csv").write_bytes(b"text\n\xe9\n")
    with pytest.raises(Failure, match="bad.csv: expected UTF-8"):
        documents(tmp_path / "bad.csv", "csv")


def test_the_arrow_reader_needs_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write(tmp_path, {"in/a.arrow": "ARROW1"})
    text = problem(tmp_path, tmp_path / "in", code="config")
    assert "an .arrow file needs the Python package 'pyarrow'" in text


def test_bytes_are_read_as_they_are(tmp_path):
    write(tmp_path, {"a.gz": gzipped("a")})
    assert documents(tmp_path / "a.gz", "bytes") == [(0, gzipped("a"))]
