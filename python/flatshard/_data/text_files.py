"""The bytes of files without their compression, and texts in UTF-8."""

import codecs
import zlib

from flatshard._data.failures import Failure, cannot_read, expect, missing

CHUNK = 1 << 20


def is_gzip(head):
    return head.startswith(b"\x1f\x8b")


def is_zstd(head):
    # A frame, or a skippable one before it.
    return head.startswith(b"\x28\xb5\x2f\xfd") or (
        head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50
    )


def raw_chunks(path, nbytes=CHUNK):
    """Yields the bytes of a file as they are."""
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(nbytes):
                yield chunk
    except OSError as error:
        raise cannot_read(path, error) from error


def compression_of(path):
    head = next(raw_chunks(path, 64), b"")
    return "gzip" if is_gzip(head) else "zstd" if is_zstd(head) else ""


def chunks(path):
    """Yields the bytes of a file without its compression, as its first bytes decide.
    All members of a gzip file and all frames of a zstd file are read."""
    kind = compression_of(path)
    if not kind:
        yield from raw_chunks(path)
        return

    def damaged(why):
        text = f"{path}: the {kind} data {why}; fetch or compress the file again"
        return Failure(text)

    unpack = _gunzip if kind == "gzip" else _unzstd
    # Small parts, since each may become a thousand times larger.
    yield from unpack(raw_chunks(path, 1 << 14), damaged)


def _gunzip(source, damaged):
    stream, is_padded = None, False
    for data in source:
        while data:
            if stream is None:
                rest = data.lstrip(b"\0")  # zeros may fill up the file's end
                is_padded |= len(rest) < len(data)
                data = rest
                if data and (is_padded or data[0] != 0x1F):
                    raise damaged("is followed by other bytes")
                stream = zlib.decompressobj(31) if data else None
                continue
            try:
                out = stream.decompress(data)
            except zlib.error as error:
                raise damaged("is damaged") from error
            if out:
                yield out
            data = stream.unused_data
            stream = None if stream.eof else stream
    if stream is not None:
        raise damaged("ends in the middle")


def _unzstd(source, damaged):
    try:
        import zstandard
    except ImportError as error:
        raise missing("a .zst file", "zstandard") from error
    # The window that `zstd --long=31` writes.
    frames = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    stream, num_frames = None, 0
    for data in source:
        while data:
            is_first = stream is None
            stream = stream or frames.decompressobj()
            try:
                out = stream.decompress(data)
            except zstandard.ZstdError as error:
                is_other = is_first and num_frames > 0
                why = "is followed by other bytes" if is_other else "is damaged"
                raise damaged(f"{why} ({error})") from error
            if out:
                yield out
            data = stream.unused_data if stream.eof else b""
            if stream.eof:
                stream, num_frames = None, num_frames + 1
    if stream is not None:
        raise damaged("ends in the middle")


def utf8_chunks(path):
    """Yields the text of a file in UTF-8: without compression and byte order mark, and
    from UTF-16 when its mark shows that. Bytes that are not UTF-8 pass through."""
    source = chunks(path)
    head = b""
    while len(head) < 4 and (chunk := next(source, b"")):
        head += chunk
    expect(
        not head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")),
        f"{path}: expected UTF-8 or UTF-16, got UTF-32; convert it with iconv -t utf-8",
        Failure,
    )
    if head[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        yield head.removeprefix(b"\xef\xbb\xbf")
        yield from source
        return
    name = "utf-16-le" if head[0] == 0xFF else "utf-16-be"
    # Half of a surrogate pair becomes U+FFFD.
    decoder = codecs.getincrementaldecoder(name)("replace")
    nbytes = len(head)
    yield decoder.decode(head[2:]).encode()
    for chunk in source:
        nbytes += len(chunk)
        yield decoder.decode(chunk).encode()
    expect(
        nbytes % 2 == 0,
        f"{path}: the UTF-16 text ends within a character; the file is truncated",
        Failure,
    )
    yield decoder.decode(b"", final=True).encode()


def lines(path):
    """Yields the lines of a text without their newlines."""
    pieces = []
    for chunk in utf8_chunks(path):
        head, newline, tail = chunk.partition(b"\n")
        pieces.append(head)
        if newline:
            yield b"".join(pieces)
            *full, rest = tail.split(b"\n")
            yield from full
            pieces = [rest]
    if last := b"".join(pieces):
        yield last


def find_invalid(data):
    """Returns the place of the first byte that is not UTF-8, or None."""
    if data.isascii():
        return None
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(data), CHUNK):
        part = data[at : at + CHUNK]
        try:
            decoder.decode(part, final=at + CHUNK >= len(data))
        except UnicodeDecodeError as error:
            # Its object starts with the end of the last part.
            return at + len(part) - len(error.object) + error.start
    return None


def replace_invalid(data):
    """Returns text in UTF-8 where each byte that is none is U+FFFD, and their number."""
    if find_invalid(data) is None:
        return data, 0
    text = data.decode("utf-8", errors="flatshard-bytes")
    before = data.count("\ufffd".encode())
    return text.encode(), text.count("\ufffd") - before


def _replace_byte(error):
    return "\ufffd", error.start + 1


codecs.register_error("flatshard-bytes", _replace_byte)
