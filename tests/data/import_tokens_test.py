"""Tokens that other programs have written."""

import functools
import pickle
import struct

import pytest
from flatshard import import_tokens
from tests.data.corpora import imported, output_of, read_meta, split_of, write
from tests.data.corpora import problem as problem_of

np = pytest.importorskip("numpy")


def words(dtype, *values):
    return np.array(values, dtype).tobytes()


def llm_c(magic, tokens):
    dtype = {20240520: "<u2", 20240801: "<u4"}[magic]
    header = [magic, 1, len(tokens), *[0] * 253]
    return words("<i4", *header) + words(dtype, *tokens)


def megatron_index(sizes, documents, dtype=4, nbytes=4):
    pointers = [sum(sizes[:i]) * nbytes for i in range(len(sizes))]
    head = struct.pack("<QBqq", 1, dtype, len(sizes), len(documents))
    body = words("<i4", *sizes) + words("<i8", *pointers) + words("<i8", *documents)
    return b"MMIDIDX\0\0" + head + body


@pytest.fixture
def documents(tmp_path):
    def read(*names, **more):
        lines = imported(tmp_path, *(tmp_path / name for name in names), **more)
        return split_of(tmp_path / "out")[0], lines

    return read


@pytest.fixture
def problem(tmp_path):
    defaults = {"tokenizer": "none", "vocab_size": 100, "end_of_document": 9}
    defaults["output"] = tmp_path / "other"
    find = functools.partial(problem_of, tmp_path, module=import_tokens)
    return lambda name, **more: find(tmp_path / name, **{**defaults, **more})


def test_raw_words_of_nanogpt(tmp_path, documents, problem):
    write(tmp_path, {"train.bin": words("<u2", 1, 2, 9, 9, 3, 9, 4)})
    write(tmp_path, {"wide.bin": words("<u4", 99, 9, 5)})
    found, lines = documents("train.bin")
    assert found == [[1, 2, 9], [3, 9], [4, 9]]
    assert lines == ["train.bin: raw uint16, 7 tokens, 3 documents"]
    assert read_meta(tmp_path / "out")["vocab_size"] == 100
    assert documents("wide.bin", dtype="uint32")[0] == [[99, 9], [5, 9]]
    assert "expected a multiple of 4 bytes" in problem("train.bin", dtype="uint32")


def test_wide_words_are_not_taken_for_narrow_ones(tmp_path, documents, problem):
    files = {
        "wide.bin": words("<u4", 10, 20, 30, 40, 50, 60, 9, 70),
        "a.bin": words("<i8", 10, 20, 9, 30),
        "b.bin": words("<u1", 10, 20, 9),
    }
    write(tmp_path, files)
    text = problem("wide.bin")
    assert "as in tokens of 32 bits; name what they are with --dtype uint32" in text
    for dtype in ("", "uint16", "uint32", "int32"):
        text = problem("a.bin", dtype=dtype)
        assert "as in tokens of 64 bits; name what they are with --dtype int64" in text
    for dtype in ("int64", "uint64"):
        assert documents("a.bin", dtype=dtype)[0] == [[10, 20, 9], [30, 9]]
    assert documents("b.bin", dtype="uint8")[0] == [[10, 20, 9]]
    text = problem("b.bin", dtype="float32", code="config")
    assert "--dtype: expected a type of integers such as uint16" in text


def numpy_file(descr, shape, data, version=1, fortran=False):
    header = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"
    header = header.ljust(117) + "\n"
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + length + header.encode() + data


def test_arrays_of_numpy(tmp_path, documents):
    for i, dtype in enumerate(("<u2", "<i2", "<u4", "<i4", "<i8", "|u1", "<u8")):
        np.save(tmp_path / f"{i}.npy", np.array([1, 2, 9, 3], dtype))
        found, lines = documents(f"{i}.npy")
        assert found == [[1, 2, 9], [3, 9]], dtype
    assert lines == ["6.npy: NumPy uint64, 4 tokens, 2 documents"]
    np.save(tmp_path / "a.npy", np.array([[1, 2], [9, 3]], "<u2"))
    data = words("<u2", 1, 2, 9, 3)
    write(tmp_path, {"b.bin": numpy_file("'<u2'", "(4,)", data, version=2)})
    write(tmp_path, {"c.bin": numpy_file("'<u2'", "(2, 2)", data, version=3)})
    for name in ("a.npy", "b.bin", "c.bin"):
        assert documents(name)[0] == [[1, 2, 9], [3, 9]], name


