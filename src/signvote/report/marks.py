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


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Which colour stands for which batches and which dashes for which rule."""

    colours: dict[str, str]  # batches -> colour; of a single one: rule -> colour
    dashes: dict[str, tuple[float, ...]]  # rule -> dashes

    def colour(self, group: Group) -> str:
        """One colour per batch mode; one per rule where there is only one mode to tell."""
        return self.colours.get(group.batches) or self.colours[group.rule]


def marks_of(found: list[Group]) -> Marks:
    """The marks of all groups of one comparison."""
    batches, rules = batch_order(found), unique(group.rule for group in found)
    styled = sorted(rules, key=lambda rule: FIRST.index(rule) if rule in FIRST else len(FIRST))
    coloured = batches if len(batches) > 1 else rules
    return Marks(
        colours={name: COLOURS[i % len(COLOURS)] for i, name in enumerate(coloured)},
        dashes={rule: DASHES[styled.index(rule) % len(DASHES)] for rule in rules},
    )
