"""Forward kernels in the emulator, one plan at a time: for the tests of each."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from layer_cases import Case, reference, round_to_tf32
from tconv.emulator import tensor_map
from tconv.emulator.launch import EmulatedKernel
from tconv.jit.compile import compile_cuda, nvrtc_version
from tconv.jit.target import Target
from tconv.kernels.launch import OPERANDS, Launch
from tconv.kernels.source import KernelSource
from tconv.plan import Plan, candidates, family, make_plan
from tconv.problem import Axis, Problem

HOPPER = Target.named("sm_90a")

OF_16_BITS = tuple(
    f"{prefix}_{direction}"
    for prefix in ("sm90", "sm80")
    for direction in ("forward", "input_gradient", "weight_gradient")
)
"""Kernels that no float32 call runs."""

# For the kernels on staged patches: together they serve every tile.
PATCH_CASES = (
    Case(1, 16, 64, 1, (9, 70), (3, 3)),
    Case(2, 16, 64, 1, (5, 72), (3, 3), (1, 1), (1, 2)),
    Case(2, 17, 33, 2, (6, 12), (4, 4), (2, 2), (1, 1)),
    Case(2, 17, 40, 1, (5, 9), (3, 5), (2, 3), (1, 1)),
    Case(1, 20, 70, 2, (7, 9), (4, 4), (2, 2), (1, 1)),
    Case(2, 16, 3, 1, (7, 9), (4, 4), (2, 2), (1, 1), bias=False),
    Case(1, 16, 32, 1, (11, 40), (3, 7), (1, 1), (1, 3)),
    Case(1, 40, 64, 1, (5, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    Case(1, 16, 130, 1, (1, 1), (2, 2), (2, 2)),
    Case(1, 24, 5, 1, (4, 6), (16, 16), (8, 8), (4, 4)),
    Case(3, 9, 20, 1, (3, 101), (1, 4), (1, 2), (0, 1)),
    Case(1, 16, 24, 1, (6, 7), (3, 3), (1, 1), (2, 1), (0, 0), (2, 3)),
    # Two groups of weights, and row groups of both phases in y, with and without a tap.
    Case(1, 16, 48, 2, (6, 44), (3, 3), (1, 1), (1, 1)),
    Case(1, 16, 72, 1, (6, 20), (3, 4), (2, 2), (1, 1), (1, 0)),
    Case(1, 16, 128, 1, (5, 24), (3, 3), (1, 1), (1, 1)),
    # Several tiles along x, whose rows begin anywhere between two sectors.
    Case(1, 16, 32, 1, (5, 212), (3, 3)),
    Case(2, 16, 24, 1, (3, 133), (3, 3)),
    Case(1, 16, 64, 1, (3, 132), (4, 4), (2, 2), (1, 1)),
    Case(1, 16, 20, 2, (2, 131), (2, 3), (2, 3), (0, 2)),
)

# Fewer channels than one product has: one octet of a pixel, two, or less than one.
FEW_CHANNELS = (
    Case(2, 8, 40, 1, (6, 44), (5, 5), bias=False),
    Case(2, 5, 33, 2, (6, 12), (4, 4), (2, 2), (1, 1)),
    Case(1, 12, 24, 2, (5, 35), (6, 5), (1, 1), (2, 2)),
    Case(1, 4, 70, 1, (5, 9), (3, 5), (2, 3), (1, 1), (0, 0), (1, 2)),
)

# The shapes that those kernels are for; sizes do not change the code.
PATCH_LAYERS = {
    "64 to 64, 3x3": Case(8, 64, 64, 1, (200, 200), (3, 3)),
    "16 to 64, 3x3": Case(8, 16, 64, 1, (200, 200), (3, 3)),
    "64 to 64, 3x7": Case(8, 64, 64, 1, (200, 200), (3, 7)),
    "64 to 128, 3x5": Case(8, 64, 128, 1, (200, 200), (3, 5)),
    "32 to 32, 3x7": Case(8, 32, 32, 1, (200, 200), (3, 7), (1, 1), (1, 3)),
    "64 to 64, 4x4 s2": Case(8, 64, 64, 1, (200, 200), (4, 4), (2, 2), (1, 1)),
    "64 to 3, 4x4 s2": Case(8, 64, 3, 1, (32, 32), (4, 4), (2, 2), (1, 1)),
    "32 to 32, 3x3": Case(8, 32, 32, 1, (200, 200), (3, 3)),
    "256 to 128, 3x3 s2": Case(8, 256, 128, 1, (64, 64), (3, 3), (2, 2), (1, 1), (1, 1)),
    "64 to 32, 2x2 s2": Case(8, 64, 32, 1, (128, 128), (2, 2), (2, 2)),
    "1024 to 512, 2x2 s2": Case(4, 1024, 512, 1, (32, 32), (2, 2), (2, 2)),
    "21 to 21, 16x16 s8": Case(4, 21, 21, 1, (64, 64), (16, 16), (8, 8), (4, 4)),
    "56 to 1, 9x9 s3": Case(4, 56, 1, 1, (64, 64), (9, 9), (3, 3), (4, 4), (2, 2)),
}


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
    return dataclasses.replace(problem, **({"source_aligned": aligned} | changes))


def plans(problem: Problem, stem: str, target: Target = HOPPER) -> list[Plan]:
    """The plans of every tile of the kernel that serves."""
    found = candidates(problem, target, (family(stem),))
    return [make_plan(problem, target, c) for c in found if c.refusal is None]


def new_workspace(chosen: Plan) -> torch.Tensor:
    """Memory for packing and kernel, all of it not a number."""
    return torch.full((chosen.packed,), float("nan"))


def arguments_of(
    launch: Launch, encode=tensor_map.encode, **operands: torch.Tensor | None
) -> bytes:
    """The bytes of a launch's arguments on these tensors, by the names of `OPERANDS`."""
    strides = {name: t.stride()[-4:] for name, t in operands.items() if t is not None}
    tensors = [operands.get(name) for name in OPERANDS]
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return launch.bind(strides).arguments(addresses, tensor_map.encode)


