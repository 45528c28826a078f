"""M unequal workers on one machine: who they are, their gradients, attacks, the run loop."""

from signvote.recipes import RECIPES
from signvote.sim.config import YARDSTICKS, Config
from signvote.sim.loop import train
from signvote.sim.population import mode_batch_sizes
from signvote.sim.run import Run
from signvote.sim.trackers import MLflow, TensorBoard, WandB
from signvote.sim.tracking import Tracker
from signvote.sim.trained import Trained

__all__ = [
    "RECIPES",
    "YARDSTICKS",
    "Config",
    "MLflow",
    "Run",
    "TensorBoard",
    "Tracker",
    "Trained",
    "WandB",
    "mode_batch_sizes",
    "train",
]
