"""The documents of a JSON file: objects, one in each line or as elements of one list,
that have a document in a field. A file whose first object spans several lines, or that
is a list, is read into memory completely."""

import json
import re

from flatshard._data.failures import Failure
from flatshard._data.text_files import lines

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_WORD = re.compile(r'[^ \t\r\n,:\]}\[{"]+')
_ESCAPE = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|(.))', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_RAW_BYTE = re.compile("[\udc80-\udcff]")  # of a byte that is not UTF-8
_DECODE = json.JSONDecoder(strict=False)

try:
    from orjson import loads as _loads
except ImportError:

    def _loads(line):
        return _DECODE.decode(line.decode())


def without_halves(text):
    """Returns the text with U+FFFD for each half of a surrogate pair, because no encoding
    of text has halves."""
    return _SURROGATE.sub("\ufffd", text)


class Problem(Exception):
    """Why a text is not a JSON object, and where."""

    def __init__(self, what, at, incomplete=False):
        super().__init__(what)
        self.what, self.at, self.incomplete = what, at, incomplete


class Scanner:
    """Reads one field of JSON objects. The other fields are only passed over, so they
    may contain what no parser accepts: NaN, 1e400, half of a surrogate pair."""

    def __init__(self, text, at=0):
        self.text, self.at = text, at

    def peek(self):
        """Returns the next character that is not white space; "" at the end."""
        self.at = _SPACE.match(self.text, self.at).end()
        return self.text[self.at : self.at + 1]

    def take(self, c):
        found = self.peek() == c
        self.at += found
        return found

    def fail(self, what, incomplete=False):
        raise Problem(what, self.at, incomplete)

    def describe_next(self):
        c = self.peek()
        known = {"{": "an object", "[": "a list", '"': "text", "n": "null"}
        known |= {"t": "true or false", "f": "true or false", "": "nothing"}
        if c in known:
            return known[c]
        is_number = c in "-NI0123456789"
        return "a number" if is_number else f"'{self.text[self.at : self.at + 20]}'"

    def raw_string(self):
        """Passes over a string and returns what is between its quotes."""
        found = _STRING.match(self.text, self.at)
        if not found:
            self.at = len(self.text)
            self.fail("ends within a text", incomplete=True)
        self.at = found.end()
        return found[1]

    def string(self):
        raw = self.raw_string()
        for found in _ESCAPE.finditer(raw):
            if found[2] == "u":
                self.fail("has a \\u that four hexadecimal digits do not follow")
            if found[2]:
                self.fail(f"has the escape '\\{found[2]}', but JSON does not have it")
        return _DECODE.decode(f'"{raw}"')

    def skip_value(self):
        open_ = []  # the brackets that are to be closed
        while True:
            c = self.peek()
            if not c:
                self.fail("ends within an object", incomplete=True)
            if c == '"':
                self.raw_string()
            elif c in "{[":
                open_.append("}" if c == "{" else "]")
                self.at += 1
            elif open_ and c in ",:":
                self.at += 1
            elif open_ and c == open_[-1]:
                open_.pop()
                self.at += 1
            elif word := _WORD.match(self.text, self.at):
                self.at = word.end()
            else:
                self.fail(f"expected a value, got '{c}'")
            if not open_:
                return

    def object(self, field):
        """Reads the object that is next. Returns the fields' names, the names of the
        fields with a list, and what the field has: a text, None, or (a description,)."""
        names, lists, value = [], [], ()
        got = self.describe_next()
        if not self.take("{"):
            self.fail(f"expected an object, got {got}")
        while not self.take("}"):
            if self.peek() != '"':
                if not self.peek():
                    self.fail("ends within an object", incomplete=True)
                got = self.describe_next()
                self.fail(f"expected a name in double quotes, got {got}")
            name = self.string()
            names.append(name)
            if not self.take(":"):
                self.fail(f"expected ':' after \"{name}\"", not self.peek())
            c = self.peek()
            if c == "[":
                lists.append(name)
            if name != field:
                self.skip_value()
            elif value != ():
                self.fail(f"has the field '{name}' twice")
            elif c == '"':
                begin = self.at
                value = self.string()
                check_utf8(self.text, begin, self.at, f"field '{field}'")
            else:
                value = None if c == "n" else (self.describe_next(),)
                self.skip_value()
            if not self.take(",") and self.peek() != "}":
                if not self.peek():
                    self.fail("ends within an object", incomplete=True)
                got = self.describe_next()
                self.fail(f"expected ',' or '}}' after \"{name}\", got {got}")
        return names, lists, value


def check_utf8(text, begin, end, where):
    if not text.isascii() and (bad := _RAW_BYTE.search(text, begin, end)):
        raise Problem(
            f"expected UTF-8 in the {where}, got the byte 0x{ord(bad[0]) - 0xDC00:02x}; "
            "convert the file, for example with iconv -f latin1 -t utf-8",
            begin,
        )


