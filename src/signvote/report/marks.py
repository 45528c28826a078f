"""How a group is drawn, the same in the figure and on the page."""

from __future__ import annotations

from dataclasses import dataclass

from signvote.report.groups import Group, batch_order, unique

# Okabe and Ito's colours, told apart by the colour-blind, readable on white and on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# On and off lengths in line widths; no two rules look alike without colour.
DASHES = (
    (),
    (4.0, 2.0),
    (1.0, 1.5),
    (6.0, 1.5, 1.0, 1.5),
    (8.0, 3.0),
    (2.0, 2.0),
    (3.0, 1.0, 1.0, 1.0, 1.0, 1.0),
)
FIRST = ("pooled", "it-signsgd", "majority", "robust")  # these take the first dashes, the others what is left
# Where every curve has a colour of its own: plain voting dashed as in the paper, yardsticks dotted.
BY_CURVE = {"majority": (4.0, 2.0), "oracle": (1.0, 1.5), "sgd": (1.0, 1.5)}


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Which colour and which dashes stand for what."""

    colours: dict[str, str]  # batches -> colour; where those are told otherwise: name -> colour
    dashes: dict[str, tuple[float, ...]]  # name -> dashes
    by_curve: bool = False  # names are those of curves, not of rules
    recipes: bool = False  # names tell the recipe

    def name(self, group: Group) -> str:
        """The entry in the legend of line styles."""
        return group.name(recipe=self.recipes) if self.by_curve else group.rule

    def colour(self, group: Group) -> str:
        """One colour per batch mode; one per name where modes are told by the panel, or there is one."""
        return self.colours.get(group.batches) or self.colours[self.name(group)]

    def dash(self, group: Group) -> tuple[float, ...]:
        """On and off lengths of the line; none: it is solid."""
        return self.dashes[self.name(group)]


def marks_of(found: list[Group], *, by_curve: bool = False) -> Marks:
    """The marks of all groups of one comparison; by curve where each panel has one batch mode."""
    if by_curve:
        return _by_curve(found)
    batches, rules = batch_order(found), unique(group.rule for group in found)
    styled = sorted(rules, key=lambda rule: FIRST.index(rule) if rule in FIRST else len(FIRST))
    coloured = batches if len(batches) > 1 else rules
    return Marks(
        colours={name: COLOURS[i % len(COLOURS)] for i, name in enumerate(coloured)},
        dashes={rule: DASHES[styled.index(rule) % len(DASHES)] for rule in rules},
    )


def _by_curve(found: list[Group]) -> Marks:
    """The colours in turn; of each the dashes that no other curve of that colour has, while there are any."""
    recipes = len({group.config.get("recipe") for group in found}) > 1
    rules = {group.name(recipe=recipes): group.rule for group in found}
    usual = sorted(DASHES, key=lambda dashes: dashes in BY_CURVE.values())  # those that mean something last
    taken: dict[str, tuple[str, tuple[float, ...]]] = {}  # name -> colour, dashes
    for i, (name, rule) in enumerate(rules.items()):
        colour, wanted = COLOURS[i % len(COLOURS)], [BY_CURVE[rule]] if rule in BY_CURVE else []
        free = [dashes for dashes in (*wanted, *usual) if (colour, dashes) not in taken.values()]
        taken[name] = colour, (free or wanted or usual)[0]
    return Marks(
        colours={name: colour for name, (colour, _) in taken.items()},
        dashes={name: dashes for name, (_, dashes) in taken.items()},
        by_curve=True,
        recipes=recipes,
    )
