"""`tconv explain`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tconv import drawing
from tconv.bench.floors import GPUS, arithmetic
from tconv.choice import SENTENCES
from tconv.cli.shared import (
    DENSE_LAYOUTS,
    DTYPES,
    UsageError,
    add_command,
    add_layer_options,
    bytes_text,
    console,
    layers_given,
)
from tconv.jit.target import Target
from tconv.layers import DIRECTIONS, Layer
from tconv.problem import Axis

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tconv.cli.shared import Commands
    from tconv.explain import Explanation


def add(commands: Commands) -> argparse.ArgumentParser:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "explain",
        "a layer's phases, work, floor, candidate kernels and plan",
        "Shows what tconv makes of a layer: the plan with what its kernel takes, the work, its "
        "memory and what a GPU allows; with --all every kernel with its modelled time or the "
        "reason why it cannot run; then the phases with their taps and shifts, and which taps "
        "reach which output. No GPU is needed.",
        "tconv explain 64,32,4,2,1 --input 8x32x32\n"
        "tconv explain 32,64,3x5,stride=2x3,dilation=2x1,groups=4 --arch sm_80\n"
        "tconv explain 1d:512,256,16,8,4 --input 16x32\n"
        "tconv explain --layers layers.json --only 'unet*' --json\n"
        "tconv explain 64,32,4,2,1 --direction weight_gradient --source > kernel.cu",
    )
    parser.add_argument(
        "layer_arguments",
        nargs="*",
        metavar="LAYER",
        help="the layer, as 64,32,4,2,1; --layer says how it is written, and is the same",
    )
    add_layer_options(parser, many=True)
    call = parser.add_argument_group("the call")
    call.add_argument(
        "--direction",
        choices=(*DIRECTIONS, "all"),
        default="forward",
        help="default: %(default)s",
    )
    call.add_argument("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    call.add_argument(
        "--layout", choices=DENSE_LAYOUTS, default="contiguous", help="default: %(default)s"
    )
    call.add_argument("--no-tf32", action="store_true", help="full float32 only")
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--gpu",
        type=str.lower,
        choices=tuple(GPUS),
        default="h200",
        help="whose measured ceilings set the floor (default: %(default)s)",
    )
    machine.add_argument(
        "--arch",
        help=f"what is planned and compiled for: {', '.join(Target.names())} (default: the GPU's)",
    )
    output = parser.add_argument_group("the output")
    output.add_argument(
        "--all", action="store_true", help="also every candidate, with its time or its refusal"
    )
    only = output.add_mutually_exclusive_group()
    only.add_argument("--json", action="store_true", help="a JSON list, one object an explanation")
    only.add_argument(
        "--source", action="store_true", help="only the plan's specialised CUDA, headers in it"
    )
    only.add_argument(
        "--sass",
        action="store_true",
        help="only the plan's machine code (needs nvdisasm or cuobjdump)",
    )
    output.add_argument("--png", metavar="FILE", type=Path, help="write the drawing as a picture")
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Runs the command."""
    from tconv.explain import explain

    layers = layers_given(parsed)
    if not layers:
        raise UsageError("which layer? 64,32,4,2,1, or --layers FILE")
    if parsed.png is not None and len(layers) > 1:
        raise UsageError(f"--png draws one layer, got {len(layers)}; --only chooses one")
    gpu = GPUS[parsed.gpu]
    arch = parsed.arch or gpu.arch
    try:
        Target.named(arch)
    except ValueError as error:
        raise UsageError(str(error)) from error

    if parsed.png is not None:
        drawing.write_png(layers[0], parsed.png)
    directions = DIRECTIONS if parsed.direction == "all" else (parsed.direction,)
    asked = [(layer, direction) for layer in layers for direction in directions]
    shown = console()
    explanations = []
    with console(stderr=True).status("planning ...") as status:
        for number, (layer, direction) in enumerate(asked, 1):
            status.update(f"{number} of {len(asked)}: compiling for {arch}: {direction} of {layer}")
            explanation = explain(
                layer,
                arch=arch,
                gpu=gpu,
                direction=direction,
                dtype=parsed.dtype,
                layout=parsed.layout,
                tf32=not parsed.no_tf32,
                compile=not parsed.source,
            )
            explanations.append(explanation)
            if not (parsed.json or parsed.source or parsed.sass):
                if direction == directions[0]:
                    _show_sizes(layer, shown)
                _show(explanation, shown, every=parsed.all)
                if direction == directions[-1]:
                    _show_phases(layer, shown)
    if parsed.json:
        print(json.dumps([explanation.record() for explanation in explanations], indent=2))
    for explanation in explanations:
        if parsed.source or parsed.sass:
            _require_plan(explanation)
        if parsed.source:
            _print_source(explanation)
        elif parsed.sass:
            _print_sass(explanation)
    if parsed.png is not None and not (parsed.json or parsed.source or parsed.sass):
        shown.print(f"The drawing as a picture: {parsed.png}", markup=False)
    return 0 if all(e.plan is not None and not e.broken for e in explanations) else 1


