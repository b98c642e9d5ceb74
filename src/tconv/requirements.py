"""Says at import where PyTorch is too old, before anything else fails for that reason."""

import torch
from torch.torch_version import TorchVersion

LEAST_TORCH = "2.6"
"""The oldest that we are tested with; `pyproject.toml` requires it too."""


def check(version: str) -> None:
    """Refuse a version of PyTorch, such as "2.5.1+cu124"; earlier builds of 2.6 itself are taken.

    Raises:
        ImportError: it is older than `LEAST_TORCH`.
    """
    # "2.6.0a0+git12ab", as some distributions build it, comes before "2.6", but after "2.6.dev0".
    if TorchVersion(version) < f"{LEAST_TORCH}.dev0":
        raise ImportError(
            f"tconv needs torch {LEAST_TORCH} or newer, but torch {version} is installed: "
            "pip install --upgrade torch (https://pytorch.org/get-started/locally has the command "
            "for each version of CUDA)"
        )


check(torch.__version__)
