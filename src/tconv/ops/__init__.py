"""The three torch.library operators, closed under differentiation.

    tconv::forward(x, w, b)      x [N, Cin, H, W], w [Cin, Cout/groups, kH, kW] -> [N, Cout, OH, OW]
    tconv::input_gradient(y, w)  y like forward's output                        -> like x
    tconv::weight_gradient(x, y)                                                -> like w

Each is bilinear, and each one's derivatives are the other two, so that three operators (and three
kernels below them) give derivatives of every order, forward or reverse. Every operator has a fake
implementation (torch.compile, torch.export, meta tensors), autograd, a forward-mode rule, a vmap
rule and, for `forward`, autocast.

A CUDA tensor runs our kernels, through `tconv.run`; a CPU tensor runs PyTorch's own operators, or
our kernels in the emulator under TCONV_EMULATE=1.

`forward`, `input_gradient` and `weight_gradient` are the ways in for the rest of the package. They
call the operator or, where the result is the same, a shorter path past the dispatcher that saves
most of the host's time. They take a `Geometry` whole; the operators, whose schemas are
flat, pack it once.

    schema.py        the operators' schemas, flat arguments <-> a `Geometry`
    autograd.py      nodes, and the ways in
    compute.py       below autograd: our kernels, or aten.py
    fake.py, vmap.py, autocast.py    the dispatcher's other rules
    decomposition.py by PyTorch's operators, for what knows these alone
    registration.py  tells the dispatcher of all of these
"""

from tconv.ops.autocast import dtype_for as autocast_dtype
from tconv.ops.autograd import (
    EVERY,
    cached_forward,
    forward,
    forward_unobserved,
    input_gradient,
    remember,
    unobserved,
    weight_gradient,
)
from tconv.ops.compute import DTYPES
from tconv.ops.decomposition import decompositions
from tconv.ops.fake import output_size
from tconv.ops.registration import register

__all__ = [
    "DTYPES",
    "EVERY",
    "autocast_dtype",
    "cached_forward",
    "decompositions",
    "forward",
    "forward_unobserved",
    "input_gradient",
    "output_size",
    "remember",
    "unobserved",
    "weight_gradient",
]

register()
