"""Runs the emulator's cases on a GPU: what the emulator is tested against is what hardware does.

PYTHONPATH=src:tests python -m cpu.emulator.on_device [name ...]
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from cpu.emulator.feature_cases import simple_cases
from cpu.emulator.inline_kernel import Case, Map
from cpu.emulator.wgmma_cases import wgmma_cases
from tconv.jit import runtime, tensor_map


def all_cases() -> dict[str, Case]:
    return {**simple_cases(), **wgmma_cases()}


def run_on_device(case: Case, device: int = 0) -> None:
    """Launch the case's kernel on a device and check what it writes."""
    arrays: dict[str, tuple[np.ndarray, torch.Tensor]] = {}
    packed = {}
    for name, _ in case.source.arguments:
        value = case.values[name]
        array = value.array if isinstance(value, Map) else value
        if not isinstance(array, np.ndarray):
            packed[name] = value
            continue
        if name in case.expected:
            array[...] = 0
        copy = torch.from_numpy(array.reshape(-1).view(np.uint8)).cuda(device)
        arrays[name] = (array, copy)
        address = copy.data_ptr()
        packed[name] = (
            value.encode(tensor_map.encode, address) if isinstance(value, Map) else address
        )
    kernel = runtime.load(case.source, device)
    kernel.launch(case.grid, case.source.pack(**packed))
    torch.cuda.synchronize(device)
    for array, copy in arrays.values():
        array.reshape(-1).view(np.uint8)[...] = copy.cpu().numpy()
    case.check()


def main() -> int:
    """Run the named cases, or all; the exit status is how many failed."""
    cases = all_cases()
    failed = 0
    for name in sys.argv[1:] or cases:
        try:
            run_on_device(cases[name])
        except AssertionError as error:
            failed += 1
            print("differs:", " ".join(str(error).split())[:300])
    print(f"{len(cases)} cases, {failed} differ")
    return failed


if __name__ == "__main__":
    sys.exit(main())
