"""M unequal workers on one machine: who they are, their gradients, attacks, the run loop."""

from signvote.settings import RECIPES
from signvote.sim.config import YARDSTICKS, Config
from signvote.sim.loop import train
from signvote.sim.population import mode_batch_sizes
from signvote.sim.run import Run
from signvote.sim.tracking import TensorBoard, Tracker
from signvote.sim.trained import Trained

__all__ = [
    "RECIPES",
    "YARDSTICKS",
    "Config",
    "Run",
    "TensorBoard",
    "Tracker",
    "Trained",
    "mode_batch_sizes",
    "train",
]
