"""Kernels compiled without a GPU serve a process on the GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MODEL = """
import torch, tconv
def model():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.ConvTranspose2d(64, 32, 4, 2, 1), torch.nn.ReLU(),
        torch.nn.ConvTranspose2d(32, 3, 4, 2, 1),
    )
    tconv.convert(layers)
    return layers
"""

AHEAD = (
    MODEL
    + """
assert not torch.cuda.is_available()
with tconv.own_kernels():
    print(tconv.precompile(model(), torch.empty(4, 64, 32, 32), arch=ARCH, progress=False))
"""
)

RUN = (
    MODEL
    + """
from tconv.jit import compile as compiling
def refuse(stem, *_):
    raise AssertionError(f"{stem} is compiled")
compiling.run_nvrtc = refuse
with tconv.own_kernels():
    layers = model().cuda()
    x = torch.randn(4, 64, 32, 32, device="cuda", requires_grad=True)
    layers(x).square().mean().backward()
    torch.cuda.synchronize()
print({row.kernel for row in tconv.statistics()})
"""
)


def python(text: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_step_compiles_nothing_after_precompile(tmp_path):
    from tconv.jit.target import Target

    target = Target.for_device(0)
    arch = f"{target.arch}:{target.multiprocessors}"
    folder = str(tmp_path / "cache")
    python(f"ARCH = {arch!r}\n" + AHEAD, CUDA_VISIBLE_DEVICES="", TCONV_CACHE_DIR=folder)
    assert "pytorch" not in python(RUN, TCONV_CACHE_DIR=folder)
