"""PyTorch's flags that decide how a call is computed."""

from __future__ import annotations

import os

from tconv import choice, private, settings


def tf32_allowed() -> bool:
    """Whether float32 convolutions may use TF32, which is PyTorch's default.

    Not where its flags forbid it, cuDNN is off (`torch.backends.cudnn.enabled`), or
    NVIDIA_TF32_OVERRIDE=0 was set by the first call.
    """
    if _TF32_FORBIDDEN or not private.is_cudnn_enabled():
        return False
    return private.allows_tf32()


def library_without_cudnn(float32: bool) -> str:
    """What PyTorch's own operators compute with where cuDNN is off.

    Args:
        float32: whether the call computes in float32, whose matrix products may use TF32.
    """
    return "cublas tf32" if float32 and private.allows_tf32_products() else "cublas"


def is_deterministic() -> bool:
    """Whether PyTorch's own operators must be deterministic."""
    return private.is_cudnn_deterministic() or private.is_deterministic()


def of_who_runs() -> tuple[bool, ...]:
    """What decides who runs a call besides its tensors, precision and blocks around it.

    A call that is found at once reads it now and then: it takes longer than all else there.
    """
    return (
        private.is_cudnn_benchmark(),
        private.is_cudnn_enabled(),
        private.is_cudnn_deterministic(),
        private.is_deterministic(),
        _STRICT in settings.environment,
        _KERNEL in settings.environment,
    )


def are_usual() -> bool:
    """Whether nothing but `own_kernels` changes who runs calls, and cuDNN is on."""
    return (
        choice.TIMING not in choice.overrides
        and private.is_cudnn_enabled()
        and not private.is_cudnn_benchmark()
        and _STRICT not in settings.environment
        and _KERNEL not in settings.environment
    )


_STRICT, _KERNEL = settings.own_kernels_keys

# Read once, as cuDNN and cuBLAS do. cuDNN ignores other values.
_TF32_FORBIDDEN = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
