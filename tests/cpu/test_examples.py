"""The examples run on a CPU, convert what they say, and agree with PyTorch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

LAYERS = {"unet_inference": 4, "mask_rcnn_head": 1, "dcgan_training": 5, "vocoder": 4}
"""How many layers each of them converts."""


def run(name: str, *arguments: str, **variables: str) -> str:
    """What an example prints, on a machine whose GPUs it does not see."""
    if name == "mask_rcnn_head":
        pytest.importorskip("torchvision")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def share(printed: str) -> float:
    """The largest difference, as a share of the largest value."""
    found = re.search(r"^largest difference (\S+), of [\w ]+ up to (\S+)$", printed, re.MULTILINE)
    assert found, printed
    return float(found[1]) / float(found[2])


def test_every_example_is_run() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(LAYERS)


@pytest.mark.parametrize("name", LAYERS)
def test_on_the_cpu(name: str) -> None:
    printed = run(name)
    assert re.search(rf"^{LAYERS[name]} layers? converted$", printed, re.MULTILINE), printed
    assert share(printed) < 1e-5  # threads may sum in another order
    assert "calls, " not in printed


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYERS)
def test_help_names_the_options(name: str) -> None:
    assert "--device DEVICE" in run(name, "--help")


@pytest.mark.thorough
@pytest.mark.parametrize("name", LAYERS)
def test_in_the_emulator(name: str) -> None:
    printed = run(name, TCONV_EMULATE="1")
    assert share(printed) < 1e-3  # TF32's
    assert "calls, forward: " in printed and "(own kernels)" in printed
    assert "pytorch" not in printed
    assert ("calls, weight_gradient: " in printed) == ("training" in name)
