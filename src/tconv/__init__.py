"""tconv: a drop-in, faster torch.nn.ConvTranspose2d.

    model = MyNetwork().cuda()
    tconv.convert(model)  # every torch.nn.ConvTranspose2d now runs our kernels

or, layer by layer, `tconv.ConvTranspose2d` and `tconv.conv_transpose2d`, which take what PyTorch's
take; or `tconv.enable()` for code that calls PyTorch's function by name. Within
`with tconv.autotune():` kernels are chosen by timing.
"""

import torch

from .errors import (
    CompileError,
    EmulatorError,
    LaunchError,
    MissingDependencyError,
    NoKernelError,
    TconvError,
)
from .filling import precompile
from .functional import conv_transpose2d, disable, enable
from .jit import libraries
from .nn import ConvTranspose2d, convert, revert
from .tuning import autotune

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "ConvTranspose2d",
    "EmulatorError",
    "LaunchError",
    "MissingDependencyError",
    "NoKernelError",
    "TconvError",
    "__version__",
    "autotune",
    "conv_transpose2d",
    "convert",
    "disable",
    "enable",
    "precompile",
    "revert",
]

# PyTorch's CUDA builds come with NVRTC; others call no GPU.
if torch.version.cuda is not None:
    libraries.preload()
del libraries, torch
