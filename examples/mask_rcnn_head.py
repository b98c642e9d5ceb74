"""Mask R-CNN's mask head from torchvision: its transposed convolution by tconv, beside PyTorch's.

    python examples/mask_rcnn_head.py
    python examples/mask_rcnn_head.py --regions 500 --dtype bfloat16

The weights are random and nothing is downloaded. tconv.convert(model) does the same to a whole
detector, such as torchvision.models.detection.maskrcnn_resnet50_fpn. On a CPU both heads run
PyTorch's operator; TCONV_EMULATE=1 runs tconv's kernels there.
"""

import argparse
import copy

import torch
from torch import nn
from torch.utils.benchmark import Timer
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

import tconv

CLASSES = 91  # of COCO


def mask_head(width: int) -> nn.Sequential:
    """Features of regions, [regions, width, 14, 14], to a mask a class, [regions, 91, 28, 28]."""
    return nn.Sequential(
        MaskRCNNHeads(width, layers=(width,) * 4, dilation=1),
        MaskRCNNPredictor(width, dim_reduced=width, num_classes=CLASSES),
        nn.Sigmoid(),
    )


def main() -> None:
    """Converts a copy of the head, and compares the masks of the two."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--regions", type=int, default=100 if on_gpu else 4, help="of all pictures")
    parser.add_argument("--width", type=int, default=256 if on_gpu else 64, help="channels")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    given = parser.parse_args()

    torch.manual_seed(0)
    dtype = getattr(torch, given.dtype)
    theirs = mask_head(given.width).eval().to(given.device, dtype)
    ours = copy.deepcopy(theirs)
    print(f"{tconv.convert(ours)} layer converted")

    regions = torch.rand(given.regions, given.width, 14, 14).to(given.device, dtype)
    with torch.inference_mode():
        expected, found = theirs(regions), ours(regions)
        difference = (found - expected).abs().max().item()
        print(f"largest difference {difference:.2g}, of masks up to {expected.abs().max():.2g}")
        for served in tconv.statistics():
            print(f"{served.calls} calls, {served.direction}: {served.kernel} ({served.reason})")
        if expected.is_cuda:
            for name, model in (("PyTorch", theirs), ("tconv", ours)):
                timer = Timer("model(regions)", globals={"model": model, "regions": regions})
                print(f"{name}: {1e3 * timer.blocked_autorange().median:.3f} ms")


if __name__ == "__main__":
    main()
