"""Exported files that several tests read."""

from __future__ import annotations

import pytest
import torch

from exported import KERNELBENCH, PROBLEMS, load, problem
from tconv.export import Layer, export_file

SMALL = Layer(24, 20, (3, 4), stride=(2, 1), padding=(1, 1), size=(7, 9), batch=2)


@pytest.fixture(scope="session")
def exported_files(tmp_path_factory):
    """Path of each exported file by name."""
    folder = tmp_path_factory.mktemp("exported")
    paths = {number: folder / f"model_new_{number}.py" for number in KERNELBENCH}
    for number, path in paths.items():
        export_file(problem(number), None, path)
    paths["decoder_block"] = folder / "decoder_block.py"
    export_file(PROBLEMS / "decoder_block.py", None, paths["decoder_block"])
    paths["layer"] = folder / "layer.py"
    export_file(None, SMALL, paths["layer"])
    return paths


@pytest.fixture(scope="session")
def module(exported_files):
    """The exported module of a small layer."""
    return load(exported_files["layer"])


@pytest.fixture
def full_float32():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before
