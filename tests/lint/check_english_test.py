"""scripts/check_english finds each pattern of idiom, and only the pattern.

usage: check_english_test.py
"""

import importlib.machinery
import importlib.util
import unittest
from pathlib import Path

PATH = str(Path(__file__).parents[2] / "scripts/check_english")
LOADER = importlib.machinery.SourceFileLoader("check_english", PATH)
SPEC = importlib.util.spec_from_loader("check_english", LOADER)
check_english = importlib.util.module_from_spec(SPEC)
LOADER.exec_module(check_english)

# The first word of a rule: a text that breaks it, and one that does not.
IN_PAGES = {
    "so": ("restarts so often", "restarts often"),
    "that": ("The files are peft's.", "PEFT's files are small."),
    "gather": ("as many units stay gathered", "units are all-gathered"),
    "release": ("a weight is released", "a release of torch"),
    "product": ("multiplied in one product", "multiplied in one matmul"),
    "cut": ("matrices are cut among ranks", "matrices are split"),
    "whole": ("a whole parameter", "graphs of whole steps"),
    "take": ("which takes all recipes", "a step takes 35 ms"),
    "hold": ("a rank holds two windows", "a rank stores two"),
    "come": ("the table may come to 4 GiB", "outcome"),
    "put": ("give up, and begin", "output"),
    "nobody": ("nobody reduces it", "no rank reduces it"),
    ",": ("shards, which no step reads", "shards that no step reads"),
    "a": ("32 KiB a token, 5 ms a step", "32 KiB per token"),
    "alone": ("for adapters alone", "only for adapters"),
    "inside": ("inside of a step", "inside a step"),
    "begin": ("each document's begin", "each document's start"),
    "spelling": ("neighbouring ranks", "neighboring ranks"),
    "share": ("all but for the last", "all except the last"),
    "is": ("it is no folder", "there is no folder; it is no longer used"),
    "corpus": ("the corpus is damaged", "the folder corpora/texts"),
}
IN_TEXTS = {
    "starts": ("Of those delays.", "Seed of those delays"),
    "chain": ("limit; 0: none", "Limit. 0 disables it."),
    "got": ("expected tokens, got none", "expected 2, got 3"),
}


class CheckEnglish(unittest.TestCase):
    def test_each_rule_finds_its_pattern(self):
        rules = [*check_english.IDIOM, *check_english.IDIOM_OF_TEXTS]
        first = [rule.split()[0].rstrip(":") for rule in rules]
        examples = IN_PAGES | IN_TEXTS
        self.assertEqual([word or "," for word in first], [*examples])
        for word, (bad, good) in examples.items():
            for text, expected in ((bad, True), (good, False)):
                found = {
                    rule.split()[0].rstrip(":") or ","
                    for _, rule, _ in check_english.idiom(text, check_english.IN_TEXTS)
                }
                self.assertEqual(word in found, expected, f"{word}: {text}: {found}")

    def test_pages_are_read_without_code_and_links(self):
        page = "See [x](whole.md), `gather`.\n\n```\ncut  # alone\n```\n\nA whole.\n"
        found = [(line, rule) for line, rule, _ in check_english.findings(page)]
        rules = [(4, "alone: only"), (7, "whole: full or unsharded")]
        self.assertEqual(found, rules)

    def test_strings_and_comments_are_read(self):
        code = '// inside of it\nf("a " "whole");\n'
        (text,) = (text for _, text in check_english.texts_of_cpp(code))
        self.assertEqual(text, '"a whole"')
        (comment,) = check_english.comments_of(Path("x.cpp"), code)
        self.assertEqual(comment, (1, "inside of it"))


if __name__ == "__main__":
    unittest.main(verbosity=0)
