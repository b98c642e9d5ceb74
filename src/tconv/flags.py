"""PyTorch's flags that decide how a call is computed."""

from __future__ import annotations

import os

import torch


def tf32_allowed() -> bool:
    """Whether float32 convolutions may use TF32, which is PyTorch's default.

    Not where its flags forbid it, cuDNN is off (`torch.backends.cudnn.enabled`), or
    NVIDIA_TF32_OVERRIDE=0 was set by the first call.
    """
    if _TF32_FORBIDDEN or not torch._C._get_cudnn_enabled():
        return False
    if _PRECISION is None:  # torch before 2.9
        return torch.backends.cudnn.allow_tf32
    return bool(_PRECISION("cuda", "conv") == "tf32")


def is_deterministic() -> bool:
    """Whether PyTorch's own operators must be deterministic."""
    return torch._C._get_cudnn_deterministic() or torch._C._get_deterministic_algorithms()


# Read once, as cuDNN and cuBLAS do. cuDNN ignores other values.
_TF32_FORBIDDEN = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"

# What torch.backends.cudnn.conv.fp32_precision reads, in half its time.
_PRECISION = getattr(torch._C, "_get_fp32_precision_getter", None)
