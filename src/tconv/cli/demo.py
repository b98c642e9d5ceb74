"""`tconv demo`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tconv.cli.shared import add_command, not_negative
from tconv.errors import MissingDependencyError

if TYPE_CHECKING:
    from tconv.cli.shared import Commands


def add(commands: Commands) -> argparse.ArgumentParser:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "demo",
        "a photograph through two up-sampling networks, beside PyTorch",
        "Puts a photograph through an FCN-8s head and a U-Net, compares outputs and "
        "gradients with PyTorch's, shows times, and writes the pictures. Exit code 1 if a "
        "comparison fails.",
        "tconv demo\ntconv demo --device cpu --size 128 --output /tmp/demo",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder for the pictures"
    )
    parser.add_argument("--picture", type=Path, help="another picture than the one that ships")
    parser.add_argument(
        "--size",
        type=_multiple_of_32,
        help="height and width in pixels, a multiple of 32 (default: 512 on a GPU, else 256)",
    )
    parser.add_argument(
        "--steps", type=not_negative, default=200, help="training steps (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument("--no-tf32", action="store_true", help="compute in full float32")
    return parser


def run(parsed: argparse.Namespace) -> int:
    """Runs the command."""
    import torch

    try:
        from tconv.demo import show
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tconv"):
            raise
        raise MissingDependencyError(
            f"needs {error.name}: pip install pillow scikit-image"
        ) from error
    if parsed.device == "cuda" and not torch.cuda.is_available():
        raise MissingDependencyError(
            "no CUDA device that this torch can use; --device cpu runs without one"
        )
    return show.run(
        show.Options(
            output=parsed.output,
            picture=parsed.picture,
            size=parsed.size,
            steps=parsed.steps,
            device=parsed.device,
            tf32=not parsed.no_tf32,
        )
    )


def _multiple_of_32(text: str) -> int:
    size = int(text)
    if size <= 0 or size % 32:
        raise argparse.ArgumentTypeError(f"must be a positive multiple of 32, got {text}")
    return size
