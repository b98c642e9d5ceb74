"""The depthwise kernels on the device: every tile, against float64."""

from __future__ import annotations

import pytest
import torch

from tconv.kernels import (
    depthwise_forward,
    depthwise_input_gradient,
    depthwise_weight_gradient,
)
from tile_cases import SAME_FORMATS, Formats, candidates_of, check_candidates

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs a device of capability 8.0",
)

FAMILIES = (depthwise_forward, depthwise_input_gradient, depthwise_weight_gradient)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

CASES = (
    ("64,64,4,2,1,groups=64", "16x64x64"),
    ("256,256,4,2,1,groups=256", "3x65x33"),
    ("40,80,3,2,1,1,groups=40", "5x20x21"),
    ("9,9,16,8,4,groups=9", "2x14x15"),
    ("96,96,7,1,3,groups=96", "4x28x28"),
    ("12,36,3x2,stride=2x3,padding=1x0,groups=12", "3x5x6"),
)


@pytest.fixture(scope="module")
def served():
    def every(dtype: torch.dtype, _: Formats) -> bool:
        return dtype is torch.bfloat16

    return candidates_of(CASES, FAMILIES, DTYPES, SAME_FORMATS, every)


@pytest.mark.parametrize("made", SAME_FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.STEM)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_tile(case, family, dtype, made, served):
    able = served[case, family.STEM, dtype, made]
    if not able:
        assert (family.DIRECTION, dtype) == ("forward", torch.float32)
        pytest.skip("contiguous outputs in float32 are direct_forward's")
    check_candidates(case, family, dtype, made, able)
