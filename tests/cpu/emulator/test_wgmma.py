"""wgmma against numpy: types, layouts, A from registers and from shared memory."""

from __future__ import annotations

import pytest

from cpu.emulator.inline_kernel import launch
from cpu.emulator.wgmma_cases import wgmma_cases


@pytest.mark.parametrize("name", wgmma_cases())
def test_wgmma(name: str) -> None:
    case = wgmma_cases()[name]
    launch(case.source, **case.values)
    case.check()


def test_wgmma_with_sanitizers() -> None:
    case = next(iter(wgmma_cases().values()))
    launch(case.source, **case.values, sanitize=True)
    case.check()
