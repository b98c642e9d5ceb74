"""Every tile of kernel families on the device, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

import tconv
from tconv import run
from tconv.jit.compile import compile_cuda
from tconv.jit.target import Target
from tconv.kernels.family import Family
from tconv.layers import Layer
from tconv.plan import Candidate, candidates, make_plan
from tconv.problem import Direction, Problem
from tconv.tuning import using

Formats = tuple[torch.memory_format, torch.memory_format]
"""Of the images, and of the weight."""

SAME_FORMATS: tuple[Formats, ...] = (
    (torch.channels_last, torch.channels_last),
    (torch.contiguous_format, torch.contiguous_format),
)
FORMATS: tuple[Formats, ...] = (
    *SAME_FORMATS,
    (torch.channels_last, torch.contiguous_format),
)

BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
"""Of the relative error: float32 sums, and one rounding."""

TF32_BOUND = 3.5e-4
"""Two operands rounded to nearest give 2.9e-4; one cut instead, or rounded twice, gives more."""

Case = tuple[str, str]
Served = dict[tuple[Case, str, torch.dtype, Formats], list[Candidate]]


def problem_of(layer: Layer, direction: Direction, dtype: torch.dtype, made: Formats) -> Problem:
    x, y = (torch.empty(s).to(memory_format=made[0]) for s in (layer.x_shape, layer.y_shape))
    w = torch.empty(layer.w_shape).to(memory_format=made[1])
    return Problem.of(
        direction,
        layer.x_shape,
        layer.w_shape,
        layer.geometry,
        dtype=str(dtype).removeprefix("torch."),
        tf32=torch.backends.cudnn.allow_tf32,
        bias=True,
        strides=tuple(tuple(t.stride()) for t in (x, w, y)),
    )


def candidates_of(
    cases: Sequence[Case],
    families: Sequence[Family],
    dtypes: Sequence[torch.dtype],
    formats: Sequence[Formats],
    every: Callable[[torch.dtype, Formats], bool],
) -> Served:
    """The candidates of each case, their kernels compiled side by side.

    Where not `every`, two and those that turn what they read.
    """
    target, found, wanted = Target.for_device(0), {}, {}
    for case in cases:
        layer = Layer.parse(*case)
        for family in families:
            for dtype in dtypes:
                for made in formats:
                    problem = problem_of(layer, family.DIRECTION, dtype, made)
                    able = [c for c in candidates(problem, target, (family,)) if not c.refusal]
                    if not every(dtype, made):
                        able = able[:2] + [c for c in able[2:] if getattr(c.tile, "turned", False)]
                    found[case, family.STEM, dtype, made] = able
                    for candidate in able:
                        for source in make_plan(problem, target, candidate).sources:
                            wanted[source] = None
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda source: compile_cuda(source, target.arch), wanted))
    return found


def check_candidates(
    case: Case,
    family: Family,
    dtype: torch.dtype,
    made: Formats,
    able: Sequence[Candidate],
) -> None:
    """Each candidate is near float64, and a second call gives the same."""
    layer = Layer.parse(*case)
    stride, padding, output_padding, dilation, groups = layer.geometry
    rest = (stride, padding, output_padding, groups, dilation)
    torch.manual_seed(0)
    x, y = (
        torch.randn(shape, device="cuda").to(dtype).to(memory_format=made[0])
        for shape in (layer.x_shape, layer.y_shape)
    )
    w = torch.randn(layer.w_shape, device="cuda").to(dtype).to(memory_format=made[1])
    b = torch.randn(layer.out_channels, device="cuda").to(dtype)
    xd, wd = (t.double().requires_grad_() for t in (x, w))
    out = torch.nn.functional.conv_transpose2d(xd, wd, b.double(), *rest)
    leaf = {"input_gradient": xd, "weight_gradient": wd}.get(family.DIRECTION)
    want = out.detach() if leaf is None else torch.autograd.grad(out, leaf, y.double())[0]

    def result() -> torch.Tensor:
        # Not through autograd, whose thread does not know of `using`.
        if family.DIRECTION == "forward":
            return run.forward(x, w, b, layer.geometry)
        if family.DIRECTION == "input_gradient":
            return run.input_gradient(y, w, tuple(x.shape[2:]), layer.geometry)
        last = made[1] is torch.channels_last
        return run.weight_gradient(x, y, tuple(w.shape[2:]), layer.geometry, last)

    tf32 = problem_of(layer, family.DIRECTION, dtype, made).math == "tf32"
    bound = TF32_BOUND if tf32 else BOUNDS[dtype]
    for candidate in able:
        with using(candidate), torch.no_grad():
            tconv.statistics(reset=True)
            out, again = result(), result()
            torch.cuda.synchronize()
        assert family.STEM in {row.kernel for row in tconv.statistics()}, candidate
        error = float((out.double() - want).norm() / want.norm())
        assert error < bound, (str(candidate.tile), error)
        assert torch.equal(out, again), candidate
