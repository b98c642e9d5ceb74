"""Kernels of 16-bit tensors on the device: every tile, against float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tconv
from tconv import run
from tconv.jit.compile import compile_cuda
from tconv.jit.target import Target
from tconv.kernels import sm90_forward, sm90_input_gradient, sm90_weight_gradient
from tconv.layers import Layer
from tconv.plan import candidates, make_plan
from tconv.problem import Problem
from tconv.tuning import using

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a device of capability 9.0",
)

FAMILIES = (sm90_forward, sm90_input_gradient, sm90_weight_gradient)
BOUNDS = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Of the relative error: float32 sums, and one rounding."""

CASES = (
    ("72,40,4,2,1", "2x6x7"),
    ("32,48,3x2,stride=2x3,padding=1x0,groups=2", "3x5x6"),
    ("64,64,3,1,1", "40x31x33"),
    ("64,64,3,1,1", "8x64x200"),
    ("64,64,4,2,1", "4x60x104"),
    ("136,64,3,2,1,1", "9x14x14"),
    ("16,3,4,2,1", "5x20x21"),
    ("256,128,2,2", "30x28x28"),
)


FORMATS = (torch.channels_last, torch.contiguous_format)


def problem_of(layer: Layer, direction, dtype, made) -> Problem:
    x, y = (torch.empty(s).to(memory_format=made) for s in (layer.x_shape, layer.y_shape))
    w = torch.empty(layer.w_shape)
    return Problem.of(
        direction,
        layer.x_shape,
        layer.w_shape,
        layer.geometry,
        dtype=str(dtype).removeprefix("torch."),
        bias=True,
        strides=tuple(tuple(t.stride()) for t in (x, w, y)),
    )


@pytest.fixture(scope="module")
def served():
    """The candidates of each case, their kernels compiled side by side."""
    target, found, wanted = Target.for_device(0), {}, {}
    for case in CASES:
        layer = Layer.parse(*case)
        for family in FAMILIES:
            for dtype in BOUNDS:
                for made in FORMATS:
                    problem = problem_of(layer, family.DIRECTION, dtype, made)
                    able = [c for c in candidates(problem, target, (family,)) if not c.refusal]
                    every = dtype is torch.bfloat16 and made is torch.channels_last
                    turned = [c for c in able[2:] if c.tile.turned]
                    few = able[:2] + (turned if dtype is torch.bfloat16 else turned[:1])
                    able = able if every else few
                    found[case, family.STEM, dtype, made] = able
                    for candidate in able:
                        for launch in make_plan(problem, target, candidate).launches:
                            wanted[launch.source] = None
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda source: compile_cuda(source, target.arch), wanted))
    return found


@pytest.mark.parametrize("made", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.STEM)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_tile(case, family, dtype, made, served):
    layer = Layer.parse(*case)
    stride, padding, output_padding, dilation, groups = layer.geometry
    rest = (stride, padding, output_padding, groups, dilation)
    torch.manual_seed(0)
    x, y = (
        torch.randn(shape, device="cuda").to(dtype).to(memory_format=made)
        for shape in (layer.x_shape, layer.y_shape)
    )
    w = torch.randn(layer.w_shape, device="cuda").to(dtype)
    b = torch.randn(layer.out_channels, device="cuda").to(dtype)
    able = served[case, family.STEM, dtype, made]
    if not able:
        pytest.skip("no tile serves")
    xd, wd = (t.double().requires_grad_() for t in (x, w))
    out = torch.nn.functional.conv_transpose2d(xd, wd, b.double(), *rest)
    leaf = {"input_gradient": xd, "weight_gradient": wd}.get(family.DIRECTION)
    want = out.detach() if leaf is None else torch.autograd.grad(out, leaf, y.double())[0]

    def result():
        # Not through autograd, whose thread does not know of `using`.
        if family.DIRECTION == "forward":
            return run.forward(x, w, b, layer.geometry)
        if family.DIRECTION == "input_gradient":
            return run.input_gradient(y, w, tuple(x.shape[2:]), layer.geometry)
        return run.weight_gradient(x, y, tuple(w.shape[2:]), layer.geometry, False)

    for candidate in able:
        with using(candidate), torch.no_grad():
            tconv.statistics(reset=True)
            out = result()
            torch.cuda.synchronize()
        assert family.STEM in {row.kernel for row in tconv.statistics()}, candidate
        error = float((out.double() - want).norm() / want.norm())
        assert error < BOUNDS[dtype], (str(candidate.tile), error)
