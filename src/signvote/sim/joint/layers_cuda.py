"""What `layers_plain` offers, in Triton, and faster ways where there are any."""

from signvote.sim.joint.convolutions_cuda import conv_weights_, is_narrow, narrow, narrow_backward
from signvote.sim.joint.norms_cuda import moments, normalize, normalize_backward_

__all__ = [
    "conv_weights_",
    "is_narrow",
    "moments",
    "narrow",
    "narrow_backward",
    "normalize",
    "normalize_backward_",
]
