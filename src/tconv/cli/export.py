"""`tconv export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tconv.cli.shared import (
    DTYPES,
    UsageError,
    add_command,
    add_layer_options,
    console,
    exporters_layer,
    layers_given,
)
from tconv.errors import MissingDependencyError
from tconv.jit.target import Target

if TYPE_CHECKING:
    from tconv.cli.shared import Commands


def add(commands: Commands) -> argparse.ArgumentParser:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "export",
        "a self-contained file with a faster ModelNew, for a file with a Model",
        "Takes a file with a class Model(torch.nn.Module) that has one ConvTranspose2d or 1d, with "
        "get_inputs() and get_init_inputs(), and writes one with a class ModelNew: the same "
        "signatures and results, its CUDA kernels in it, nothing but torch imported. It needs "
        "nvcc, ninja and a C++ compiler where it runs.",
        "tconv export problem.py -o model_new.py\n"
        "tconv export --layer 64,128,4,2,1 --input 16x32x32 -o model_new.py\n"
        "tconv export --layer 1d:512,256,16,8,4 --input 16x32 -o model_new.py\n"
        "tconv export problem.py -o model_new.py --arch sm_80\n"
        "tconv export problem.py -o model_new.py --dtype bfloat16",
    )
    parser.add_argument("problem", nargs="?", type=Path, help="the file with the class Model")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write"
    )
    add_layer_options(parser, many=False)
    parser.add_argument(
        "--arch",
        default="sm_90a",
        help=f"what the fast kernel is planned for: {', '.join(Target.names())} "
        "(default: %(default)s); the general kernel serves every other GPU",
    )
    parser.add_argument(
        "--dtype",
        choices=[name for name in DTYPES if name != "float64"],
        help="what the fast kernels are planned for, when the model is run in another type than "
        "the file's inputs have (default: that of the inputs, float32 of --layer)",
    )
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Runs the command."""
    layers = layers_given(parsed)
    if (parsed.problem is None) == (not layers):
        raise UsageError("either a file with a Model, or --layer 64,128,4,2,1")
    if len(layers) > 1:
        raise UsageError(f"one file holds one layer, got {len(layers)}")
    if parsed.problem is not None and not parsed.problem.is_file():
        raise FileNotFoundError(f"{parsed.problem} is no file")
    folder = parsed.output.parent
    if not folder.is_dir():  # the writer's own error would name a temporary file in it
        raise FileNotFoundError(f"{folder}, where {parsed.output.name} is to go, is no folder")
    try:
        Target.named(parsed.arch)
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        from tconv import export
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tconv"):
            raise MissingDependencyError("this build of tconv has no exporter") from error
        raise
    with console(stderr=True).status("planning and writing ..."):
        layer = exporters_layer(layers[0]) if layers else None
        report = export.export_file(
            parsed.problem, layer, parsed.output, arch=parsed.arch, dtype=parsed.dtype
        )
    console().print(str(report), markup=False, soft_wrap=True)
    return 0
