"""The formats of files with documents, and how each is read.

A new format is one function with `@reader`: it yields a document for each row, as (its
number, its text or None). Nothing else names it."""

import csv
import sys
from collections.abc import Callable
from dataclasses import dataclass

from flatshard._data.failures import Failure, Unreadable, expect, missing
from flatshard._data.json_rows import JsonRows, Problem, Scanner
from flatshard._data.text_files import (
    chunks,
    compression_of,
    find_invalid,
    is_gzip,
    is_zstd,
    lines,
    raw_chunks,
    replace_invalid,
    utf8_chunks,
)

_HEAD = 1 << 16
_COMPRESSED = (".gz", ".gzip", ".zst", ".zstd")


@dataclass
class TextOptions:
    """How the texts of files are read."""

    field: str = "text"  # of JSON rows, and column of tables
    replaces_invalid: bool = False  # bytes that are not UTF-8 become U+FFFD
    is_chat: bool = False  # documents are the JSON rows themselves
    num_replaced: int = 0


@dataclass(frozen=True)
class Format:
    """A kind of file. Its first bytes or the end of its name show it."""

    name: str  # of --format
    title: str  # in the summary; "": one document a file
    read: Callable
    magic: bytes = b""
    suffixes: tuple[str, ...] = ()


FORMATS: dict[str, Format] = {}


def reader(name, title="", magic=b"", suffixes=()):
    def register(function):
        FORMATS[name] = Format(name, title, function, magic, suffixes)
        return function

    return register


@reader(
    "json",
    "JSON",
    suffixes=(".jsonl", ".ndjson", ".json", ".jsonlines", ".jl", ".ldjson"),
)
def read_json(path, options):
    yield from JsonRows(path, options.field, options.is_chat)


@reader("parquet", "Parquet", magic=b"PAR1", suffixes=(".parquet",))
def read_parquet(path, options):
    file = pyarrow("a .parquet file", "parquet").ParquetFile(path)
    check_column(path, options.field, file.schema_arrow.names)
    batches = file.iter_batches(columns=[options.field])
    yield from values(path, options.field, (b.column(0) for b in batches))


@reader("arrow", "Arrow", magic=b"ARROW1", suffixes=(".arrow",))
def read_arrow(path, options):  # the data of `datasets` are streams
    with pyarrow("an .arrow file").memory_map(path) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        ipc = pyarrow("an .arrow file", "ipc")
        table = (ipc.open_file if is_file else ipc.open_stream)(source)
        check_column(path, options.field, table.schema.names)
        count = table.num_record_batches if is_file else None
        batches = map(table.get_batch, range(count)) if is_file else table
        columns = (batch.column(options.field) for batch in batches)
        yield from values(path, options.field, columns)


@reader("csv", "CSV", suffixes=(".csv", ".tsv"))
def read_csv(path, options):
    csv.field_size_limit(sys.maxsize)
    text = (f"{line.decode()}\n" for line in lines(path))
    delimiter = "\t" if inner_name(path).endswith(".tsv") else ","
    rows = csv.DictReader(text, delimiter=delimiter, strict=True)
    check_column(path, options.field, rows.fieldnames or [])
    for row in rows:
        yield rows.line_num, (row[options.field] or "").encode()


@reader("bytes")
def read_bytes(path, options):
    yield 0, whole(raw_chunks(path))


@reader("text")
def read_text(path, options):
    text = whole(utf8_chunks(path))
    if options.replaces_invalid:
        text, count = replace_invalid(text)
        options.num_replaced += count
    check_text(path, text)
    yield 0, text


def whole(parts):
    found = bytearray()  # which grows in its place
    for part in parts:
        found += part
    return found


def check_text(path, text):
    bad = find_invalid(text)
    if bad is None:
        return
    raise Failure(
        f"{path}:{1 + text.count(10, 0, bad)}: expected UTF-8, got the byte "
        f"0x{text[bad]:02x} (byte {bad} of the text). Convert the file, for example with "
        "iconv -f latin1 -t utf-8; or give --format text to replace such bytes by "
        "U+FFFD, or --format bytes"
    )


def pyarrow(what, module=""):
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise missing(what, "pyarrow") from error
    return getattr(pyarrow, module) if module else pyarrow


def check_column(path, field, columns):
    expect(
        field in columns,
        f"{path}: expected the text field '{field}', found {', '.join(columns)}; name "
        "another with --text-field",
        Failure,
    )


