"""Training of a DCGAN: its generator's transposed convolutions by tconv, beside PyTorch.

    python examples/dcgan_training.py --steps 300

Two trainings start from the same weights and see the same pictures, discs that are drawn here.
The first step's gradients are compared, in full float32: rounding moves units over the kinks of
ReLUs, TF32's above all, and takes any two trainings of a GAN apart. On a CPU both run PyTorch's
operator; TCONV_EMULATE=1 runs tconv's kernels there.
"""

import argparse
import time
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tconv

NOISE = 100


def generator(width: int) -> nn.Sequential:
    """Noise [N, 100, 1, 1] to pictures [N, 3, 64, 64] from -1 to 1."""
    widths = [8 * width, 4 * width, 2 * width, width, 3]
    layers: list[nn.Module] = [nn.ConvTranspose2d(NOISE, widths[0], 4)]
    for c, after in pairwise(widths):
        layers += [nn.BatchNorm2d(c), nn.ReLU(), nn.ConvTranspose2d(c, after, 4, 2, 1)]
    return nn.Sequential(*layers, nn.Tanh())


def discriminator(width: int) -> nn.Sequential:
    """Pictures [N, 3, 64, 64] to logits, [N]: above 0 for a real one."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    for c in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(c, 2 * c, 4, 2, 1), nn.BatchNorm2d(2 * c), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4), nn.Flatten(0))


def discs(count: int, device: str) -> Tensor:
    """Pictures of one coloured disc each, [count, 3, 64, 64] from -1 to 1."""
    axis = torch.linspace(-1, 1, 64, device=device)
    y, x, radius = torch.rand(3, count, 1, 1, device=device) - 0.5
    inside = (axis[:, None] - y) ** 2 + (axis - x) ** 2 < (0.6 + 0.4 * radius) ** 2
    return inside[:, None] * (2 * torch.rand(count, 3, 1, 1, device=device) - 1)


def train(given: argparse.Namespace, convert: bool) -> tuple[Tensor, float]:
    """The first step's gradients of the generator, flat, and the milliseconds of a later step."""
    torch.manual_seed(0)
    make, judge = (each(given.width).to(given.device) for each in (generator, discriminator))
    if convert:
        print(f"{tconv.convert(make)} layers converted")
    of_make, of_judge = (torch.optim.Adam(m.parameters(), 2e-4, (0.5, 0.99)) for m in (make, judge))
    for step in range(given.steps):
        torch.backends.cudnn.allow_tf32 = step > 0
        made = make(torch.randn(given.batch, NOISE, 1, 1, device=given.device))
        of_judge.zero_grad()
        real = discs(given.batch, given.device)
        (F.softplus(-judge(real)) + F.softplus(judge(made.detach()))).mean().backward()
        of_judge.step()
        of_make.zero_grad()
        loss = F.softplus(-judge(made)).mean()
        loss.backward()
        of_make.step()
        if step == 0:
            first = torch.cat([w.grad.flatten() for w in make.parameters() if w.grad is not None])
        if step == given.steps // 2:
            loss.item()  # waits for the device, as below
            start = time.perf_counter()
    print(f"the generator's loss after {given.steps} steps: {loss.item():.3f}")
    return first, 1e3 * (time.perf_counter() - start) / max((given.steps - 1) // 2, 1)


def main() -> None:
    """Trains with PyTorch's layers, then with tconv's."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--steps", type=int, default=200 if on_gpu else 3, help="from 1 on")
    parser.add_argument("--batch", type=int, default=128 if on_gpu else 4)
    parser.add_argument("--width", type=int, default=64 if on_gpu else 8, help="least channels")
    given = parser.parse_args()

    expected, theirs = train(given, convert=False)
    found, ours = train(given, convert=True)
    difference = (found - expected).abs().max()
    print(f"largest difference {difference:.2g}, of gradients up to {expected.abs().max():.2g}")
    for served in tconv.statistics():
        print(f"{served.calls} calls, {served.direction}: {served.kernel} ({served.reason})")
    if expected.is_cuda:
        print(f"a step by PyTorch: {theirs:.3f} ms, by tconv: {ours:.3f} ms")


if __name__ == "__main__":
    main()
