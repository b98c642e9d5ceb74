"""Inference of a U-Net: four transposed convolutions by tconv, beside the same network by PyTorch.

    python examples/unet_inference.py
    python examples/unet_inference.py --size 1024 --dtype bfloat16 --channels-last

The weights are random. On a CPU both networks run PyTorch's operator; TCONV_EMULATE=1 runs tconv's
kernels there.
"""

import argparse
import copy

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import tconv


def block(before: int, after: int) -> nn.Sequential:
    """Two convolutions, [N, before, H, W] to [N, after, H, W]."""
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """[N, 3, H, W] to the scores of two classes, [N, 2, H, W]; H and W are multiples of 16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        self.down = nn.ModuleList(
            block(before, after) for before, after in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, stride=2) for c in widths[:-1])
        self.mix = nn.ModuleList(block(2 * c, c) for c in widths[:-1])
        self.scores = nn.Conv2d(width, 2, 1)

    def forward(self, picture: Tensor) -> Tensor:
        """Down to a 16th of the size, and up again with the skips."""
        skips = [self.down[0](picture)]
        for down in self.down[1:]:
            skips.append(down(nn.functional.max_pool2d(skips[-1], 2)))
        features = skips.pop()
        for up, mix in zip(reversed(self.up), reversed(self.mix), strict=True):
            features = mix(torch.cat((skips.pop(), up(features)), 1))
        scores: Tensor = self.scores(features)
        return scores


def main() -> None:
    """Converts a copy of the network, and compares what the two say of one batch."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--size", type=int, default=512 if on_gpu else 64, help="a multiple of 16")
    parser.add_argument("--batch", type=int, default=8 if on_gpu else 1)
    parser.add_argument("--width", type=int, default=64 if on_gpu else 8, help="channels on top")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--channels-last", action="store_true")
    given = parser.parse_args()

    torch.manual_seed(0)
    layout = torch.channels_last if given.channels_last else torch.contiguous_format
    dtype = getattr(torch, given.dtype)
    theirs = UNet(given.width).eval().to(given.device, dtype)
    theirs.to(memory_format=layout)  # type: ignore[call-overload]  # which its stubs lack
    ours = copy.deepcopy(theirs)
    print(f"{tconv.convert(ours)} layers converted")

    picture = torch.rand(given.batch, 3, given.size, given.size)
    picture = picture.to(given.device, dtype, memory_format=layout)
    with torch.inference_mode():
        expected, found = theirs(picture), ours(picture)
        difference = (found - expected).abs().max().item()
        print(f"largest difference {difference:.2g}, of scores up to {expected.abs().max():.2g}")
        for served in tconv.statistics():
            print(f"{served.calls} calls, {served.direction}: {served.kernel} ({served.reason})")
        if expected.is_cuda:
            for name, model in (("PyTorch", theirs), ("tconv", ours)):
                timer = Timer("model(picture)", globals={"model": model, "picture": picture})
                print(f"{name}: {1e3 * timer.blocked_autorange().median:.3f} ms")


if __name__ == "__main__":
    main()
