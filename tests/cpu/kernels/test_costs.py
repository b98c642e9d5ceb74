"""The constants of the cost models: each has a unit and an origin, and a model that reads it."""

import json
from pathlib import Path

import pytest

import tconv.kernels

FILES = sorted(Path(tconv.kernels.__file__).parent.glob("*/costs.json"))
SHARED = {"general_input_gradient": "implicit_gemm.py"}
"""The model that reads constants of a family for another one too."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_every_constant_is_described_and_read(path):
    model = path.with_name("cost.py").read_text()
    if path.parent.name in SHARED:
        model += (path.parents[1] / SHARED[path.parent.name]).read_text()
    for name, constant in json.loads(path.read_text()).items():
        assert {"value", "unit", "origin"} <= constant.keys(), name
        assert constant.keys() <= {"value", "unit", "origin", "means", "absorbs"}, name
        assert f".{name}" in model, f"{name} is read by no line of the model"
