"""Makes the parts of a run from its configuration: workers and server."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch

from signvote.core.encoding import Encoding
from signvote.core.layout import Layout
from signvote.core.rules import RULES, make_rule
from signvote.core.scaled import ScaledVotes
from signvote.core.server import Server
from signvote.errors import ConfigError
from signvote.sim.config import YARDSTICKS, Config
from signvote.sim.gradients import Gradients
from signvote.sim.hostility import parse_attack
from signvote.sim.joint.passes import JointPass, is_joint
from signvote.sim.joint.together import Together
from signvote.sim.local import Locally
from signvote.sim.machine import Machine
from signvote.sim.phases import Phases
from signvote.sim.population import FOREVER, Sampler, generator, parse_absences, split
from signvote.sim.workers import Assignment, OneByOne, Workers
from signvote.tasks import Task

log = logging.getLogger("signvote")

Workshop = dict[Any, JointPass]  # a cache of captured graphs, for consecutive runs


def make_assignment(config: Config, task: Task) -> Assignment:
    """The work of a run."""
    parts = split(task.train, config.workers, config.split, config.seed)
    hostility = parse_attack(config.attack, config.workers)
    relabels = hostility is not None and hostility.relabels(config.workers - 1, FOREVER)
    if relabels and task.train.classes is None:
        raise ConfigError(
            f"attack is {config.attack!r}; it needs class labels, integers of shape (n,),"
            f" and task {task.name!r} has none"
        )
    return Assignment(
        config=config,
        encoding=_encoding(config),
        sampler=Sampler(parts, config.batch_sizes, config.seed),
        absences=parse_absences(config.absent, config.workers),
        hostility=hostility,
    )


def _encoding(config: Config) -> Encoding:
    """How the workers of a run encode."""
    if config.local_steps is not None:
        return Encoding(scales=config.rule in RULES)
    names = [field.name for field in fields(Encoding) if field.name not in ("corrects", "scales")]
    corrects = config.rule in RULES and RULES[config.rule].corrects
    encoding = Encoding(**{name: getattr(config, name) for name in names}, corrects=corrects)
    if config.rule == "adamw":  # its server averages
        encoding = replace(encoding, momentum=0.0, interpolation=None, polar=False)
    return encoding


def make_server(work: Assignment, layout: Layout) -> Server | None:
    """The server of a run; None if the run has a yardstick instead of a rule."""
    config = work.config
    if config.rule in YARDSTICKS:
        return None
    rule = make_rule(config.rule, layout, **config.options)
    return Server(
        layout,
        ScaledVotes(rule) if work.encoding.scales else rule,
        run=config.seed,
        zeros=work.encoding.zeros,
        min_voters=config.min_voters,
    )


@lru_cache
def _log_fallback(why: str) -> None:
    """Log once per process."""
    log.warning(
        "signvote: workers compute one after another, because the joint pass cannot train this task: %s", why
    )


def make_workers(
    work: Assignment,
    task: Task,
    machine: Machine,
    workshop: Workshop,
    phases: Phases,
) -> Workers:
    """Workers with a new model: computed together where machine and model allow it, else one by one."""
    config = work.config
    device = machine.torch_device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(config.seed, 0).initial_seed())
        model = task.model().to(device)
    if config.local_steps is not None:
        return Locally(work, Gradients(task.to(device), model), phases)
    if not machine.is_together:
        return OneByOne(work, Gradients(task.to(device), model), phases)
    if not is_joint(task):
        _log_fallback("it needs a loss of outputs and labels, and data in memory")
        return OneByOne(work, Gradients(task.to(device), model), phases)
    key = id(task), config.batch_sizes, config.test_batch, machine
    if key not in workshop:
        workshop.clear()
        gradients = Gradients(task.to(device), model)
        joint = JointPass(gradients, config.batch_sizes, machine, config.test_batch)
        why = joint.trouble()
        if why:
            _log_fallback(why)
            return OneByOne(work, gradients, phases)
        workshop[key] = joint
    else:
        workshop[key].restart(model.state_dict())
    return Together(work, workshop[key], phases)