@pytest.mark.parametrize(
    ("content", "text"),
    [
        *[
            ((descr, "(4,)"), "expected an array of little-endian integers, got ")
            for descr in ("'<f2'", "'>u2'", "'|b1'", "[('a', '<u2')]")
        ],
        (("'<u2'", "(2, 2)", 1, True), "C order, got (2, 2) in Fortran order"),
        (("'<u2'", "(3,)"), "for the 3 elements that the header of NumPy names, got"),
        (("'<u2'", "(0,)"), "for the 0 elements"),
        *[
            ((descr, shape, *more), "a.npy: expected an array of NumPy: ")
            for descr, shape, *more in (
                ("'|O'", "(4,)"),
                ("'<u2'", "(5000000000, 5000000000)"),
                ("'<u2'", "(-4,)"),
                ("'<u2'", "__import__('os')"),
                ("'<u2'", "(4,)", 4),
            )
        ],
        (60, "a.npy: expected an array of NumPy: "),
    ],
)
def test_other_arrays_of_numpy_are_refused(tmp_path, problem, content, text):
    cut = content if isinstance(content, int) else None
    descr, shape, *more = ("'<u2'", "(4,)") if cut else content
    data = numpy_file(descr, shape, words("<u2", 1, 2, 9, 3), *more)
    write(tmp_path, {"a.npy": data[:cut]})
    assert text in problem("a.npy")


@pytest.mark.parametrize(
    ("name", "begin", "what"),
    [
        ("a.bin", b"LITPKDS\1", "a packed file of litgpt"),
        ("a.npz", b"PK\3\4", "a zip archive"),
        ("a.bin", b"PAR1", "Parquet; use flatshard data prepare"),
        ("a.bin", b"MMIDIDX\0", "the index of Megatron"),
        ("a.bin", b"\x1f\x8b\x08", "gzip data"),
        ("a.pt", b"\x80\x04\x95", "a pickle"),
        ("a.bin", b"\x8a\xd8\x34\x01", "an evaluation of llm.c"),
        ("a.xlsx", b"", "a table"),
        ("a.bin", struct.pack("<Q", 6) + b'{"a":{', "safetensors"),
        ("a.bin", struct.pack("<4I", 2, 16, 24, 34), "a chunk of litdata"),
        ("a.bin", struct.pack(">i", 20240801), "a file of llm.c in big-endian order"),
    ],
)
def test_files_of_other_formats_are_refused(tmp_path, problem, name, begin, what):
    write(tmp_path, {name: begin + words("<u2", *range(1, 10))})
    for dtype in ("", "uint16"):
        assert f"{name}: expected tokens, got {what}" in problem(name, dtype=dtype)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        *[
            (pickle.dumps(list(range(count)), protocol), "a pickle")
            for protocol in (2, 3, 4, 5)
            for count in (6, 7)
        ],
        (words("<f4", 1, 2, 9, 3, 50000, 9), "floating-point numbers (<f4)"),
        (words("<f8", 1, 2, 9, 3), "floating-point numbers (<f8)"),
        (b"ARROW1\0\0" + words("<u2", *range(9)), "Arrow"),
        (b"\xff\xff\xff\xff\x08\0\0\0" + words("<u2", *range(9)), "Arrow"),
        (b"GGUF" + words("<u2", *range(9)), "a model in GGUF"),
    ],
)
def test_other_contents_are_refused(tmp_path, problem, content, what):
    write(tmp_path, {"a.bin": content})
    for dtype in ("", "uint16"):
        text = problem("a.bin", dtype=dtype, vocab_size=70000)
        assert f"a.bin: expected tokens, got {what}" in text


def test_words_that_are_no_floats(tmp_path, documents):
    """Zeros, and words of which some read as whole numbers."""
    write(tmp_path, {"a.bin": words("<u4", *[0] * 9)})
    assert documents("a.bin", dtype="uint32")[0] == [[0] * 9 + [9]]
    write(tmp_path, {"a.bin": words("<u2", 0, 16256, 9, 0, 16256, 0, 16384, 1)})
    assert len(documents("a.bin", vocab_size=20000)[0]) == 2


def test_raw_words_with_the_name_of_numpys_files(tmp_path, documents, problem):
    """As OLMo's tokens are."""
    write(tmp_path, {"a.npy": words("<u2", 1, 2, 9, 3)})
    assert "without a header of NumPy; for raw tokens" in problem("a.npy")
    assert documents("a.npy", dtype="uint16")[0] == [[1, 2, 9], [3, 9]]
    np.savez(tmp_path / "b.npz", np.arange(9))
    (tmp_path / "b.npz").rename(tmp_path / "b.npy")
    assert "got a zip archive" in problem("b.npy", dtype="uint16")


def test_text_is_refused(tmp_path, documents, problem):
    write(tmp_path, {"a.bin": "1 2 3 9 4\n", "empty.bin": ""})
    assert "got text; use flatshard data prepare" in problem("a.bin")
    assert len(documents("a.bin", dtype="uint8")[0]) == 1
    assert "contains no tokens" in problem("empty.bin")


def test_headers_of_llm_c(tmp_path, documents, problem):
    # In these files, documents start with the end-of-text token.
    write(tmp_path, {"a.bin": llm_c(20240520, [9, 1, 2, 9, 3])})
    write(tmp_path, {"b.bin": llm_c(20240801, [9, 70])})
    found, lines = documents("*.bin")
    assert found == [[1, 2, 9], [3, 9], [70, 9]]
    assert lines[1] == "b.bin: llm.c uint32, 2 tokens, 1 documents"
    write(tmp_path, {"cut.bin": llm_c(20240520, [9, 1, 2])[:-1]})
    text = (
        "expected 1030 bytes for the 3 tokens that the header of llm.c names, got 1029"
    )
    assert text in problem("cut.bin")


