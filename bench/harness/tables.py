"""Tables in Markdown, a row as soon as it is measured, and runs that alternate."""

import statistics


def head(*columns, left=(0,)):
    """Prints the head of a table; `left` has the columns of texts."""
    row(*columns)
    rules = ("---" if i in left else "---:" for i in range(len(columns)))
    print(f"|{'|'.join(rules)}|", flush=True)


def row(*cells):
    """Prints a row. Numbers are formatted already."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def ms_and_range(found):
    """Returns the median step of a run with the least and the most of its steps."""
    low, high = found["range"]
    return f"{found['ms']:.1f} ({low:.1f} to {high:.1f})"


def by_turns(ways, pairs, run):
    """Calls `run(way, pair)` for each way, in the opposite order in every other pair.

    Returns:
        {way: what its runs returned}
    """
    runs = {way: [] for way in ways}
    for pair in range(pairs):
        for way in ways if pair % 2 == 0 else reversed(ways):
            runs[way].append(run(way, pair))
    return runs


def ratios(first, second):
    """Returns second / first of the step times of each pair, and the median ratio."""
    each = [b["ms"] / a["ms"] for a, b in zip(first, second)]
    return each, statistics.median(each)
