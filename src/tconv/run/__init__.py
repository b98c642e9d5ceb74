"""The three maps on tensors: which call it is, what it is bound to, and running it.

    calls.py      tensors -> `Call`, by all that a call depends on
    binding.py    `Call` -> plan, kernels, launches complete but for addresses
    choosing.py   who runs it: our kernels, or PyTorch's operator
    execution.py  allocate the result, launch

For CUDA tensors, and under TCONV_EMULATE=1 for CPU tensors, whose kernels the emulator runs.
Arguments have been checked by `functional`; none of the tensors is empty.
"""

from tconv.run.calls import (
    Known,
    forward,
    gradients,
    input_gradient,
    known,
    problem_of_fakes,
    ready_gradients,
    remember,
    signature,
    tf32_allowed,
    weight_gradient,
)

__all__ = [
    "Known",
    "forward",
    "gradients",
    "input_gradient",
    "known",
    "problem_of_fakes",
    "ready_gradients",
    "remember",
    "signature",
    "tf32_allowed",
    "weight_gradient",
]