def test_documents_of_megatrons_index(tmp_path, documents, problem):
    def index(*arguments):
        write(tmp_path, {"m.idx": megatron_index(*arguments)})

    write(tmp_path, {"m.bin": words("<i4", 1, 9, 2, 9, 3, 4, 5, 9)})
    # The file has three sequences. The first document is empty, and the last one has an
    # end within it.
    index([2, 3, 3], [0, 0, 1, 3])
    found, lines = documents("m*")
    assert found == [[1, 9], [2, 9, 3, 4, 5, 9]]
    assert lines == ["m.bin: Megatron int32, 8 tokens, 2 documents"]
    assert "m.bin" in problem("m.idx", code="config")
    index([2, 3, 2], [0, 3])
    assert "expected 28 bytes for the 7 tokens" in problem("m.bin")
    index([2, 3, 3], [0, 2])
    assert "expected documents that have all 8 tokens" in problem("m.bin")
    index([2, 3, 3], [0, 2, 1, 3])
    assert "expected documents of its 3 sequences, got 1" in problem("m.bin")
    index([2, 3, 3], [0, 3], 6)
    assert "got the dtype code 6" in problem("m.bin")
    index([2, 3, 3], [0, 3], 4, 2)
    assert "expected sequence 1 at byte 8 of the tokens, got 4" in problem("m.bin")
    write(tmp_path, {"m.idx": megatron_index([2, 3, 3], [0, 3])[:50]})
    assert "the index is truncated" in problem("m.bin")
    write(tmp_path, {"m.idx": b"other"})
    assert "expected the index of Megatron's tokens (MMIDIDX" in problem("m.bin")


def test_documents_longer_than_a_part(tmp_path, documents, monkeypatch):
    monkeypatch.setattr(import_tokens, "SCANNED", 5)
    tokens = [*range(10, 24), 9, *range(30, 40), 9, 9, 50]
    write(tmp_path, {"a.bin": words("<u2", *tokens), "m.bin": words("<i4", *tokens)})
    wanted = [tokens[:15], tokens[15:26], [50, 9]]
    assert documents("a.bin")[0] == wanted
    write(tmp_path, {"m.idx": megatron_index([15, 11, 2], [0, 1, 2, 3])})
    assert documents("m.bin")[0] == [*wanted[:2], [9, 50, 9]]


def test_a_split_of_its_own_or_part_of_the_documents(tmp_path, documents):
    write(tmp_path, {"train.bin": words("<u2", 1, 9, 2, 9, 3, 9, 4, 9)})
    write(tmp_path, {"val.bin": words("<u2", 5, 9)})
    found, _ = documents("train.bin", validation=tmp_path / "val.bin")
    assert len(found) == 4
    assert split_of(tmp_path / "out", "validation")[0] == [[5, 9]]
    assert len(documents("train.bin", validation_fraction=0.01)[0]) == 3
    assert len(split_of(tmp_path / "out", "validation")[0]) == 1


def test_tokens_are_checked_against_the_vocabulary(tmp_path, problem):
    write(tmp_path, {"train.bin": words("<u2", 1, 2, 100)})
    assert (
        "train.bin: expected raw uint16 tokens below the vocabulary's 100, got 100 at "
        "place 2"
    ) in problem("train.bin")
    write(tmp_path, {"a.npy": b""})
    np.save(tmp_path / "a.npy", np.array([1, -2], "<i2"))
    assert "got -2 at place 1" in problem("a.npy")
    text = problem("train.bin", code="config", end_of_document=100)
    assert "a token below the vocabulary's 100, got '100'" in text
    text = problem("train.bin", code="config", vocab_size=0)
    assert "--tokenizer: expected the tokenizer that the tokens are of" in text
    for name in ("gpt2", "Qwen/Qwen3-8B"):
        text = problem("train.bin", code="config", tokenizer=name)
        assert f"hf download {name} --local-dir models/" in text
    text = problem("train.bin", code="config", tokenizer=tmp_path / "gpt2")
    assert "hf download" not in text


def test_the_summary(tmp_path):
    write(tmp_path, {"in/train.bin": b"a\0b\0\1\0", "in/README.md": "r"})
    arguments = ["--tokenizer", "none", "--vocab-size=99", "--end-of-document=1"]
    arguments += ["--validation-fraction=0", "--input", tmp_path / "in", "--output"]
    text = output_of(import_tokens, *arguments, tmp_path / "out")
    assert text.startswith(
        "train.bin: raw uint16, 3 tokens, 1 documents\n"
        "README.md: skipped, beside the data\n"
        f"wrote {tmp_path / 'out'}\n"
        "tokenizer        none\n"
    )