def values(path, field, columns):
    """Yields the texts of Arrow columns, and the numbers of their rows from 1."""
    found = (value for column in columns for value in column.to_pylist())
    for row, value in enumerate(found, 1):
        if isinstance(value, str):
            value = value.encode("utf-8", errors="replace")
        if isinstance(value, bytes):
            place = f"{path}: row {row}: expected UTF-8 in the column '{field}'"
            expect(find_invalid(value) is None, place, Failure)
        elif value is not None:
            raise Failure(
                f"{path}: row {row}: expected text in the column '{field}', got a "
                f"{type(value).__name__}; name another with --text-field"
            )
        yield row, value


def read_documents(file, options):
    """Yields (number, text in UTF-8) of the documents of a file; "" where it is null."""
    if options.is_chat and file.format.name != "json":
        raise Failure(
            f"{file.path}: --chat needs JSON rows (.jsonl, .ndjson or .json), and this "
            "file has none"
        )
    try:
        for number, text in file.format.read(file.path, options):
            yield number, text or b""
    except UnicodeDecodeError as error:
        raise Failure(f"{file.path}: expected UTF-8: {error}") from error
    except (OSError, ValueError, csv.Error) as error:  # pyarrow's own are ValueErrors
        raise Unreadable(f"cannot read {file.path}: {error}") from error


# Formats that are not read here: first bytes and their place.
_TABLE = "a table; write it as CSV, JSON lines or Parquet"
_CONTAINERS = [
    (b"PK\3\4", 0, "a zip archive; unpack it"),
    (b"PK\5\6", 0, "a zip archive; unpack it"),
    (b"\xfd7zXZ\0", 0, "xz data; unpack it with xz -d"),
    (b"BZh", 0, "bzip2 data; unpack it with bzip2 -d"),
    (b"\x04\x22\x4d\x18", 0, "lz4 data; unpack it with lz4 -d"),
    (b"\xff\x06\0\0sNaPpY", 0, "snappy data; unpack it"),
    (b"7z\xbc\xaf\x27\x1c", 0, "a 7z archive; unpack it"),
    (b"Rar!\x1a", 0, "a rar archive; unpack it"),
    (b"ustar", 257, "a tar archive; unpack it with tar -xf"),
    (b"%PDF-", 0, "a PDF; extract its text, for example with pdftotext"),
    (b"FEA1", 0, "a Feather file; write it as Parquet"),
    (b"ORC", 0, "an ORC file; write it as Parquet"),
    (b"Obj\1", 0, "an Avro file; write it as Parquet"),
    (b"\x89HDF", 0, "an HDF5 file; write its texts as JSON lines"),
    (b"SQLite format 3\0", 0, "a SQLite database; write its texts as JSON lines"),
    (b"\x93NUMPY", 0, "a NumPy array; of tokens, see flatshard data import"),
    (
        b"MMIDIDX\0",
        0,
        "an index of Megatron's tokens; use flatshard data import",
    ),
    (b"PARE", 0, "encrypted Parquet; decrypt it"),
]
# Ends of names that identify a format, whatever the first bytes are.
_CONTAINER_NAMES = {
    ".xls": _TABLE,
    ".xlsx": _TABLE,
    ".tar": "a tar archive; unpack it with tar -xf",
    ".tgz": "a tar archive; unpack it with tar -xf",
    ".zip": "a zip archive; unpack it",
    ".bz2": "bzip2 data; unpack it with bzip2 -d",
    ".xz": "xz data; unpack it with xz -d",
    ".lz4": "lz4 data; unpack it with lz4 -d",
    ".pdf": "a PDF; extract its text, for example with pdftotext",
    ".doc": "a document of a word processor; extract its text",
    ".docx": "a document of a word processor; extract its text",
    ".tfrecord": "TensorFlow records; write them as JSON lines",
    ".warc": "a web archive; extract its texts",
    ".pkl": "a pickle; write its texts as JSON lines",
    ".pickle": "a pickle; write its texts as JSON lines",
    ".npy": "a NumPy array; of tokens, see flatshard data import",
}


def inner_name(path):
    """Returns the name in lower case without the end that marks compression."""
    name = path.rsplit("/", 1)[-1].lower()
    suffix = next((s for s in _COMPRESSED if name.endswith(s)), "")
    return name.removesuffix(suffix)


def container_of(path, head):
    """Returns the container ("a zip archive; unpack it") that a file's first bytes or
    the end of its name show, or ""."""
    for magic, at, what in _CONTAINERS:
        if head[at : at + len(magic)] == magic:
            return what
    name = inner_name(path)
    ends = (what for suffix, what in _CONTAINER_NAMES.items() if name.endswith(suffix))
    return next(ends, "")


def _head(source):
    head = b""
    while len(head) < _HEAD and (chunk := next(source, b"")):
        head += chunk
    return head[:_HEAD]


