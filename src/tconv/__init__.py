"""tconv: a drop-in, faster torch.nn.ConvTranspose2d.

    model = MyNetwork().cuda()
    tconv.convert(model)  # every torch.nn.ConvTranspose2d and 1d is now ours

or, layer by layer, `tconv.ConvTranspose2d` and `tconv.conv_transpose2d`, which take what PyTorch's
take, and the same in one dimension; or `tconv.enable()` for code that calls PyTorch's functions by
name. A CUDA call runs on our kernel or on PyTorch's operator, whichever is faster;
`tconv.statistics()` says what ran.
"""

import torch

from . import requirements  # first: it checks torch's version
from .choice import own_kernels
from .counts import statistics
from .errors import (
    CompileError,
    EmulatorError,
    LaunchError,
    MissingDependencyError,
    NoKernelError,
    TconvError,
)
from .filling import precompile
from .functional import conv_transpose1d, conv_transpose2d, disable, enable
from .jit import libraries
from .nn import ConvTranspose1d, ConvTranspose2d, convert, revert
from .ops import decompositions
from .tuning import autotune

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "EmulatorError",
    "LaunchError",
    "MissingDependencyError",
    "NoKernelError",
    "TconvError",
    "__version__",
    "autotune",
    "conv_transpose1d",
    "conv_transpose2d",
    "convert",
    "decompositions",
    "disable",
    "enable",
    "own_kernels",
    "precompile",
    "revert",
    "statistics",
]

# PyTorch's CUDA builds come with NVRTC; others call no GPU.
if torch.version.cuda is not None:
    libraries.preload()
del libraries, requirements, torch