def _require_plan(explanation: Explanation) -> None:
    from tconv.errors import NoKernelError

    if explanation.no_plan is not None:
        raise NoKernelError(explanation.no_plan)


def _print_source(explanation: Explanation) -> None:
    from tconv.explain import named_sources, whole_text

    assert explanation.plan is not None
    for name, source in named_sources(explanation.plan):
        print(f"// {name} for {explanation.problem}")
        print(f"// for {explanation.target.arch}; {source.threads} threads, ", end="")
        print(f"{source.shared_bytes} bytes of dynamic shared memory")
        print(whole_text(source))


def _print_sass(explanation: Explanation) -> None:
    from tconv.disassemble import sass
    from tconv.errors import TconvError

    if explanation.not_compiled is not None:
        raise TconvError(explanation.not_compiled)
    for name, compiled in explanation.named_compiled:
        code = sass(compiled.cubin)
        print(f"// {name} for {explanation.problem}, {compiled.arch}")
        print(code)


def _show_sizes(layer: Layer, shown: Console) -> None:
    """The layer and its tensors, which no direction changes."""
    shown.rule(f"[bold]{layer.name or layer.text}", align="left")
    shown.print(f"{layer.kind}({layer.arguments})", markup=False)
    for name, shape in (
        ("input", layer.x_shape),
        ("weight", layer.w_shape),
        ("output", layer.y_shape),
    ):
        shown.print(f"  {name:<7} {' x '.join(map(str, layer.sizes(shape)))}")
    shown.print()


def _show_phases(layer: Layer, shown: Console) -> None:
    """What does not depend on the direction: the phases and the drawing."""
    height, width = layer.axes
    one, same = layer.dimensions == 1, height == width
    for name, axis in (("", width),) if one or same else (("height", height), ("width", width)):
        shown.print(_phase_table(f"Phases along the {name}" if name else "Phases", axis))
        for line in drawing.axis_drawing(axis):
            shown.print(f"  {line}", markup=False, soft_wrap=True)
        shown.print()
    if same and not one:
        shown.print("Both axes are alike.")
    counts = sorted({len(a.taps) * len(b.taps) for a in height.phases for b in width.phases})
    phases = len(height.phases) * len(width.phases)
    taps = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    empty = sum(not a.taps or not b.taps for a in height.phases for b in width.phases)
    shown.print(
        f"Together {_plural(phases, 'phase')} of {taps} taps"
        + (f"; {empty} of them without any, where the output is the bias alone" if empty else "")
        + ". Taps that reach each "
        + ("of the first outputs:" if one else "pixel of the output's top left corner:")
    )
    for line in drawing.pixel_drawing(layer):
        shown.print(f"  {line}", markup=False, soft_wrap=True)
    shown.print()


def _phase_table(title: str, axis: Axis) -> Table:
    table = _table(title, "phase", "outputs", "taps, each at its shift", right=(0, 1))
    for phase in axis.phases:
        outputs = drawing.outputs_of(axis, phase)
        table.add_row(str(phase.index), str(outputs), drawing.taps_text(phase))
    return table


def _show(explanation: Explanation, shown: Console, *, every: bool) -> None:
    """One direction: plan, work, and where `every` the candidates."""
    problem = explanation.problem
    shown.rule(f"{problem.direction}, {problem.dtype}", align="left")
    if explanation.plan is None:
        shown.print(explanation.no_plan, markup=False, style="bold red")
    else:
        plan = _table("Plan", right=())
        plan.show_header = False
        for name, value in _plan(explanation):
            plan.add_row(name, value)
        shown.print(plan)
    work = _table("Work, and the floor", right=())
    work.show_header = False
    for name, value in _work(explanation):
        work.add_row(name, value)
    shown.print(work)

    arch, found = explanation.target.arch, explanation.candidates
    if not every:
        refused = sum(candidate.refusal is not None for candidate in found)
        shown.print(
            f"Candidates on {arch}: {len(found) - refused} can run, {refused} cannot; --all lists "
            "them."
        )
        shown.print()
        return
    table = _table(f"Candidates on {arch}", "kernel", "tile", "modelled, or why not", right=())
    for candidate in found:
        tile = "any" if candidate.tile is None else str(candidate.tile)
        table.add_row(candidate.stem, tile, candidate.refusal or _time(candidate.cost))
    shown.print(table)