@functools.lru_cache(maxsize=1024)
def emulated(source: KernelSource, sanitize: bool = False) -> EmulatedKernel:
    """The same for all launches: to find its library reads every header, which takes as long as a
    small launch.
    """
    return EmulatedKernel(source, sanitize=sanitize)


def run(
    chosen: Plan,
    t,
    schedule: str = "forward",
    sanitize: bool = False,
    out=None,
    blocks: int = 0,
    packed=None,
    workspace=None,
):
    """The output of packing and kernel, into `out` where it is given.

    `blocks`: at most so many of the kernel's launch, in place of the plan's.
    `packed`: what the kernel finds in the workspace, in place of the packing's launch.
    `workspace`: a new one of `new_workspace`, for a look at it afterwards.
    """
    given = packed is not None
    if not given:
        packed = new_workspace(chosen) if workspace is None else workspace
    if out is None:
        out = torch.full(chosen.problem.y_shape, float("nan"))
    tensors = [t.x, t.w, packed, out, *([] if t.bias is None else [t.bias])]
    memory = allocations(tensors)
    for launch in chosen.launches:
        packs = launch.role == "packing"
        if packs and given:
            continue
        grid = launch.grid if packs else min(launch.grid, blocks or launch.grid)
        arguments = arguments_of(launch, x=t.x, w=t.w, y=out, bias=t.bias, packed=packed)
        kernel = emulated(launch.source, sanitize)
        kernel.launch(grid, arguments, allocations=memory, schedule=schedule)
    return out


def assert_right(out, case: Case, t, math: str = "tf32") -> None:
    """Against float64 of the operands as `math` rounds them."""
    x, w = (round_to_tf32(t.x), round_to_tf32(t.w)) if math == "tf32" else (t.x, t.w)
    want = reference(case, x, w, t.bias, t.grad_output)[0]
    error = (out.double() - want).abs()
    assert torch.isfinite(out).all(), "not every element was written"
    assert error.norm() <= 1e-6 * want.norm()
    bias = None if t.bias is None else t.bias.abs()
    size = reference(case, x.abs(), w.abs(), bias, t.grad_output)[0]
    terms = case.in_channels * case.kernel[0] * case.kernel[1] + (bias is not None)
    assert (error <= 4 * terms**0.5 * 2.0**-24 * size).all()


