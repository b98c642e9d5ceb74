"""`tconv precompile`."""

from __future__ import annotations

import argparse
import copy
import itertools
import json
from typing import TYPE_CHECKING

from tconv.cli.shared import (
    DENSE_LAYOUTS,
    DTYPES,
    UsageError,
    add_command,
    add_layer_options,
    console,
    layers_given,
    listed,
    positive,
)
from tconv.jit.target import Target
from tconv.layers import DIRECTIONS

if TYPE_CHECKING:
    from tconv.cli.shared import Commands
    from tconv.layers import Layer


def add(commands: Commands) -> argparse.ArgumentParser:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "precompile",
        "compile layers' kernels into the cache on disk, without a GPU",
        "Compiles the kernels that calls of these layers launch, on all cores, and keeps them in "
        "the cache on disk, for container images and clusters: a process on the GPU then compiles "
        "nothing. No GPU is needed. Calls that PyTorch's operator always runs need no kernel; "
        "TCONV_STRICT=1 compiles ours for them too. tconv.precompile(model, *inputs) in Python "
        "finds a model's calls itself.",
        "tconv precompile --layers layers.json --arch sm_80,sm_90a\n"
        "tconv precompile --layer 64,32,4,2,1 --input 8x64x64,16x128x128 --arch sm_90a:114\n"
        "tconv precompile --layers layers.json --only decoder --dtype float32,bfloat16 "
        "--layout all --direction forward -j 8",
    )
    add_layer_options(parser, many=True, inputs=True)
    calls = parser.add_argument_group("the calls")
    for name, choices, default in (
        ("direction", DIRECTIONS, DIRECTIONS),
        ("dtype", DTYPES, ("float32",)),
        ("layout", DENSE_LAYOUTS, ("contiguous",)),
    ):
        shown = "all" if default == choices else ",".join(default)
        calls.add_argument(
            f"--{name}",
            type=listed(*choices),
            default=default,
            metavar=f"{name.upper()},...",
            help=f"{', '.join(choices)}, or all (default: {shown})",
        )
    calls.add_argument("--no-tf32", action="store_true", help="full float32 only")
    machine = parser.add_argument_group("the machine")
    machine.add_argument(
        "--arch",
        metavar="ARCH[:SMS],...",
        help=f"what to compile for: {', '.join(Target.names())}; with :SMS for a GPU of so many "
        "multiprocessors, on which a plan depends (default: the GPUs here, or sm_90a where there "
        "is none)",
    )
    machine.add_argument(
        "-j", "--jobs", type=positive, metavar="N", help="compile so many at once (default: all "
        "cores)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the summary, for machines")
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Runs the command."""
    from tconv.filling import fill, targets_of

    layers = _layers(parsed)
    try:
        targets = targets_of(None if parsed.arch is None else parsed.arch.split(","))
    except ValueError as error:
        raise UsageError(str(error)) from error
    asked = itertools.product(layers, parsed.direction, parsed.dtype, parsed.layout)
    problems = [
        layer.problem(direction, dtype, layout, tf32=not parsed.no_tf32)
        for layer, direction, dtype, layout in asked
        if layer.dimensions == 2 or layout == "contiguous"  # 1-d tensors have no other
    ]
    filled = fill(list(dict.fromkeys(problems)), targets, jobs=parsed.jobs)
    if parsed.json:
        print(json.dumps(filled.record(), indent=2))
    else:
        console().print(str(filled), markup=False, soft_wrap=True)
    return 0


def _layers(parsed: argparse.Namespace) -> list[Layer]:
    """The layers, those of --layer with each of the inputs."""
    inputs = [None] if parsed.input is None else parsed.input.split(",")
    layers: dict[Layer, None] = {}
    for text in inputs:
        given = copy.copy(parsed)
        given.input = text
        layers |= dict.fromkeys(layers_given(given))
    if not layers:
        raise UsageError("which layers? --layer 64,32,4,2,1, or --layers FILE")
    return list(layers)