def _work(explanation: Explanation) -> Iterator[tuple[str, str]]:
    problem, floor = explanation.problem, explanation.floor
    moved = problem.bytes
    yield "arithmetic", f"{problem.flops / 1e9:.3g} GFLOP, {_arithmetic(explanation)}"
    yield "memory", f"{moved / 1e6:.4g} MB: input, weight and output once each"
    yield "intensity", f"{problem.flops / moved:.3g} FLOP a byte"
    gpu = explanation.gpu
    rate = gpu.rates[arithmetic(problem)]
    yield (
        f"floor, {gpu.name.upper()}",
        f"{_time(floor.seconds)}, bound by {floor.bound}: {_time(floor.memory)} at "
        f"{gpu.copy / 1e12:.3g} TB/s, {_time(floor.arithmetic)} at {rate / 1e12:.3g} TFLOP/s",
    )


def _arithmetic(explanation: Explanation) -> str:
    problem = explanation.problem
    if problem.math == "tf32":
        return "operands rounded to TF32, summed in float32"
    if problem.dtype in ("float16", "bfloat16"):
        return f"{problem.dtype} operands, summed in float32"
    return f"in full {problem.dtype}"


def _plan(explanation: Explanation) -> Iterator[tuple[str, str]]:
    from tconv.explain import stages, tile_values, workspace_bytes

    plan = explanation.plan
    assert plan is not None
    yield "kernel", plan.stem
    verdict = explanation.verdict
    assert verdict is not None
    device = "" if explanation.device is None else f" on an {explanation.device}"
    who = {"tconv": "this kernel", "pytorch": "PyTorch's operator", "timed": "the faster of both"}
    yield (
        "by default",
        f"{who[verdict.runs]}{device}: {SENTENCES[verdict.reason]}",
    )
    values = ", ".join(f"{name} {value}" for name, value in tile_values(plan.tile).items())
    yield "tile", f"{plan.tile} ({values})"
    like = plan.problem.like
    if like is not None:
        shape = "x".join(map(str, like.x_shape))
        yield "made for", f"an input of {shape}: a kernel that the layer's uncommon sizes share"
    depth = stages(plan)
    if depth is not None:
        yield "stages", str(depth)
    tensors, workspace = plan.problem.bytes, workspace_bytes(plan)
    yield (
        "memory",
        f"{bytes_text(tensors + workspace)} for a call: {bytes_text(tensors)} of input, weight and "
        f"output, {bytes_text(workspace)} of workspace",
    )
    kernel = plan.kernel
    yield "launch", f"{_plural(kernel.grid, 'block')} of {kernel.source.threads} threads"
    yield "shared memory", f"{kernel.source.shared_bytes} bytes of a block, dynamic"
    if plan.splits:
        yield "splits", f"{plan.splits} partial results, summed in order"
    for packing in plan.of_role("packing"):
        yield (
            "before it",
            f"{packing.source.stem} {packing.does}: {_plural(packing.grid, 'block')} of "
            f"{packing.source.threads} threads, {bytes_text(4 * packing.packed)}",
        )
    if kernel.source.repair_source is not None:
        wider = "bfloat16" if plan.problem.math == "ieee" else "TF32"
        yield "at its end", f"its blocks compute in {wider} what float16 cannot hold"
    for repair in plan.of_role("repair"):
        yield (
            "behind it",
            f"{repair.source.stem} computes in TF32 what float16 cannot hold: "
            f"{_plural(repair.grid, 'block')} of "
            f"{repair.source.threads} threads",
        )
    for adding in plan.of_role("addition"):
        yield (
            "behind it",
            f"{adding.source.stem} adds in order what blocks that share a tile have summed: "
            f"{_plural(adding.grid, 'block')} of {adding.source.threads} threads",
        )
    yield (
        "modelled",
        f"{_time(plan.cost)}, {plan.cost / explanation.floor.seconds:.1f} times the floor",
    )
    for name, compiled in explanation.named_compiled:
        resources = compiled.resources
        spilled = (
            f"spills {resources.spill_stores} bytes stored, {resources.spill_loads} loaded"
            if resources.spills
            else "no spills"
        )
        yield (
            f"{name}, {compiled.arch}" if len(explanation.compiled) > 1 else compiled.arch,
            f"{resources.registers} registers a thread, {spilled}, "
            f"{resources.static_shared} bytes of static shared memory, "
            f"{bytes_text(len(compiled.cubin))} of code and data, "
            f"compiled in {compiled.seconds:.2f} s",
        )
        for warning in resources.warnings:
            yield "warning", warning
    if explanation.not_compiled is not None:
        yield "not compiled", explanation.not_compiled


def _table(title: str, *headings: str, right: tuple[int, ...]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, heading in enumerate(headings):
        # Only the last column's cells may wrap, and tiles, whose names are long.
        table.add_column(
            heading,
            justify="right" if number in right else "left",
            no_wrap=number < len(headings) - 1 and heading != "tile",
            overflow="fold",
        )
    return table


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
