"""The kernels for sm_80 on the device, in place of those that are the first choice there."""

from __future__ import annotations

import pytest
import torch

from tconv.kernels import sm80_forward, sm80_input_gradient, sm80_weight_gradient
from tile_cases import FORMATS, Formats, candidates_of, check_candidates

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="needs a device of capability 8.0",
)

FAMILIES = (sm80_forward, sm80_input_gradient, sm80_weight_gradient)
DTYPES = (torch.bfloat16, torch.float16)

CASES = (
    ("72,40,4,2,1", "2x6x7"),
    ("32,48,3x2,stride=2x3,padding=1x0,groups=2", "3x5x6"),
    ("64,64,3,1,1", "40x31x33"),
    ("64,64,4,2,1", "4x60x104"),
    ("136,72,3,2,1,1", "9x14x14"),
    ("21,3,4,2,1", "5x20x21"),
    ("256,128,2,2", "30x28x28"),
    # Rows and columns of y that no tap reads.
    ("32,64,3,stride=5,padding=1,dilation=2", "3x18x40"),
)


@pytest.fixture(scope="module")
def served():
    def every(dtype: torch.dtype, made: Formats) -> bool:
        return dtype is torch.bfloat16 and made == FORMATS[0]

    return candidates_of(CASES, FAMILIES, DTYPES, FORMATS, every)


@pytest.mark.parametrize("made", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.STEM)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_tile(case, family, dtype, made, served):
    able = served[case, family.STEM, dtype, made]
    assert able
    check_candidates(case, family, dtype, made, able)
