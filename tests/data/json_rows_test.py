"""Documents of JSON files, with orjson where it is installed and without."""

import json

import pytest
from flatshard._data import json_rows
from flatshard._data.failures import Failure
from flatshard._data.json_rows import JsonRows

MARK = b"\xef\xbb\xbf"


@pytest.fixture(params=["installed", "json"], autouse=True)
def parser(request, monkeypatch):
    if request.param == "json":
        monkeypatch.setattr(
            json_rows, "_loads", lambda line: json_rows._DECODE.decode(line.decode())
        )


@pytest.fixture
def rows(tmp_path):
    def read(content, is_whole=False):
        path = tmp_path / "a.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        found = JsonRows(str(path), "text", is_whole)
        return [(line, text.decode()) for line, text in found]

    return read


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ('{"text": "a"}\n\n{"text": "b"}', [1, 3]),
        (MARK + b'{"text":"a"}\r\n{"text":"b"}\r\n', [1, 2]),
        (b'{"text":"a"}\n' + MARK + b'{"text":"b"}\n', [1, 2]),
        ('[{"text": "a"}, {"text": "b"}]\n', [1, 1]),
        ('\n[\n {"text": "a"},\n {\n"text": "b"\n}\n]', [3, 4]),
        ('{\n"text": "a"}\n{\n"text": "b"\n}\n', [1, 3]),
    ],
)
def test_lines_a_list_and_objects_of_several_lines(rows, content, lines):
    assert rows(content) == list(zip(lines, "ab", strict=True))


def test_empty_texts(rows):
    assert rows('{"text": null}\n{"text": ""}') == [(1, ""), (2, "")]
    assert rows("[]") == rows("") == rows("\n \n") == []


@pytest.mark.parametrize(
    "value",
    [
        b"NaN",
        b"-Infinity",
        b"1e400",
        b"7" * 9999,
        b'"\\ud83d"',
        b'"\xff\\x"',
        b'{"text": [1, {"text": "no"}]}',
        b"[" * 100000 + b"]" * 100000,
        b'1, "b": 2',
    ],
    ids=range(9),
)
def test_other_fields_may_hold_anything(rows, value):
    row = b'{"b": ' + value + b', "text": "a", "c": ' + value + b"}"
    assert rows(row) == [(1, "a")]
    assert rows(b"[" + row + b"]") == [(1, "a")]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (r"\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00", '"\\/\b\f\n\r\t\u00e9\U0001f600'),
        (r"x \ud83d y", "x \ufffd y"),
        (r"\ud83d\u0041\ude00", "\ufffdA\ufffd"),
    ],
)
def test_escapes_and_halves_of_surrogate_pairs(rows, text, wanted):
    assert rows(f'{{"te\\u0078t": "{text}"}}') == [(1, wanted)]


def test_whole_rows_are_as_they_are_written(rows):
    row = '{"messages":  [1, NaN], "a": "\\ud83d"}'
    assert rows(f"  {row} \r\n{row}", is_whole=True) == [(1, row), (2, row)]
    assert rows(f"[\n{row} , {row}]", is_whole=True) == [(2, row), (2, row)]


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ('{"text": "a"}\n{"text": "b', "2: the object that starts here does not end"),
        ('{"text": "a"} {"text": "c"}', "1: more follows the object in its line"),
        ('[{"text": "a"},\n{"text": "b"}', "2: the list is truncated"),
        ('[{"text": "a"}]\n{"text": "b"}', "2: more follows the list"),
        ('[\n{"text": "a"},\n"b"]', "3: expected an object, got text"),
        ('{"text": "a"}\n[1]', "2: expected an object, got a list"),
        (
            '{"data": [], "version": 1}',
            "1: expected the text field 'text', found data, version; name another with "
            "--text-field (the documents may be the elements of 'data': write them as "
            "lines with jq -c '.data[]')",
        ),
        (
            '{"messages": []}',
            "1: expected the text field 'text', found messages; name another with "
            "--text-field (rows of chats need --chat)",
        ),
        ('{"text": 1}', "1: expected text in the field 'text', got a number"),
        ('{"text": "a", "text": "b"}', "1: has the field 'text' twice"),
        (
            b'{"text": "a"}\n{"text": "caf\xe9"}',
            "2: expected UTF-8 in the field 'text', got the byte 0xe9",
        ),
        ("{'text': 'a'}", "1: expected a name in double quotes"),
        (r'{"text": "\q"}', "the escape '\\q', but JSON does not have it"),
        (r'{"text": "\u12g4"}', "four hexadecimal digits"),
        ('{"text" "a"}', "expected ':'"),
        ('{"a": }', "expected a value, got '}'"),
    ],
)
def test_errors_name_the_line(rows, content, wanted):
    with pytest.raises(Failure) as caught:
        rows(content)
    assert wanted in str(caught.value).partition("a.json:")[2]


def test_a_row_of_a_chat_is_utf8(rows):
    with pytest.raises(
        Failure, match="2: expected UTF-8 in the row, got the byte 0xff"
    ):
        rows(b'{"a": 1}\n{"b": "\xff"}', is_whole=True)


def test_long_lines(rows):
    long = "0123456789" * 300000
    content = "".join(json.dumps({"text": f"{i} {long}"}) + "\n" for i in range(3))
    assert rows(content) == [(i + 1, f"{i} {long}") for i in range(3)]