class JsonRows:
    """Iterates over (line, text in UTF-8) of a file's documents; the text is "" where it
    is null.

    @param is_whole  documents are the objects themselves, as JSON, and not the text in
      the field."""

    def __init__(self, path, field, is_whole=False):
        self.path, self.field, self.is_whole = path, field, is_whole
        self.name = json.dumps(field, ensure_ascii=False).encode()

    def fail(self, what, line):
        raise Failure(f"{self.path}:{line}: {what}")

    def __iter__(self):
        source = self.lines()
        for number, line in source:
            form = form_of(line)
            if form == "lines":
                yield number, self.of_line(number, line)
                for number, line in source:
                    yield number, self.of_line(number, line)
            else:
                rest = [line, *(line for _, line in source.all())]
                text = b"\n".join(rest).decode("utf-8", errors="surrogateescape")
                del rest
                yield from self.of_whole(number, text, form == "list")

    def lines(self):
        return _Lines(self.path)

    def of_line(self, number, line):
        try:
            row = _loads(line)
            # An object with a name twice has no single meaning.
            if type(row) is dict and (self.is_whole or line.count(self.name) < 2):
                if self.is_whole:
                    return line.strip(b" \t\r\n")
                text = row[self.field]
                return b"" if text is None else text.encode()
        except (ValueError, LookupError, AttributeError, RecursionError):
            pass
        text = line.decode("utf-8", errors="surrogateescape")
        found, end = self.of_object(text, 0, number, 0)
        scanner = Scanner(text, end)
        if scanner.peek():
            self.fail("more follows the object in its line", number)
        return found

    def of_object(self, text, at, line, counted):
        """Returns the document of the object at `at`, and where the object ends.

        @param line, counted  of a place before it."""
        scanner = Scanner(text, at)

        def line_at(place):
            return line + text.count("\n", counted, place)

        scanner.peek()
        begin = scanner.at
        try:
            names, lists, value = scanner.object(self.field)
            if self.is_whole:
                check_utf8(text, begin, scanner.at, "row")
                return text[begin : scanner.at].encode(), scanner.at
        except Problem as problem:
            if problem.incomplete:
                what = "the object that starts here does not end"
                self.fail(what, line_at(begin))
            more = " (JSON rows are objects, one a line or in one list)"
            is_utf8 = problem.what.startswith("expected UTF-8")
            self.fail(problem.what + ("" if is_utf8 else more), line_at(problem.at))
        if value == ():
            self.fail(self.describe_missing(names, lists), line_at(begin))
        if isinstance(value, tuple):
            what = f"expected text in the field '{self.field}', got {value[0]}"
            self.fail(what, line_at(begin))
        return without_halves(value or "").encode(), scanner.at

    def describe_missing(self, names, lists):
        hint = ""
        if lists:
            hint = (
                f" (the documents may be the elements of '{lists[0]}': write them as "
                f"lines with jq -c '.{lists[0]}[]')"
            )
        if {"messages", "conversations"} & set(names):
            hint = " (rows of chats need --chat)"
        return (
            f"expected the text field '{self.field}', found "
            f"{', '.join(names) or 'no field'}; name another with --text-field{hint}"
        )

    def of_whole(self, line, text, is_list):
        at = counted = 0
        if is_list:
            at = text.index("[") + 1
        cut = "the list is truncated: it does not end with ']'"
        while True:
            scanner = Scanner(text, at)
            line += text.count("\n", counted, scanner.at)
            counted = scanner.at
            c = scanner.peek()
            line += text.count("\n", counted, scanner.at)
            counted = scanner.at
            if is_list and c == "]":
                scanner.take("]")
                if scanner.peek():
                    more = text.count("\n", counted, scanner.at)
                    self.fail("more follows the list", line + more)
                return
            if not c:
                if is_list:
                    self.fail(cut, line)
                return
            found, end = self.of_object(text, counted, line, counted)
            yield line, found
            scanner = Scanner(text, end)
            if is_list and not scanner.take(",") and scanner.peek() != "]":
                got = scanner.describe_next()
                what = f"expected ',' or ']' after an element, got {got}"
                more = text.count("\n", counted, scanner.at)
                self.fail(what if scanner.peek() else cut, line + more)
            at = scanner.at


class _Lines:
    """The lines of a file that are not blank, and their numbers from 1."""

    def __init__(self, path):
        self.source = lines(path)
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        for number, line in self.all():
            # Of files that were put together.
            line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip(b" \t\r"):
                return number, line
        raise StopIteration

    def all(self):
        for line in self.source:
            self.number += 1
            yield self.number, line


def form_of(line):
    """Returns "list", "lines", or "objects" when an object continues in the next line."""
    scanner = Scanner(line.decode("utf-8", errors="surrogateescape"))
    if scanner.peek() == "[":
        return "list"
    try:
        if scanner.peek() == "{":
            scanner.skip_value()
    except Problem as problem:
        if problem.incomplete:
            return "objects"
    return "lines"
