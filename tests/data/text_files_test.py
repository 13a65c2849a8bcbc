"""Compression, byte order marks and bytes that are not UTF-8."""

import pytest
from flatshard._data.failures import Failure
from flatshard._data.text_files import find_invalid, lines, replace_invalid, utf8_chunks

from tests.data.corpora import gzipped

# Longer than the readers' buffers, and no repetition of one block.
LONG = "".join(f"line {i * 7919} é\n" for i in range(60000)).encode()


@pytest.fixture
def read(tmp_path):
    def read(content):
        path = tmp_path / "a"
        path.write_bytes(content)
        return b"".join(utf8_chunks(str(path)))

    return read


@pytest.fixture
def zstd():
    zstandard = pytest.importorskip("zstandard")
    return zstandard.ZstdCompressor(level=1).compress


def test_files_as_they_are_and_gzip(read):
    assert read(LONG) == read(gzipped(LONG)) == LONG
    # Members one after the other, and zeros of a tape after them.
    parts = gzipped("one\n") + gzipped("") + gzipped(LONG)
    assert read(parts) == b"one\n" + LONG
    assert read(gzipped("one") + bytes(700)) == b"one"


def test_zstd(read, zstd):
    assert read(zstd(LONG)) == LONG
    assert read(zstd(b"one\n") + zstd(LONG) + zstd(b"")) == b"one\n" + LONG
    # A skippable frame first.
    assert read(b"\x50\x2a\x4d\x18\x02\0\0\0ab" + zstd(b"one")) == b"one"


def check_damage(read, packed, name):
    for cut in (5, len(packed) // 2, len(packed) - 1):
        with pytest.raises(Failure, match=f"the {name} data ends in the middle"):
            read(packed[:cut])
    with pytest.raises(Failure, match="followed by other"):
        read(packed + b"garbage")


def test_damaged_gzip_is_an_error(read):
    packed = gzipped(LONG)
    check_damage(read, packed, "gzip")
    damaged = bytearray(packed)
    damaged[-6] ^= 1  # of the checksum
    with pytest.raises(Failure, match="the gzip data is damaged"):
        read(bytes(damaged))


def test_damaged_zstd_is_an_error(read, zstd):
    packed = zstd(LONG)
    check_damage(read, packed, "zstd")
    damaged = bytearray(packed)
    damaged[4] ^= 0xFF  # of the header
    with pytest.raises(Failure, match="the zstd data"):
        read(bytes(damaged))


def test_zstd_without_its_package(read, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(Failure, match="-m pip install zstandard") as caught:
        read(b"\x28\xb5\x2f\xfd....")
    assert caught.value.code == "config"


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"\xef\xbb\xbfa", "a"),
        (b"\xff\xfea\0\xe9\0\x3d\xd8\0\xde", "aé\U0001f600"),
        (b"\xfe\xff\0a\0\xe9\xd8\x3d\xde\0", "aé\U0001f600"),
        (gzipped(b"\xff\xfea\0"), "a"),
        (b"\xff\xfe\x3d\xd8a\0", "\ufffda"),
        (b"\xff\xfea\0\x3d\xd8", "a\ufffd"),
        (b"\xef\xbb\xbf", ""),
        (b"\xff\xfe", ""),
        (
            b"\xff\xfe" + "\U0001f600x".encode("utf-16-le") * 400000,
            "\U0001f600x" * 400000,
        ),
    ],
    ids=range(9),
)
def test_byte_order_marks(read, content, wanted):
    assert read(content).decode() == wanted


def test_utf16_that_is_cut_off_and_utf32(read):
    with pytest.raises(Failure, match="truncated"):
        read(b"\xff\xfea\0b")
    with pytest.raises(Failure, match="got UTF-32"):
        read(b"\xff\xfe\0\0a\0\0\0")


def test_lines(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"one\r\n\ntwo")
    assert list(lines(str(path))) == [b"one\r", b"", b"two"]


@pytest.mark.parametrize(
    "bad",
    [
        b"\x80",
        b"\xc1\xbf",
        b"\xe0\x80\x80",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xf0\x9f\x98",
        b"\xc3",
        b"\xff",
    ],
)
@pytest.mark.parametrize("before", [8, (1 << 20) - 1, 3 << 20])
def test_the_first_byte_that_is_not_utf8(bad, before):
    good = "aé€\U0001f600".encode()
    assert find_invalid(good * 3) is None
    text = (good * (before // len(good) + 1))[:before]
    text = text.decode(errors="ignore").encode().ljust(before, b"x")
    assert find_invalid(text + bad) == before
    assert find_invalid(text + bad + b"more") == before


def test_each_bad_byte_is_replaced():
    found = replace_invalid(b"caf\xe9 \xff\xfe. \xe2\x82x")
    assert found == ("caf\ufffd \ufffd\ufffd. \ufffd\ufffdx".encode(), 5)
    assert replace_invalid("é \ufffd".encode()) == ("é \ufffd".encode(), 0)
