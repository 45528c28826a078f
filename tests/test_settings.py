"""Settings are declared once: flags, folder names, columns and conditions follow from the declaration."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from signvote.cli.commands import parse
from signvote.cli.flags import settings_of
from signvote.recipes import FLOATS, OF_TASKS, RECIPES, recipe_of
from signvote.report.labels import train_command
from signvote.results import COLUMNS
from signvote.settings import (
    FROM_RECIPE,
    SETTINGS,
    completed,
    conditions,
    default_of,
    unusual,
)
from signvote.sim import Config
from signvote.sim.compare import name_of
from signvote.sim.study import KNOWN, LISTS

OTHER: dict[str, Any] = {
    "task": "mnist", "rule": "majority", "recipe": "paper", "model": "mlp",
    "task_options": {"width": 8}, "mode": 4, "workers": 12, "total": 240,
    "batch_sizes": (4, 4), "rounds": 5, "seed": 3, "step": 0.5, "momentum": 0.5, "interpolation": 0.5, "clip": 0.5,
    "polar": True,
    "schedule": "constant", "ramp": 0.5, "zeros": "abstain", "decay": 0.1, "decays": "all",
    "steps": {"*bias": 0.5}, "feedback": True, "top": 0.1, "top_end": 0.01,
    "local_steps": 30, "inner": "sgd", "beta2": 0.5, "outer_step": 0.5, "outer_momentum": 0.5,
    "split": "iid", "attack": "invert:1", "miss": 0.1, "absent": ("0:1",), "min_voters": 2, "evaluate_every": 7,
    "test_batch": 8, "sign_error": True, "options": {"cap": 2.0},
}  # fmt: skip
IN_PLACE = ("task", "rule", "recipe", "mode", "batch_sizes", "seed")  # parts of every folder's name
NO_CONDITION = ("rule", "options", "seed", "mode", "workers", "total", "evaluate_every", "sign_error")
each_setting = pytest.mark.parametrize("name", SETTINGS)


def made(**changes: Any) -> Config:
    return Config(**{"task": "mnist-10k", "rule": "weighted"} | changes)


def test_a_config_has_the_settings_and_no_other_field() -> None:
    assert [field.name for field in fields(Config)] == list(SETTINGS) == list(OTHER)
    assert list(made().as_dict()) == list(SETTINGS)


@each_setting
def test_every_setting_has_a_flag_a_text_and_a_place_in_studies(name: str) -> None:
    assert SETTINGS[name].metadata["text"].endswith(".")
    assert name in settings_of(parse(["train"]))
    many = {one: many for many, one in LISTS.items()}
    assert many.get(name, name) in KNOWN


def test_the_flags_give_the_defaults_of_a_config() -> None:
    given = settings_of(parse(["train"]))
    assert list(given) == list(SETTINGS)
    assert Config(**given) == made()


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        (["--step", "0.5", "--zeros", "abstain"], {"step": 0.5, "zeros": "abstain"}),
        (["--batch-sizes", "4", "8", "--feedback"], {"batch_sizes": (4, 8), "feedback": True}),
        (["--steps", "*bias=0.5", "0.*=0"], {"steps": {"*bias": 0.5, "0.*": 0}}),
        (["--options", "cap=2.0", "per=tensor"], {"options": {"cap": 2.0, "per": "tensor"}}),
        (["--task", "mnist", "--rule", "sgd", "--mode", "4"], {"task": "mnist", "rule": "sgd", "mode": 4}),
    ],
)
def test_flags_become_settings(flags: list[str], changes: dict[str, Any]) -> None:
    assert Config(**settings_of(parse(["train", *flags]))) == made(**changes)


@each_setting
def test_a_folders_name_shows_what_is_not_as_usual(name: str) -> None:
    changed = name_of(made(**{name: OTHER[name]})) != name_of(made())
    assert changed == (SETTINGS[name].metadata["in_name"] or name in IN_PLACE)


@each_setting
def test_every_setting_has_a_column(name: str) -> None:
    assert COLUMNS.count(name) == 1


@each_setting
def test_conditions_are_all_settings_but_a_few(name: str) -> None:
    usual = made().as_dict()
    changed = usual | {name: OTHER[name]}
    assert (conditions(changed) == conditions(usual)) == (name in NO_CONDITION)


def test_a_recipe_decides_what_has_no_default() -> None:
    left_open = [name for name, setting in SETTINGS.items() if default_of(setting) is FROM_RECIPE]
    for values in RECIPES.values():
        assert set(values) < set(left_open)
    optional = set(left_open) - set(RECIPES["paper"]) - {"recipe", "evaluate_every"}
    assert optional == {
        "model",
        "mode",
        "interpolation",
        "clip",
        "top",
        "top_end",
        "attack",
        "local_steps",
    }, "of these None is a value"
    for recipe in RECIPES:
        for rule in ("weighted", *FLOATS[recipe]):
            config = made(recipe=recipe, rule=rule)
            assert all(getattr(config, name) is not None for name in RECIPES[recipe])
            assert unusual(config.as_dict()).keys() <= {"task", "rule", "recipe", "mode", "batch_sizes"}


def test_what_was_not_given_is_completed() -> None:
    config = made(rule="sgd", recipe="paper").as_dict()
    given = {name: config[name] for name in ("task", "rule", "recipe", "mode", "batch_sizes")}
    assert completed(given) == config


def test_a_run_of_before_the_ramp_had_none() -> None:
    """Whatever the recipe of today says."""
    old = made(recipe="tuned", step=1e-3, decay=0.0, ramp=0.0).as_dict()
    del old["ramp"]
    assert completed(old)["ramp"] == 0.0
    assert unusual(completed(old)).keys() >= {"step", "decay", "ramp"}
    assert made(recipe="tuned").ramp > 0
    del old["decays"]
    assert completed(old)["decays"] == "all"


def test_a_recipe_of_a_later_signvote_decides_nothing() -> None:
    assert recipe_of({"recipe": "of a later signvote"}) == {}


@each_setting
def test_the_page_has_the_command_that_repeats_a_run(name: str) -> None:
    """Its flags give the settings of the run again, each of them."""
    needed: dict[str, dict[str, Any]] = {
        "top_end": {"top": 0.1},
        "mode": {},
        "workers": {"mode": 2},
        "total": {"mode": 2},
    }
    config = made(**needed.get(name, {}), **{name: OTHER[name]})
    line = train_command(config.as_dict())
    assert line[:2] == ["signvote", "train"]
    assert made(**settings_of(parse(line[1:]))) == config


def test_the_command_names_the_recipe_of_a_task_of_ones_own() -> None:
    """By itself, the task may have another one."""
    own = made(task="my.tasks:make", recipe="tuned").as_dict()
    assert train_command(own)[2:6] == ["--task", "my.tasks:make", "--recipe", "tuned"]


def test_a_run_that_names_no_recipe_gets_the_one_of_its_task() -> None:
    assert made().recipe == "tuned"
    for task, recipe in OF_TASKS.items():
        config = made(task=task)
        assert config.recipe == recipe
        assert config.ramp == RECIPES[recipe]["ramp"] != made().ramp
        assert "recipe" not in unusual(config.as_dict())
        assert made(task=task, recipe="tuned").recipe == "tuned"
        assert conditions(made(task=task, recipe="tuned").as_dict())["recipe"] == "tuned"