def _refuse(path, what):
    raise Failure(
        f"{path}: expected text, JSON rows or Parquet, got {what}. Leave it out with a "
        "glob such as --input 'folder/**/*.txt', or name what it is with --format "
        f"{', '.join(n for n in FORMATS if n != 'bytes')} or bytes"
    )


def _check_no_pointer(path, head):
    tools = {
        "Git LFS pointer to it; fetch the data with git lfs pull": head.startswith(
            b"version https://git-lfs.github.com/spec/"
        ),
        "git-annex pointer to it; fetch the data with git annex get": (
            head.startswith(b"/annex/objects/") and len(head) < 4096
        ),
    }
    for tool, is_pointer in tools.items():
        expect(not is_pointer, f"{path}: expected data, got a {tool}", Failure)


def _looks_like_utf16(head):
    """Returns whether bytes look like text of Latin letters in UTF-16: nearly every
    second byte is zero."""
    zeros = sorted(head[at::2].count(0) for at in (0, 1))
    half = len(head) // 2
    return half > 0 and 10 * zeros[1] >= 7 * half and 20 * zeros[0] <= half


def _looks_like_rows(head):
    """Returns whether a text starts with a line that is a JSON object, or with a list
    of objects."""
    text = head.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="surrogateescape")
    scanner = Scanner(text)
    if scanner.take("["):
        return scanner.take("{") and scanner.peek() == '"'
    scanner = Scanner(text.partition("\n")[0])
    if scanner.peek() != "{":
        return False
    try:
        return bool(scanner.object("")[0]) and not scanner.peek()
    except Problem:
        return False


def format_of(path, wanted="auto"):
    """Decides how a file is read: by its first bytes, and where they leave it open by
    the end of its name. `wanted` is a name of FORMATS, or auto.

    @return the format, the compression ("gzip", "zstd" or ""), and why the file is not
      text, or "". Such a file is left out when a folder or a glob has it."""
    raw = _head(raw_chunks(path, _HEAD))
    _check_no_pointer(path, raw)
    if wanted == "bytes":
        return FORMATS["bytes"], "", ""
    by_magic = (f for f in FORMATS.values() if f.magic and raw.startswith(f.magic))
    found = next(by_magic, None) if wanted == "auto" else FORMATS[wanted]
    if found and found.magic:
        return found, "", ""
    compression = compression_of(path)
    if found and found.name != "text":
        return found, compression, ""
    head = _head(chunks(path))
    name = inner_name(path)
    has_mark = head.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf"))
    begin = head[:8192]  # NULs are searched in these bytes, as git and grep do
    is_binary = not has_mark and (b"\0" in begin or name.endswith(".pyc"))
    if found:
        return found, compression, "binary" if is_binary else ""
    if is_gzip(head) or is_zstd(head):
        _refuse(path, "data that is compressed twice; unpack it once")
    for inner in FORMATS.values():
        if inner.magic and head.startswith(inner.magic):
            _refuse(path, f"{inner.title} within {compression}; unpack it")
    if what := container_of(path, head):
        _refuse(path, what)
    for inner in FORMATS.values():
        if not name.endswith(inner.suffixes):  # which no name does with ()
            continue
        # A stream of Arrow starts with the length of its schema.
        if head and inner.magic and head[:4] != b"\xff\xff\xff\xff":
            text = f"a {inner.suffixes[0]} file that does not start as {inner.title}"
            _refuse(path, f"{text} does")
        return inner, compression, ""
    if begin.count(0) and is_binary and _looks_like_utf16(begin):
        _refuse(
            path,
            "UTF-16 without a byte order mark, as it seems; convert it, for example with "
            "iconv -f utf-16le -t utf-8",
        )
    if is_binary:
        return FORMATS["text"], compression, "binary"
    if _looks_like_rows(head):
        _refuse(
            path,
            "a text that starts with a JSON object, so it may be one document or JSON "
            "rows (a name that ends in .jsonl marks the latter)",
        )
    return FORMATS["text"], compression, ""


def decide_formats(found, wanted):
    """Decides the format of each file. Removes files of folders and globs that are not text
    (images, programs), with the reason."""
    kept = []
    for file in found.files:
        if file.nbytes == 0:
            found.skipped.append((file.name, "empty"))
            continue
        file.format, file.compression, not_text = format_of(file.path, wanted)
        if not not_text or (not file.listed and wanted != "auto"):
            kept.append(file)
            continue
        expect(
            file.listed,
            f"{file.path}: expected text, JSON rows or Parquet, got {not_text} data; "
            "--format bytes reads each byte as it is, for --tokenizer bytes",
            Failure,
        )
        found.skipped.append((file.name, not_text))
    found.files = kept
