"""`add_splits`: sums of partial results in both orders, of any channels and taps."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tconv.emulator import tensor_map
from tconv.emulator.launch import EmulatedKernel
from tconv.jit.compile import compile_cuda
from tconv.jit.target import Target
from tconv.kernels.adding import addition
from tconv.kernels.launch import Launch
from tconv.plan import plan
from tconv.problem import Axis, Problem

CASES = {
    "one split": (3, 5, 1, (2, 3), 1),
    "tails of channels": (2, 130, 1, (3, 3), 7),
    "tails of taps": (4, 6, 2, (7, 5), 6),
    "fewer splits than parts": (2, 64, 1, (4, 4), 3),
    "many splits": (1, 9, 1, (1, 33), 132),
}


def problem_of(channels: int, outs: int, groups: int, kernel: tuple[int, int]) -> Problem:
    height, width = (Axis(9, size) for size in kernel)
    return Problem(
        "weight_gradient", 1, channels, outs * groups, groups, height, width, dtype="bfloat16"
    )


def kernel_of(problem: Problem, splits: int, taps_first: bool) -> Launch:
    kernel = plan(problem, Target.named("sm_80")).kernel
    return dataclasses.replace(kernel, splits=splits, taps_first=taps_first)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("taps_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_sums_are_rounded_once(name, dtype, taps_first, channels_last):
    *sizes, splits = CASES[name]
    problem = dataclasses.replace(problem_of(*sizes), dtype=str(dtype).removeprefix("torch."))
    launch = addition(problem, kernel_of(problem, splits, taps_first))
    assert launch is not None
    torch.manual_seed(0)
    partial = torch.randn(splits, *problem.w_shape)
    of_memory = partial.permute(0, 3, 4, 1, 2) if taps_first else partial
    of_memory = of_memory.contiguous()
    form = torch.channels_last if channels_last else torch.contiguous_format
    gradient = torch.empty(problem.w_shape, dtype=dtype).contiguous(memory_format=form)
    gradient.fill_(float("nan"))
    strides = {"w": gradient.stride(), "x": (1, 1, 1, 1), "y": (1, 1, 1, 1)}
    addresses = (0, gradient.data_ptr(), 0, 0, 0, of_memory.data_ptr())
    arguments = launch.bind(strides).arguments(addresses, tensor_map.encode)
    memory = sorted((t.data_ptr(), t.untyped_storage().nbytes()) for t in (gradient, of_memory))
    EmulatedKernel(launch.source).launch(launch.grid, arguments, allocations=memory)
    wanted = partial.double().sum(0)
    # Of float32 sums in any order, before one rounding.
    bound = splits * 2.0**-24 * partial.double().abs().sum(0)
    step = 2.0 ** (-8 if dtype is torch.bfloat16 else -11)
    apart = (gradient.double() - wanted).abs()
    assert (apart <= bound + step * (wanted.abs() + bound) + 2.0**-24).all()


def test_of_the_general_kernels_float32_pytorch_adds():
    problem = dataclasses.replace(problem_of(2, 3, 1, (2, 2)), dtype="float32")
    assert addition(problem, kernel_of(problem, 2, False)) is None
    launch = addition(problem, kernel_of(problem, 2, True))
    assert launch is not None
    assert dict(launch.source.constants)["Element"] == "float"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nothing_spills(arch):
    problem = problem_of(64, 64, 1, (4, 4))
    launch = addition(problem, kernel_of(problem, 8, True))
    assert launch is not None
    resources = compile_cuda(launch.source, arch).resources
    assert not resources.spills and resources.stack_frame == 0 and not resources.warnings
