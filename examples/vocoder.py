"""A vocoder like HiFi-GAN: four transposed convolutions in one dimension by tconv, beside PyTorch.

    python examples/vocoder.py
    python examples/vocoder.py --frames 2000 --dtype float16

The weights are random, so what it speaks is noise. On a CPU both networks run PyTorch's operator;
TCONV_EMULATE=1 runs tconv's kernels there.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import tconv

RATE = 22050  # samples a second, of which a frame of the spectrogram has 256
BANDS = 80
UPSAMPLING = ((16, 8), (16, 8), (4, 2), (4, 2))  # kernel and stride


class Residual(nn.Module):
    """Three dilated convolutions, each added to its input, [N, channels, L]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv1d(channels, channels, 3, dilation=d, padding=d) for d in (1, 3, 5)
        )

    def forward(self, signal: Tensor) -> Tensor:
        """[N, channels, L], the size of the input."""
        for layer in self.layers:
            signal = signal + layer(F.leaky_relu(signal, 0.1))
        return signal


def vocoder(width: int) -> nn.Sequential:
    """A mel spectrogram [N, 80, frames] to a signal [N, 1, 256 * frames] from -1 to 1."""
    layers: list[nn.Module] = [nn.Conv1d(BANDS, width, 7, padding=3)]
    for kernel, stride in UPSAMPLING:
        up = nn.ConvTranspose1d(width, width // 2, kernel, stride, padding=(kernel - stride) // 2)
        width //= 2
        layers += [nn.LeakyReLU(0.1), up, Residual(width)]
    return nn.Sequential(*layers, nn.LeakyReLU(), nn.Conv1d(width, 1, 7, padding=3), nn.Tanh())


def main() -> None:
    """Converts a copy of the vocoder, and compares the signals of the two."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--frames", type=int, default=800 if on_gpu else 20)
    parser.add_argument("--width", type=int, default=512 if on_gpu else 64, help="most channels")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    given = parser.parse_args()

    torch.manual_seed(0)
    dtype = getattr(torch, given.dtype)
    theirs = vocoder(given.width).eval().to(given.device, dtype)
    ours = copy.deepcopy(theirs)
    print(f"{tconv.convert(ours)} layers converted")

    spectrogram = torch.randn(1, BANDS, given.frames).to(given.device, dtype)
    with torch.inference_mode():
        expected, found = theirs(spectrogram), ours(spectrogram)
        seconds = expected.shape[-1] / RATE
        difference = (found - expected).abs().max().item()
        print(f"largest difference {difference:.2g}, of samples up to {expected.abs().max():.2g}")
        for served in tconv.statistics():
            print(f"{served.calls} calls, {served.direction}: {served.kernel} ({served.reason})")
        if expected.is_cuda:
            for name, model in (("PyTorch", theirs), ("tconv", ours)):
                timer = Timer("model(given)", globals={"model": model, "given": spectrogram})
                took = timer.blocked_autorange().median
                print(f"{name}: {1e3 * took:.3f} ms for {seconds:.1f} s of sound")


if __name__ == "__main__":
    main()
