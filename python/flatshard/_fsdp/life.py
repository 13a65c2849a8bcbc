"""The life of a unit: where in it a unit is, and which moves lead on.

A Root has one, too. It starts as ROOTED. docs/internals/autograd.md shows the table.
"""

import enum
from dataclasses import dataclass


class Life(enum.Enum):
    """Where in its life a unit is."""

    SHARDED = "sharded"  # it has a core with its shards, and is part of no Root
    ROOTED = "rooted"  # a Root gathers and reduces it
    TRAINED = "trained"  # it ran with gradients there
    OUTDATED = "outdated"  # the next forward makes another core, and another Root
    AWAY = "away"  # its parameters are on another device, and it has no core


SHARDED, ROOTED, TRAINED, OUTDATED, AWAY = Life


@dataclass(frozen=True)
class Move:
    """One move.

    Attributes:
        legal: the life before to the life after.
        error: raised in any other life.
        text: of the error. {unit} is the unit's name, {kind} its module's class, {life}
            the life that it is in.
        when_away: the text for a unit that is AWAY; "": the same.
    """

    legal: dict[Life, Life]
    error: type[Exception]
    text: str
    when_away: str = ""


_BEFORE_A_ROOT = {life: life for life in (SHARDED, OUTDATED, AWAY)}

MOVES = {
    "configure": Move(
        _BEFORE_A_ROOT,
        RuntimeError,
        "configure: the model ran, or was unsharded, before; call configure before its "
        "first forward",
    ),
    "share_streams": Move(
        _BEFORE_A_ROOT,
        RuntimeError,
        "share_comm_ctx: a {kind} ran, or was unsharded, before; call it before the first "
        "forward",
    ),
    "capture": Move(
        {SHARDED: SHARDED},
        RuntimeError,
        "make_graphed_callables: unit {unit} ran before; call it between fully_shard and "
        "the first forward",
        "make_graphed_callables: the parameters of unit {unit} are on another device; "
        "call it before they are moved",
    ),
    "join": Move(
        {SHARDED: SHARDED},
        RuntimeError,
        "{kind} ran, or was unsharded, before the module around it was wrapped; wrap all "
        "modules first, then run the outermost",
        "{kind} was moved to another device before the module around it was wrapped; wrap "
        "all modules first",
    ),
    "root": Move(
        {SHARDED: ROOTED},
        RuntimeError,
        "unit {unit} ran, or was unsharded, before as part of a smaller model; wrap all "
        "modules first, then run the outermost module",
    ),
    "train": Move(
        {ROOTED: TRAINED, TRAINED: TRAINED},
        RuntimeError,
        "unit {unit} is {life}, and cannot train before a forward of the outermost module",
    ),
    "outdate": Move(
        {ROOTED: OUTDATED, TRAINED: OUTDATED, OUTDATED: OUTDATED},
        RuntimeError,
        "unit {unit} is {life}, and has no Root that could end",
    ),
    "renew": Move(
        {SHARDED: SHARDED, OUTDATED: SHARDED, AWAY: SHARDED},
        RuntimeError,
        "unit {unit} is {life}, and gets no other core before its Root ends",
    ),
    "leave": Move(
        {SHARDED: AWAY, OUTDATED: AWAY, AWAY: AWAY},
        RuntimeError,
        "unit {unit} is {life}, and leaves its device only after its Root ended",
    ),
}


class LifeCycle:
    """Where one unit, or one Root, is.

    Attributes:
        now: Life.
        keeps_rows: it was TRAINED at some time. Optimizers may have states for its rows,
            so each rank keeps them in every later life.
    """

    __slots__ = "now", "keeps_rows"

    def __init__(self, now=SHARDED):
        self.now = now
        self.keeps_rows = False

    def check(self, move, unit="", kind=""):
        """Raises the error of `move` where it is illegal now."""
        rule = MOVES[move]
        if self.now not in rule.legal:
            text = (self.now is AWAY and rule.when_away) or rule.text
            raise rule.error(text.format(unit=unit, kind=kind, life=self.now.value))

    def move(self, move, unit="", kind=""):
        """Makes `move`, or raises its error."""
        self.check(move, unit, kind)
        self.now = MOVES[move].legal[self.now]
        if self.now is TRAINED:
            self.keeps_rows = True


def table():
    """Returns the lines of the table of moves, as the documentation shows it: the life
    after each move, by the life before."""
    lives = [life.value for life in Life]
    rows = [["move", *lives], ["---"] * (len(lives) + 1)]
    for name, move in MOVES.items():
        after = [move.legal.get(life) for life in Life]
        rows.append([f"`{name}`", *(a.value if a else "error" for a in after)])
    return [f"| {' | '.join(row)} |".replace("| --- ", "|---") for row in rows]
