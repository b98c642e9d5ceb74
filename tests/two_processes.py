"""Trains a converted layer in two gloo processes: `python tests/two_processes.py ddp|fsdp FILE`."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import tconv


def model() -> nn.Sequential:
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1)
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.SiLU(), up)


def train(module: nn.Module, pictures: torch.Tensor) -> None:
    """Two steps, of which the second is a known call."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        module(pictures).square().mean().backward()
        optimizer.step()


def work(rank: int, way: str, file: str) -> None:
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=limit
    )
    torch.backends.cudnn.allow_tf32 = False
    expected, ours = model(), model()
    pictures = torch.rand(4, 3, 8, 8)
    assert tconv.convert(ours) == 1
    if way == "ddp":
        train(nn.parallel.DistributedDataParallel(ours), pictures[rank::2])
    else:
        from torch.distributed.fsdp import fully_shard

        fully_shard(ours[2])
        train(fully_shard(ours), pictures[rank::2])
    train(expected, pictures)  # the whole batch, by PyTorch's layer
    for found, wanted in zip(ours.parameters(), expected.parameters(), strict=True):
        whole = found.full_tensor() if way == "fsdp" else found
        torch.testing.assert_close(whole, wanted.data, rtol=1e-4, atol=1e-6)
    ran = tconv.statistics()
    assert {each.direction for each in ran} == {"forward", "input_gradient", "weight_gradient"}
    assert all(each.kernel != "pytorch" and each.calls == 2 for each in ran), ran
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, tuple(sys.argv[1:]), nprocs=2)
    print("both agree")
