"""What a task measures: the name of a metric, its unit and whether more is better.

Results carry these three, so that a report needs neither the task nor torch. The first metric of a run is the one that
figures, tables, leads and the terminal show.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from signvote.errors import ConfigError

SHARE = "%"  # the unit of a share, 0 to 1, which is shown in percent
LONGEST = 60  # characters of a name or a unit
MOST = 50  # metrics of a task
TAKEN = (
    "round",
    "status",
    "sign error",
    "sign_error",
    "voters",
    "bytes_up",
    "bytes_down",
    "seconds",
)  # names of other measurements


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric as results describe it.

    >>> Metric(name="round")
    Traceback (most recent call last):
        ...
    signvote.errors.ConfigError: a metric is called 'round'; this name is taken, give it another one
    """

    name: str
    unit: str = (
        ""  # "%": a share, 0 to 1, which is shown in percent; otherwise a text such as "m" or "nats/byte"
    )
    more_is_better: bool = False

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("unit", self.unit)):
            if len(text) > LONGEST or not text.isprintable() or text != text.strip():
                raise ConfigError(
                    f"a metric has the {what} {text!r:.80}; it must be printable, without spaces around it,"
                    f" and have at most {LONGEST} characters"
                )
        if not self.name:
            raise ConfigError("a metric has no name; give it one, such as 'error'")
        if self.name in TAKEN:
            raise ConfigError(f"a metric is called {self.name!r}; this name is taken, give it another one")

    @property
    def is_share(self) -> bool:
        """Whether values are shares, shown in percent."""
        return self.unit == SHARE

    @property
    def direction(self) -> str:
        """Which values are better, in words."""
        return "more is better" if self.more_is_better else "less is better"

    @property
    def title(self) -> str:
        """The name and the unit.

        >>> Metric(name="loss", unit="nats/byte").title, Metric(name="loss").title
        ('loss (nats/byte)', 'loss')
        """
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def rank(self, value: float) -> float:
        """A number by which values are sorted, the best first. What is not a number comes last."""
        if value != value:
            return float("inf")
        return -value if self.more_is_better else value

    def text(self, value: float) -> str:
        """A value in a few characters, for a progress bar.

        >>> ACCURACY.text(0.981), Metric(name="loss", unit="nats/byte").text(1.0214)
        ('98.1 %', '1.021 nats/byte')
        """
        if self.is_share:
            return percent(value)
        return f"{value:.4g} {self.unit}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """The entry in results."""
        return {name: asdict(self)[name] for name in ("name", "unit", "more_is_better")}


ACCURACY = Metric(name="accuracy", unit=SHARE, more_is_better=True)
LOSS = Metric(name="loss")
USUAL = (ACCURACY, LOSS)  # of a classifier, and of all results that do not list their metrics


def metrics_of(result: dict[str, Any]) -> tuple[Metric, ...]:
    """The metrics of a run's result, the most important first."""
    if "metrics" not in result:
        return USUAL
    return tuple(Metric(**described) for described in result["metrics"])


def check_metrics(metrics: Iterable[Metric]) -> None:
    """Raise unless there is a metric, not too many, and each has a name of its own."""
    names = [metric.name for metric in metrics]
    if not 1 <= len(names) <= MOST:
        raise ConfigError(f"there are {len(names)} metrics; a task needs 1 to {MOST}")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"two metrics are called {twice[0]!r}; each needs a name of its own")


def percent(share: float, digits: int = 1) -> str:
    """A share in percent, as signvote writes it everywhere.

    >>> percent(0.9462), percent(0.613, 0)
    ('94.6 %', '61 %')
    """
    return f"{100 * share:.{digits}f} %"
