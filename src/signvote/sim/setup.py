"""Makes the parts of a run from its configuration: workers and server."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from signvote.core.encoder import Encoding
from signvote.core.layout import Layout
from signvote.core.rules import RULES
from signvote.core.server import Server
from signvote.sim.attacks import parse_attack
from signvote.sim.config import YARDSTICKS, Config
from signvote.sim.gradients import Gradients
from signvote.sim.joint.passes import JointPass
from signvote.sim.joint.together import Together
from signvote.sim.machine import Machine
from signvote.sim.phases import Phases
from signvote.sim.population import Sampler, generator, parse_absences, split
from signvote.sim.workers import Assignment, OneByOne, Workers
from signvote.tasks import Task

Workshop = dict[Any, JointPass]  # a cache of captured graphs, for consecutive runs


def make_assignment(config: Config, task: Task) -> Assignment:
    """The work of a run."""
    parts = split(task.train.labels, config.workers, config.split, config.seed)
    names = [field.name for field in fields(Encoding) if field.name != "corrects"]
    corrects = config.rule in RULES and RULES[config.rule].corrects
    encoding = Encoding(**{name: getattr(config, name) for name in names}, corrects=corrects)
    if config.rule == "adamw":  # its server averages
        encoding = replace(encoding, momentum=0.0)
    return Assignment(
        config=config,
        encoding=encoding,
        sampler=Sampler(parts, config.batch_sizes, config.seed),
        absences=parse_absences(config.absent, config.workers),
        hostility=parse_attack(config.attack, config.workers),
    )


def make_server(work: Assignment, layout: Layout) -> Server | None:
    """The server of a run; None if the run has a yardstick instead of a rule."""
    config = work.config
    if config.rule in YARDSTICKS:
        return None
    return Server(
        layout,
        config.rule,
        run=config.seed,
        zeros=work.encoding.zeros,
        min_voters=config.min_voters,
        **config.options,
    )


def make_workers(
    work: Assignment, task: Task, machine: Machine, workshop: Workshop, phases: Phases
) -> Workers:
    """Workers with a new model: computed together where machine and model allow it, else one by one."""
    config = work.config
    device = machine.torch_device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(config.seed, 0).initial_seed())
        model = task.model().to(device)
    if not machine.is_together:
        return OneByOne(work, Gradients(task.to(device), model), phases)
    key = id(task), config.batch_sizes, config.test_batch, machine
    if key not in workshop:
        workshop.clear()
        gradients = Gradients(task.to(device), model)
        joint = JointPass(gradients, config.batch_sizes, machine, config.test_batch)
        if joint.model is None:
            return OneByOne(work, gradients, phases)
        workshop[key] = joint
    workshop[key].restart(model)
    return Together(work, workshop[key], phases)
