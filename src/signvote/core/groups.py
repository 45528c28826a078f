"""How the parameters of a model differ in their step and their weight decay: the same in every engine.

    x <- (1 - step s decay d) x - step s decision        s and d: the factors of a parameter

`factors` computes them from names and shapes, once. An engine that holds parameters looks them up by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from signvote.core.layout import trainable
from signvote.errors import ConfigError
from signvote.names import check_name

DECAYS = ("matrices", "all")


class Factors(NamedTuple):
    """What the step and the weight decay of a parameter are multiplied by."""

    step: float = 1.0
    decay: float = 1.0


USUAL = Factors()


def factors(
    model: nn.Module | Mapping[str, Tensor],
    *,
    decays: str = "matrices",
    steps: Mapping[str, float] | None = None,
) -> dict[str, Factors]:
    """The factors of each trained parameter, by name.

    Args:
        model: a module, or named tensors, among which no embedding is known.
        decays: "matrices": parameters with fewer than two dimensions, such as biases and norms, and embeddings have no
            weight decay; a tensor that is also used as an embedding is one. "all": every parameter decays.
        steps: factors of the step, by patterns of names as in a shell; the last pattern that fits counts.

    >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    >>> list(factors(model, steps={"0.*": 0.3}).values())
    [Factors(step=0.3, decay=0.0), Factors(step=1.0, decay=1.0), Factors(step=1.0, decay=0.0)]

    """
    check_name("value of decays", decays, DECAYS)
    check_steps(steps or {})
    parameters = trainable(model)
    _check_patterns(steps or {}, parameters)
    embedded = _embedded(model)
    found = {}
    for name, parameter in parameters.items():
        is_matrix = parameter.ndim >= 2 and id(parameter) not in embedded
        step = _step_of(name, steps or {})
        found[name] = Factors(step, 1.0 if is_matrix or decays == "all" else 0.0)
    return found


def check_steps(steps: Mapping[str, Any]) -> None:
    """Raise unless every factor of a step is a number of 0 or more."""
    for pattern, factor in steps.items():
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not is_number or not 0 <= factor < math.inf:
            raise ConfigError(
                f"the factor of steps for {pattern!r} is {factor!r}; it must be a number, 0 or more"
            )


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    lr: float | None = None,
    decays: str = "matrices",
    steps: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Groups of a model's trained parameters for `Vote`, or for another optimizer, by the factors of each.

    The entry `places` of a group keeps the order of the model: votes are laid out as without groups.

    Args:
        model: the module.
        weight_decay: of a parameter whose factor is 1.
        lr: likewise; None: the optimizer's. `steps` need it.
        decays: which parameters decay; see `factors`.
        steps: factors of the step by patterns of names; see `factors`.

    >>> [group["weight_decay"] for group in parameter_groups(nn.Linear(2, 2), weight_decay=1.0)]
    [1.0, 0.0]

    """
    if steps and lr is None:
        raise ConfigError("steps are factors of lr: give parameter_groups the lr")
    parameters = trainable(model)
    groups: dict[Factors, dict[str, Any]] = {}
    for place, (name, its) in enumerate(factors(model, decays=decays, steps=steps).items()):
        group = groups.setdefault(
            its,
            {
                "params": [],
                "places": [],
                "weight_decay": weight_decay * its.decay,
            },
        )
        group["params"].append((name, parameters[name]))
        group["places"].append(place)
        if lr is not None:
            group["lr"] = lr * its.step
    return list(groups.values())


def checked(found: Mapping[str, Factors] | None, names: Iterable[str]) -> dict[str, Factors]:
    """The factors of these parameters, none if not given. Raise for those of another parameter."""
    known = list(names)
    for name in found or {}:
        check_name("parameter", name, known)
    return dict(found or {})


def _check_patterns(steps: Mapping[str, float], names: Mapping[str, Any]) -> None:
    """Raise for a pattern that fits no name."""
    for pattern in steps:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"steps has a factor for {pattern!r}, and no parameter is called so: {', '.join(names)}"
            )


def _step_of(name: str, steps: Mapping[str, float]) -> float:
    fitting = [factor for pattern, factor in steps.items() if fnmatchcase(name, pattern)]
    return float(fitting[-1]) if fitting else 1.0


def _embedded(model: nn.Module | Mapping[str, Tensor]) -> set[int]:
    """The ids of all tensors that are weights of an embedding."""
    if not isinstance(model, nn.Module):
        return set()
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    return {id(embedding.weight) for embedding in embeddings}
