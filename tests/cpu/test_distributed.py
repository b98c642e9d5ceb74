"""A converted layer trains in two processes as PyTorch's does in one; emulated, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "two_processes.py"


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_train_as_one(way: str, tmp_path: Path) -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    if way == "fsdp" and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("this torch's FSDP2 does not run on a CPU")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), way, str(tmp_path / "rendezvous")],
        env={
            **os.environ,
            "TCONV_EMULATE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("both agree\n")
