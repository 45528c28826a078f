"""All scenarios, in the order in which they are played. Those that take long whatever happens come first."""

from __future__ import annotations

from soak import core, ddp, flower, hostile, properties, results, simulator, survive
from soak.driver import Scenario

CORE = "Server and Worker"
SIM = "simulator"
DDP = "torch.distributed"
FLOWER = "Flower"

ALL = [
    Scenario("flower-deployment", FLOWER, "kills, bad ballots", 6, flower.deployment),
    Scenario("flower-links", FLOWER, "slow and cut links, stops", 5, flower.deployed_links),
    Scenario("flower-simulation", FLOWER, "stops, simulation", 3, flower.simulation_stops),
    Scenario("properties", CORE, "random inputs", 4, properties.random_inputs),
    Scenario("core-kills", CORE, "kills", 2, core.kills),
    Scenario("core-stops", CORE, "stops", 2, core.stops),
    Scenario("core-links", CORE, "slow and cut links", 2, core.links),
    Scenario("core-disks", CORE, "full disks", 1, core.full_disks),
    Scenario("core-damage", CORE, "damaged checkpoints", 1, core.damaged_checkpoints),
    Scenario("core-hostile", CORE, "hostile ballots", 2, hostile.hostile_ballots),
    Scenario("core-mutants", CORE, "mutated ballots", 3, core.mutated_ballots),
    Scenario("sim-kills", SIM, "kills", 3, simulator.kills),
    Scenario("sim-compare", SIM, "`compare` killed", 2, simulator.compare_kills),
    Scenario("sim-stops", SIM, "stops", 2, simulator.stops),
    Scenario("sim-disks", SIM, "full disks", 2, simulator.full_disks),
    Scenario("sim-damage", SIM, "damaged checkpoints", 2, simulator.damaged_checkpoints),
    Scenario("sim-results", SIM, "damaged results", 1, results.damaged_results),
    Scenario("ddp-kills", DDP, "kills", 4, ddp.kills),
    Scenario("ddp-stops", DDP, "stops", 2, ddp.stops),
    Scenario("ddp-hangs", DDP, "hangs", 2, ddp.hangs),
    Scenario("ddp-links", DDP, "slow and cut links", 2, ddp.links),
    Scenario("ddp-survivors", DDP, "kills, stops, cut links", 3, survive.survivors),
    Scenario("ddp-disks", DDP, "full disks", 1, ddp.full_disks),
    Scenario("ddp-damage", DDP, "damaged checkpoints", 1, ddp.damaged_checkpoints),
    Scenario("ddp-gradients", DDP, "gradients not finite", 1, ddp.non_finite),
    Scenario("flower-kills", FLOWER, "kills, one process", 2, flower.kills),
    Scenario("flower-replies", FLOWER, "bad replies", 1, flower.bad_replies),
    Scenario("flower-damage", FLOWER, "damaged checkpoints", 1, flower.damaged_checkpoints),
    Scenario("core-long", CORE, "long run", 2, core.long_run),
    Scenario("sim-long", SIM, "long run", 3, simulator.long_run),
    Scenario("ddp-long", DDP, "long run", 3, ddp.long_run),
    Scenario("flower-long", FLOWER, "long run", 3, flower.long_run),
]
SCENARIOS = {scenario.name: scenario for scenario in ALL}
