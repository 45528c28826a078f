"""The color and the dashes of each curve, the same in the figure and on the page."""

from __future__ import annotations

from dataclasses import dataclass

from signvote.report.experiments import Experiment, batch_order
from signvote.report.labels import unique

Dashes = tuple[float, ...]  # lengths of dash and gap in line widths; empty for a solid line

# Okabe and Ito's colors: color-blind readers can distinguish them, on white and on black.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# No two rules look alike in black and white.
DASHES: tuple[Dashes, ...] = (
    (),
    (4.0, 2.0),
    (1.0, 1.5),
    (6.0, 1.5, 1.0, 1.5),
    (8.0, 3.0),
    (2.0, 2.0),
    (3.0, 1.0, 1.0, 1.0, 1.0, 1.0),
)
FIRST = ("weighted", "it-signsgd", "majority", "robust")  # these rules use the first dashes, in this order
# Used if every curve has its own color: plain voting is dashed as in the paper, the references are dotted.
BY_CURVE: dict[str, Dashes] = {
    "majority": (4.0, 2.0),
    "oracle": (1.0, 1.5),
    "sgd": (1.0, 1.5),
}


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The color and the dashes of every curve of a comparison."""

    colors: dict[str, str]  # batches -> color; if panels separate the batches: name -> color
    dashes: dict[str, Dashes]  # name -> dashes
    by_curve: bool = False  # whether names are those of curves, not of rules
    recipes: bool = False  # whether names include the recipe

    def name(self, experiment: Experiment) -> str:
        """The entry in the legend of line styles."""
        if self.by_curve:
            return experiment.name(recipe=self.recipes)
        return experiment.rule

    def color(self, experiment: Experiment) -> str:
        """One color per batch mode; one per name if panels separate the modes or there is only one."""
        if experiment.batches in self.colors:
            return self.colors[experiment.batches]
        return self.colors[self.name(experiment)]

    def dash(self, experiment: Experiment) -> Dashes:
        """Dash and gap lengths of the line; empty if it is solid."""
        return self.dashes[self.name(experiment)]


def color_of(i: int) -> str:
    """The i-th color; after the last one they repeat."""
    return COLORS[i % len(COLORS)]


def marks_of(experiments: list[Experiment], *, by_curve: bool = False) -> Marks:
    """The marks of all experiments of a comparison; by curve if each panel has one batch mode."""
    if by_curve:
        return _by_curve(experiments)
    batches = batch_order(experiments)
    rules = unique(experiment.rule for experiment in experiments)
    colored = batches if len(batches) > 1 else rules
    return Marks(
        colors={name: color_of(i) for i, name in enumerate(colored)},
        dashes=_dashes_by_rule(rules),
    )


def _dashes_by_rule(rules: list[str]) -> dict[str, Dashes]:
    known = [rule for rule in FIRST if rule in rules]
    others = [rule for rule in rules if rule not in FIRST]
    dashes = {}
    for i, rule in enumerate(known + others):
        dashes[rule] = DASHES[i % len(DASHES)]
    return {rule: dashes[rule] for rule in rules}


def _by_curve(experiments: list[Experiment]) -> Marks:
    """Colors in turn. Curves of the same color get different dashes, as long as there are any."""
    all_recipes = {experiment.settings.get("recipe") for experiment in experiments}
    recipes = len(all_recipes) > 1
    rules = {experiment.name(recipe=recipes): experiment.rule for experiment in experiments}
    colors: dict[str, str] = {}
    dashes: dict[str, Dashes] = {}
    used: set[tuple[str, Dashes]] = set()
    for i, (name, rule) in enumerate(rules.items()):
        color = color_of(i)
        candidates = _candidates(rule)
        free = [style for style in candidates if (color, style) not in used]
        chosen = free[0] if free else candidates[0]
        used.add((color, chosen))
        colors[name] = color
        dashes[name] = chosen
    return Marks(
        colors=colors,
        dashes=dashes,
        by_curve=True,
        recipes=recipes,
    )


def _candidates(rule: str) -> list[Dashes]:
    """The dashes reserved for the rule, if any, then those that no rule reserves, then the rest."""
    reserved = list(BY_CURVE.values())
    usual = sorted(DASHES, key=lambda dashes: dashes in reserved)
    if rule in BY_CURVE:
        return [BY_CURVE[rule], *usual]
    return usual