def assert_order_free(chosen: Plan, t, blocks: int = 0, others: int = 0) -> None:
    """Threads in any order, and any number of blocks, give the same bits."""
    first = run(chosen, t, blocks=blocks)
    for schedule in ("reverse", "random:1", "random:2"):
        assert torch.equal(first, run(chosen, t, schedule, blocks=others))


def with_blocks(chosen: Plan, blocks: int) -> Plan:
    """With so many blocks of the kernel's launch."""
    launches = tuple(
        dataclasses.replace(launch, grid=blocks) if launch.role == "kernel" else launch
        for launch in chosen.launches
    )
    return dataclasses.replace(chosen, launches=launches)


def assert_written_alone(chosen: Plan, case: Case, t, math: str = "tf32") -> None:
    """Into rows with room on both sides, that begin on vectors: nothing else changes."""
    *outer, width = chosen.problem.y_shape
    storage = torch.full((*outer, width + 8), float("nan"))
    out = storage[..., 4 : 4 + width]
    run(chosen, t, out=out)
    assert_right(out, case, t, math)
    assert storage[..., :4].isnan().all() and storage[..., 4 + width :].isnan().all()


def assert_bias_alone(chosen: Plan, t, rows: list[int]) -> None:
    """Output rows that no tap reaches hold the bias, to the bit."""
    out = run(chosen, t)[:, :, rows]
    assert torch.equal(out, t.bias[:, None, None].expand_as(out))


def assert_wants_vectors(chosen: Plan, t) -> None:
    """An output whose address is no multiple of 16 is refused."""
    off = torch.empty(t.grad_output.numel() + 1)[1:].view_as(t.grad_output)
    with pytest.raises(ValueError, match="multiple of 16"):
        arguments_of(chosen.kernel, x=t.x, w=t.w, y=off)


def assert_compiled_well(chosen: Plan, arch: str = "sm_90a") -> None:
    """All launches through NVRTC: no spills, no warnings, so no serialised products."""
    for launch in chosen.launches:
        resources = compile_cuda(launch.source, arch).resources
        assert not resources.spills and resources.stack_frame == 0, f"{chosen}: {resources}"
        assert not resources.warnings, f"{chosen}: {resources}"


def expect_worse_code(request: pytest.FixtureRequest, *releases: tuple[int, int]) -> None:
    """Mark a test of `assert_compiled_well` as one that fails with these releases of NVRTC.

    They spill or serialise where later ones do not. The tiles are right with them, and slower.
    """
    version = nvrtc_version()
    if version in releases:
        reason = f"NVRTC {version[0]}.{version[1]} spills or serialises, a later one does not"
        request.applymarker(pytest.mark.xfail(raises=AssertionError, reason=reason))


def allocations(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Address and bytes of the memory of each."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [(storage.data_ptr(), storage.nbytes()) for storage in storages if storage.nbytes()]


def run_general(
    chosen: Plan, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, schedule: str = "forward"
) -> torch.Tensor:
    """What the launches of a plan make, of any direction, whose own operand is not read.

    The operands have the plan's layouts.
    """
    direction, problem = chosen.problem.direction, chosen.problem
    if direction == "weight_gradient":
        strides = chosen.partial_strides
        own, out = "partial", torch.empty_strided((chosen.splits, *problem.w_shape), strides)
    else:
        own, shape, of_own = (
            ("y", problem.y_shape, problem.y_layout)
            if direction == "forward"
            else ("x", problem.x_shape, problem.x_layout)
        )
        last = of_own == "channels_last"
        form = torch.channels_last if last else torch.contiguous_format
        out = torch.empty(shape, memory_format=form)
    out = out.to(x.dtype).fill_(float("nan"))
    named = {"x": x, "w": w, "y": y} | {own: out}
    if chosen.packed:
        named["packed"] = new_workspace(chosen)
    memory = allocations([x, w, y, *named.values()])
    for launch in chosen.launches:
        arguments = arguments_of(launch, **named)
        emulated(launch.source).launch(
            launch.grid, arguments, allocations=memory, schedule=schedule
        )
    return out.sum(0) if direction == "weight_gradient" else out
