"""`tconv bench` and tconv.autotune() on a device: what only real timings and streams can show."""

from __future__ import annotations

import json
import time

import pytest
import torch
import torch.nn.functional as F

import tconv
from tconv import cli, tuning
from tconv.bench import timing
from tconv.jit.target import Target
from tconv.layers import DIRECTIONS, Layer
from tconv.plan import candidates

LAYERS = ("--layer", "32,16,4,2,1", "--layer", "20,24,3,groups=2", "--input", "3x17x19")


@pytest.fixture
def bench(tmp_path, capsys):
    def run(*arguments):
        given = ["bench", *LAYERS, "--device", "cuda", "--out", str(tmp_path), "--commit", "abc"]
        code = cli.main([*given, "--repeat", "5", *arguments])
        captured = capsys.readouterr()
        assert code == 0, captured
        (path,) = tmp_path.glob("*.json")
        return json.loads(path.read_text())

    return run


@pytest.mark.parametrize("options", [(), ("--no-tf32",), ("--dtype", "bfloat16"), ("--bias",)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_rows(bench, options, layout):
    flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    rows = bench("--direction", "all", "--layout", layout, *options)
    assert len(rows) == 2 * len(DIRECTIONS)
    for row in rows:
        assert row["wrong"] is None
        assert 0 < row["best_ms"] <= row["eager_ms"]
        assert 0 < row["empty_ms"] < row["ours_ms"]
        assert row["kernel"] and row["gpu"] and row["driver"] and row["cudnn"]
        assert row["settings"].count("benchmark on") >= 2
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32) == flags


def test_sweep(bench):
    rows = bench("--sweep")
    target = Target.for_device(torch.cuda.current_device())
    problem = Layer.parse("32,16,4,2,1,bias=no", "3x17x19").problem("forward")
    able = [c for c in candidates(problem, target) if c.refusal is None]
    first = [row for row in rows if row["layer"].startswith("32,16")]
    assert [(row["kernel"], row["tile"]) for row in first] == [(c.stem, str(c.tile)) for c in able]
    assert all(row["kernel_ms"] > 0 and row["wrong"] is None for row in rows)
    assert sum(row["chosen"] for row in first) == 1


def test_the_cache_is_cold():
    """A read that fits the L2 cache is slower after the flush than in a loop."""
    values = torch.randn(1 << 22, device="cuda")  # 16 MB
    cold = timing.CudaTimer().time([values.sum], 30)[0].median
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)
    start.record()
    for _ in range(30):
        values.sum()
    end.record()
    torch.cuda.synchronize()
    assert cold > 1.1 * start.elapsed_time(end) / 30


def test_the_host_is_hidden():
    """A call that keeps the host busy for longer than the flush takes is timed as the GPU's."""
    value = torch.zeros(1, device="cuda")

    def call():
        until = time.perf_counter() + 80e-6
        while time.perf_counter() < until:
            pass
        value.add_(1)

    assert timing.CudaTimer().time([call], 30)[0].median < 0.02


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("TCONV_CACHE_DIR", str(tmp_path))
    tuning.forget()
    yield tmp_path
    tuning.forget()


def operands(channels=32):
    x = torch.randn(4, channels, 33, 32, device="cuda")
    w = torch.randn(channels, 16, 4, 4, device="cuda")
    return x, w


def close(a, b):
    return float((a - b).norm() / b.norm()) < 2e-3  # TF32


@pytest.mark.parametrize("way", ["context", "cudnn.benchmark"])
def test_autotune_chooses_and_keeps(fresh, monkeypatch, way):
    x, w = (tensor.requires_grad_() for tensor in operands())
    if way == "context":
        with tconv.autotune():
            out = tconv.conv_transpose2d(x, w, stride=2)
            out.sum().backward()  # in a thread of autograd's own
    else:
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
        out = tconv.conv_transpose2d(x, w, stride=2)
        out.sum().backward()
    entries = list(fresh.glob(f"{tuning.KEY_PREFIX}*.tconv"))
    assert {path.name.split("-")[1] for path in entries} == set(DIRECTIONS)
    want = [t.detach().requires_grad_() for t in (x, w)]
    expected = F.conv_transpose2d(*want, stride=2)
    expected.sum().backward()
    assert close(out, expected)
    assert all(close(a.grad, b.grad) for a, b in zip((x, w), want, strict=True))


def test_nothing_is_timed_while_a_graph_is_captured(fresh):
    x, w = operands(channels=48)
    tconv.conv_transpose2d(x, w, stride=2)  # compiled and loaded, not tuned
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with tconv.autotune(), torch.cuda.graph(graph):
        out = tconv.conv_transpose2d(x, w, stride=2)
    assert not list(fresh.glob(f"{tuning.KEY_PREFIX}*"))
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert close(out, F.conv_transpose2d(x, w, stride=2))
