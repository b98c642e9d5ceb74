"""Hopper's kernels in the emulator, one plan at a time: for the tests of each."""

from __future__ import annotations

import dataclasses

import torch

from layer_cases import Case, reference, round_to_tf32
from tconv.emulator import tensor_map
from tconv.emulator.launch import EmulatedKernel
from tconv.jit.target import Target
from tconv.kernels.family import Operands, TensorView
from tconv.plan import Plan, candidates, make_plan
from tconv.problem import Axis, Problem

HOPPER = Target.named("sm_90a")


def problem_of(case: Case, **changes) -> Problem:
    names = ("size", "kernel", "stride", "padding", "output_padding", "dilation")
    height, width = (Axis(*axis) for axis in zip(*(getattr(case, n) for n in names), strict=True))
    problem = Problem(
        "forward",
        case.batch,
        case.in_channels * case.groups,
        case.out_channels * case.groups,
        case.groups,
        height,
        width,
        math="tf32",
        bias=case.bias,
    )
    aligned = case.size[1] % 4 == 0
    return dataclasses.replace(problem, **({"x_aligned": aligned} | changes))


def plans(problem: Problem, stem: str) -> list[Plan]:
    """The plans of every tile of the kernel that serves."""
    found = candidates(problem, HOPPER)
    return [make_plan(problem, HOPPER, c) for c in found if c.stem == stem and c.refusal is None]


def run(chosen: Plan, case: Case, t, schedule: str = "forward", sanitize: bool = False, out=None):
    """The output of packing and kernel, into `out` where it is given."""
    assert chosen.packing is not None
    packed = torch.full((chosen.packing.elements,), float("nan"))
    if out is None:
        out = torch.full(chosen.problem.y_shape, float("nan"))
    used = Operands(
        x=TensorView(t.x.data_ptr(), t.x.stride()),
        w=TensorView(t.w.data_ptr(), t.w.stride()),
        y=TensorView(out.data_ptr(), out.stride()),
        bias=0 if t.bias is None else t.bias.data_ptr(),
        packed=packed.data_ptr(),
        encode_tensor_map=tensor_map.encode,
    )
    tensors = [t.x, t.w, packed, out, *([] if t.bias is None else [t.bias])]
    storages = [tensor.untyped_storage() for tensor in tensors]
    memory = [(storage.data_ptr(), storage.nbytes()) for storage in storages]
    for source, grid, arguments in (
        (chosen.packing.source, chosen.packing.grid, chosen.packing_arguments(used)),
        (chosen.source, chosen.grid, chosen.arguments(used)),
    ):
        kernel = EmulatedKernel(source, schedule=schedule, sanitize=sanitize)
        kernel.launch(grid, arguments, allocations=memory)
    return out


def assert_right(out, case: Case, t) -> None:
    rounded = (round_to_tf32(t.x), round_to_tf32(t.w))
    want = reference(case, *rounded, t.bias, t.grad_output)[0]
    error = (out.double() - want).abs()
    assert torch.isfinite(out).all(), "not every element was written"
    assert error.norm() / want.norm() < 1e-6
    bias = None if t.bias is None else t.bias.abs()
    size = reference(case, *map(torch.abs, rounded), bias, t.grad_output)[0]
    terms = case.in_channels * case.kernel[0] * case.kernel[1]
    assert (error <= 4 * terms**0.5 * 2.0**-24 * size).all()
