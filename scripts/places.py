"""Finds places in the sources by name: a function (or class, or variable) and tokens in it.

A place is found again after it moved to another file or was formatted, so a table of
places does not change with the sources.

    in  = "Scheduler::wanted"     a function; `Reader.read` in Python
    old = "f(a, b)"               tokens in it, spaced and wrapped in any way

Outer parts of a name may be missing: `wanted` is enough where no other function with
that name has the tokens. Namespaces and modules are not part of a name.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import tree_sitter
import tree_sitter_cpp
import tree_sitter_python

SOURCES = ("flatshard", "python")
LANGUAGES = {
    **dict.fromkeys((".h", ".cpp", ".cu", ".cuh"), tree_sitter_cpp.language()),
    ".py": tree_sitter_python.language(),
}
# Nodes that declare a name. Only the bodies of C++ functions have none below them.
NAMED = {
    "function_definition",
    "class_definition",
    "class_specifier",
    "struct_specifier",
    "enum_specifier",
    "declaration",
    "field_declaration",
    "assignment",
}
UNNAMED = {"compound_statement", "argument_list", "comment", "string"}
TOKEN = re.compile(r"\w+|[^\w\s]")
# Words in front of a function that the grammar takes for its type.
QUALIFIER = re.compile(r"\b(FLATSHARD_HOST_DEVICE|__(?:global|device|host)__)\b")


@dataclass(frozen=True)
class Place:
    """A range of a file's text."""

    path: Path
    begin: int
    end: int


def _declared(node):
    """Returns the name that a node declares, such as Scheduler.wanted, or ''."""
    name = node.child_by_field_name("name") or node.child_by_field_name("left")
    if name is None:
        name = node.child_by_field_name("declarator")
        while name is not None:
            inner = name.child_by_field_name("declarator")
            if inner is None and name.type == "reference_declarator":
                inner = name.named_children[-1]
            if inner is None:
                break
            name = inner
    if name is None:
        return ""
    text = re.sub(r"<[^<>]*>|\s", "", name.text.decode())
    return text.replace("::", ".")


def _named_nodes(node, outer=(), named=NAMED):
    """Yields (dotted name, node) of everything named below `node`, except variables of
    functions."""
    for child in node.children:
        names, inner = outer, named
        if child.type in named and (name := _declared(child)):
            names = (*outer, *name.split("."))
            yield ".".join(names), child
        if child.type == "function_definition":
            inner = named - {"assignment"}
        if child.type not in UNNAMED and child.child_count:
            yield from _named_nodes(child, names, inner)


def tokens_of(text):
    """Returns a pattern of the tokens of `text`, spaced and wrapped in any way."""
    tokens = TOKEN.findall(text)
    pattern = r"\b" if tokens[0][0].isidentifier() else ""
    for token, following in zip(tokens, tokens[1:] + [""]):
        pattern += re.escape(token)
        if re.match(r"\w", token):
            pattern += r"\b"
        pattern += r"\s*" if following else ""
    return re.compile(pattern)


class Index:
    """The named places of a checkout's sources. Files are parsed when first needed."""

    def __init__(self, root):
        self._texts = {}
        self._words = {}
        self._places = {}
        for folder in SOURCES:
            for path in sorted((root / folder).rglob("*")):
                if path.suffix in LANGUAGES:
                    self._texts[path] = text = path.read_text()
                    self._words[path] = set(re.findall(r"\w+", text))

    def _places_in(self, path):
        """Returns [(dotted name, place)] of a file."""
        if path not in self._places:
            parser = tree_sitter.Parser(tree_sitter.Language(LANGUAGES[path.suffix]))
            # One byte for each character, so that offsets cut the text.
            text = QUALIFIER.sub(lambda m: " " * len(m[0]), self._texts[path])
            tree = parser.parse(text.encode("ascii", "replace"))
            self._places[path] = [
                (name, Place(path, node.start_byte, node.end_byte))
                for name, node in _named_nodes(tree.root_node)
            ]
        return self._places[path]

    def text(self, place):
        """Returns the text of a place."""
        return self._texts[place.path][place.begin : place.end]

    def find(self, name, old):
        """Returns each occurrence of the tokens of `old` in what is called `name`."""
        pattern = tokens_of(old)
        dotted = name.replace("::", ".")
        needed = set(re.findall(r"\w+", f"{old} {dotted}"))
        found = set()
        for path, words in self._words.items():
            if not needed <= words:
                continue
            for full, place in self._places_in(path):
                if full == dotted or full.endswith("." + dotted):
                    text = self._texts[path]
                    for match in pattern.finditer(text, place.begin, place.end):
                        found.add(Place(path, *match.span()))
        return sorted(found, key=lambda p: (p.path, p.begin))


def indent_at(text, begin):
    """Returns the indentation of the line that `begin` is in."""
    line = text[text.rfind("\n", 0, begin) + 1 :]
    return line[: len(line) - len(line.lstrip(" "))]


def replaced(text, place, new):
    """Returns `text` with `new` at `place`. Its further lines are indented as the first."""
    lines = new.split("\n")
    indent = indent_at(text, place.begin)
    lines[1:] = [indent + line if line else line for line in lines[1:]]
    return text[: place.begin] + "\n".join(lines) + text[place.end :]
