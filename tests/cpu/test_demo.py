"""The demonstration: its networks, its comparisons, its exit code and the pictures it writes."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console
from torch import nn

import tconv
from tconv import cli
from tconv.demo import compare, heads, picture, show

ROOT = Path(__file__).resolve().parents[2]

PICTURES = {
    "overview",
    "input",
    *(f"{head}-{what}" for head in ("fcn", "unet") for what in ("pytorch", "tconv", "difference")),
}


def run_demo(tmp_path, **options):
    console = Console(file=io.StringIO(), width=160)
    chosen = {"size": 64, "steps": 3, "device": "cpu", **options}
    code = show.run(show.Options(output=tmp_path / "out", **chosen), console)
    return code, console.file.getvalue()


@pytest.fixture
def no_emulator(monkeypatch):
    monkeypatch.setattr(show, "_emulated", lambda *arguments: None)


def test_demo_succeeds_emulator_included(tmp_path):
    code, text = run_demo(tmp_path)
    assert code == 0, text
    assert "FAILED" not in text
    assert "emulated kernels" in text
    assert "All 36 comparisons within their bounds" in text
    assert {path.stem for path in (tmp_path / "out").iterdir()} == PICTURES


def test_pictures_show_the_photograph(tmp_path, no_emulator):
    code, _ = run_demo(tmp_path, size=128, steps=60)
    assert code == 0
    given, fcn, unet = (
        np.asarray(Image.open(tmp_path / "out" / f"{name}.png"), dtype=float) / 255
        for name in ("input", "fcn-tconv", "unet-tconv")
    )
    assert given.shape == fcn.shape == unet.shape == (128, 128, 3)
    for output in (fcn, unet):
        assert np.corrcoef(given.ravel(), output.ravel())[0, 1] > 0.7


@pytest.mark.parametrize("wrong", ["output", "gradient"])
def test_a_wrong_result_fails_the_demo(tmp_path, monkeypatch, no_emulator, wrong):
    honest = compare.results

    def results(module, inputs, cotangent):
        named = honest(module, inputs, cotangent)
        if any(type(part) is tconv.ConvTranspose2d for part in module.modules()):
            name = "output" if wrong == "output" else "up8.weight.grad"
            named[name] = named[name] * (1 + 1e-4)
        return named

    monkeypatch.setattr(compare, "results", results)
    code, text = run_demo(tmp_path, steps=0)
    assert code == 1
    assert text.count("FAILED") == 2  # once for each network
    assert "2 of 18 comparisons failed" in text


def test_nan_is_no_match():
    right, wrong = torch.ones(3), torch.tensor([1, 1, float("nan")])
    assert not compare.compare("x", right, wrong, right.double(), 1.0).ok
    assert compare.compare("x", right, right, right.double(), 1e-6).ok


def test_bound_is_twice_pytorchs_error_and_never_below_the_floor():
    exact = torch.full((4,), 1.0, dtype=torch.float64)
    assert compare.compare("x", exact + 1e-3, exact, exact, 1e-6).bound == pytest.approx(2e-3)
    assert compare.compare("x", exact, exact, exact, 1e-6).bound == 1e-6


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_worst_shows_the_comparison_that_failed(bad):
    rows = [
        compare.Comparison(str(i), (), 0.0, 2.0 if i == bad else 0.9, 0.0, 1.0) for i in range(3)
    ]
    row = compare.worst("all", rows)
    assert (row.name, row.ok, row.tconv_error) == ("all", False, 2.0)


@pytest.mark.parametrize(
    ("apart", "factor"), [(4.8e-7, 2e6), (0.3, 3), (0.0999, 10), (1.0, 1), (0.0, 1)]
)
def test_difference_is_amplified_by_a_round_factor(apart, factor):
    one = torch.zeros(1, 3, 2, 2, dtype=torch.float64)
    other = one.clone()
    other[0, 0, 0, 0] = apart
    amplified, by = picture.amplified_difference(one, other)
    assert by == pytest.approx(factor)
    assert float(amplified.max()) == pytest.approx(apart * factor)


@pytest.mark.parametrize("factor", [2, 8])
@pytest.mark.parametrize("groups", [1, 3])
def test_bilinear_layer_upsamples_as_interpolate_does(factor, groups):
    layer = heads.bilinear_layer(3, factor, groups)
    x = torch.rand(2, 3, 6, 5, generator=torch.Generator().manual_seed(0))
    expected = F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)
    inside = np.s_[..., factor:-factor, factor:-factor]
    torch.testing.assert_close(layer(x)[inside], expected[inside])


def test_unet_uses_both_usual_layers():
    shapes = {
        (part.kernel_size, part.stride)
        for part in heads.UNet().modules()
        if isinstance(part, nn.ConvTranspose2d)
    }
    assert shapes == {((2, 2), (2, 2)), ((4, 4), (2, 2))}


def test_photograph_of_a_file_is_its_central_square(tmp_path):
    pixels = np.zeros((40, 100, 3), dtype=np.uint8)
    pixels[:, 30:70] = 255
    path = tmp_path / "wide.png"
    Image.fromarray(pixels).save(path)
    loaded = picture.photograph(path, 32)
    assert loaded.shape == (1, 3, 32, 32)
    assert bool((loaded == 1).all())


def test_command_line(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(show, "run", lambda options: seen.append(options) or 0)
    arguments = ["demo", "--size", "96", "--steps", "7", "--device", "cpu", "--no-tf32"]
    assert cli.main([*arguments, "--output", str(tmp_path)]) == 0
    assert seen == [
        show.Options(output=tmp_path, size=96, steps=7, device="cpu", tf32=False),
    ]
    for bad in (["demo", "--size", "100"], ["demo", "--steps", "-1"], ["nonsense"]):
        with pytest.raises(SystemExit) as raised:
            cli.main(bad)
        assert raised.value.code == 2
    assert "must be a positive multiple of 32, got 100" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device_is_said(tmp_path, capsys):
    assert cli.main(["demo", "--device", "cuda", "--output", str(tmp_path / "out")]) == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_missing_picture_is_said(tmp_path, capsys):
    code = cli.main(
        ["demo", "--picture", str(tmp_path / "none.png"), "--output", str(tmp_path / "out")]
    )
    assert code == 1
    assert "none.png" in capsys.readouterr().err


def test_demo_without_its_extra_names_the_command(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "PIL", None)
    for name in [n for n in sys.modules if n.startswith("tconv.demo.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("tconv.demo.show")
    monkeypatch.delattr("tconv.demo.picture")
    assert cli.main(["demo"]) == 1
    error = capsys.readouterr().err
    # By the packages' own names: `pip install 'tconv[demo]'` needs a release.
    assert "needs PIL: pip install pillow scikit-image\n" in error
    (extra,) = re.findall(r"^demo = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for package in re.findall(r'"([\w-]+)', extra):
        assert package in error


def test_info_lists_every_setting(monkeypatch, capsys):
    from tconv import settings

    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    for variable in settings.VARIABLES:
        assert variable.name in printed
    assert torch.__version__ in printed


def test_info_refuses_a_bad_setting(monkeypatch, capsys):
    monkeypatch.setenv("TCONV_DEBUG", "verbose")
    assert cli.main(["info"]) == 1
    assert "TCONV_DEBUG='verbose'" in capsys.readouterr().err


def test_help_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "tconv", "--help"], capture_output=True, text=True, check=True
    )
    assert "demo" in done.stdout
    assert "info" in done.stdout
