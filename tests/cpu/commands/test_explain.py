"""`tconv explain`: its drawing, its floor, its plan, and each form of its output."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
import time

import pytest
import torch
import torch.nn.functional as F

from tconv import choice, cli, disassemble, drawing, explain, plan
from tconv.bench.floors import GPUS, floor
from tconv.errors import MissingDependencyError, TconvError
from tconv.jit.compile import compile_cuda
from tconv.jit.target import Target
from tconv.kernels import sm90_split_forward, sm90_tf32_flat_forward, sm90_tf32_forward
from tconv.layers import DIRECTIONS, Layer
from tconv.plan import candidates
from tconv.problem import Axis
from tconv.reference import random_layers

LAYER = ("--layer", "64,32,4,2,1", "--input", "8x32x32")


def output_of(capsys, *arguments):
    assert cli.main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_text(capsys):
    text = output_of(capsys, *LAYER)
    for part in (
        "ConvTranspose2d(64, 32, kernel_size=(4, 4), stride=(2, 2), padding=(1, 1))",
        "8 x 32 x 64 x 64",
        "w0 at 0, w2 at 1",
        "x1 *         w0  w1  w2  w3",
        "Together 4 phases of 4 taps",
        "floor, H200",
        "registers a thread",
    ):
        assert part in text


@pytest.mark.parametrize("turn", [1, -1])
def test_the_layer_is_an_argument(capsys, turn):
    words = ((LAYER[1],), LAYER[2:], ("--arch", "sm_80"))[::turn]
    (record,) = json.loads(output_of(capsys, *itertools.chain(*words), "--json"))
    assert record["x_shape"] == [8, 64, 32, 32]
    assert (record["layer"]["out_channels"], record["arch"]) == (32, "sm_80")


def test_the_plan_comes_first_and_the_candidates_where_asked_for(capsys):
    text, listed = (
        re.sub(" +\n", "\n", output_of(capsys, *LAYER, *how)) for how in ((), ("--all",))
    )
    places = [text.index(part) for part in ("Plan\n", "Work, and the floor", "Phases\n")]
    assert places == sorted(places)
    assert "--all lists them" in text and "general_forward" not in text
    assert "general_forward" in listed and "--all lists them" not in listed
    assert listed.index("Plan\n") < listed.index("Candidates on ")


def test_sixty_columns_cut_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = output_of(capsys, *LAYER, "--all")
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert all(len(line) <= 60 for line in text.split("Phases")[0].splitlines())


LARGE = ("64,64,400", "64,64,400,7", "3,3,400,2", "64,64,31,dilation=1000")


@pytest.mark.parametrize("layer", LARGE)
def test_a_large_kernel_is_planned_soon(layer):
    """64,64,400 once took minutes, of slots that no patch could hold."""
    started = time.process_time()
    explain.explain(Layer.parse(layer), arch="sm_90a", gpu=GPUS["h200"], compile=False)
    assert time.process_time() - started < 15


def test_memory_of_a_call(capsys):
    """The tensors, and what the plan's launches share beside them."""
    arguments = ("100000000,32,4,2,1", "--input", "1x1x1", "--arch", "sm_80")
    page = " ".join(output_of(capsys, *arguments).split())
    tensors = 4 * (100_000_000 + 100_000_000 * 32 * 16 + 32 * 4)
    assert f"memory {tensors / 2**30:.1f} GiB for a call" in page

    arguments = (*LAYER, "--arch", "sm_80", "--direction", "weight_gradient")
    (record,) = json.loads(output_of(capsys, *arguments, "--json"))
    chosen = record["plan"]
    packed = 0 if chosen["packing"] is None else chosen["packing"]["elements"]
    assert chosen["splits"] > 0
    assert chosen["workspace_bytes"] == 4 * (packed + chosen["splits"] * 64 * 32 * 16)


def test_no_gpu_is_named_that_has_another_architecture(capsys, monkeypatch):
    asked = []

    def verdict(plan, gpu):
        asked.append(gpu)
        return choice.Verdict("timed", "timed")

    monkeypatch.setattr(explain, "verdict", verdict)
    pages = [output_of(capsys, *LAYER, "--arch", arch) for arch in ("sm_80", "sm_90a")]
    other, own = (" ".join(page.split()) for page in pages)
    assert asked == ["", "NVIDIA H200"]  # whose rows are looked up
    assert "by default the faster of both on an NVIDIA H200: " in own
    assert "by default the faster of both: " in other


def test_one_dimension(capsys):
    text = output_of(capsys, "--layer", "1d:64,32,4,2,1", "--input", "8x32")
    for part in (
        "ConvTranspose1d(64, 32, kernel_size=(4,), stride=(2,), padding=(1,))",
        "input   8 x 64 x 32\n",
        "weight  64 x 32 x 4\n",
        "Together 2 phases of 2 taps. Taps that reach each of the first outputs",
    ):
        assert part in text
    assert "height" not in text and "Both axes" not in text
    code = cli.main(["explain", "--layer", "1d:4,4,3", "--layout", "channels_last"])
    assert code == 1 and "no channels_last format" in capsys.readouterr().err


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_json_agrees_with_the_planner(capsys, direction):
    arguments = (*LAYER, "--arch", "sm_80", "--direction", direction, "--json")
    (record,) = json.loads(output_of(capsys, *arguments))
    layer = Layer.parse("64,32,4,2,1", "8x32x32")
    problem = layer.problem(direction)
    listed = candidates(problem, Target.named("sm_80"))
    assert [c["kernel"] for c in record["candidates"]] == [c.stem for c in listed]
    assert [c["refusal"] for c in record["candidates"]] == [c.refusal for c in listed]
    assert record["plan"]["kernel"] == listed[0].stem
    assert record["plan"]["modelled_seconds"] == listed[0].cost
    assert (record["flops"], record["bytes"]) == (problem.flops, problem.bytes)
    assert record["compiled"][0]["registers"] > 0
    assert record["compiled"][0]["arch"] == "sm_80"
    assert record["axes"]["width"]["phases"][1]["taps"] == [
        {"tap": 1, "shift": 0},
        {"tap": 3, "shift": 1},
    ]


def test_all_directions_of_a_file(tmp_path, capsys):
    path = tmp_path / "layers.json"
    records = [Layer.parse("4,4,2,2", "1x4x4").record() | {"name": name} for name in ("a1", "b1")]
    path.write_text(json.dumps(records))
    text = output_of(capsys, "--layers", str(path), "--direction", "all", "--json")
    assert [(r["layer"]["name"], r["direction"]) for r in json.loads(text)] == list(
        itertools.product(("a1", "b1"), DIRECTIONS)
    )
    text = output_of(capsys, "--layers", str(path), "--only", "b*", "--json")
    assert [r["layer"]["name"] for r in json.loads(text)] == ["b1"]


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_source_is_whole_and_compiles(capsys, arch):
    """Each kernel of the plan, with its headers in it: nothing is left to be included."""
    layer = Layer.parse("64,32,4,2,1", "8x32x32")
    chosen = explain.explain(layer, arch=arch, gpu=GPUS["h200"], compile=False).plan
    sources = explain.sources(chosen)
    text = output_of(capsys, *LAYER, "--arch", arch, "--source")
    for source in sources:
        whole = explain.whole_text(source)
        assert whole in text
        assert "#include" not in whole
        assert "static constexpr int in_channels = 64;" in whole

        class Inlined:
            stem = source.stem

            def text(self, whole=whole):
                return whole

        resources = compile_cuda(Inlined(), arch, include_dirs=()).resources
        assert resources == compile_cuda(source, arch).resources


@pytest.mark.parametrize(
    ("family", "flags", "wider"),
    ((sm90_tf32_forward, (), "TF32"), (sm90_split_forward, ("--no-tf32",), "bfloat16")),
    ids=("tf32", "strict"),
)
def test_repairs_at_a_kernels_end(capsys, monkeypatch, family, flags, wider):
    tiles = [tile for tile in family.TILES if tile.half]
    monkeypatch.setenv("TCONV_KERNEL", family.STEM)
    monkeypatch.setattr(family, "TILES", tiles)
    plan._plan.cache_clear()  # plans are kept by problem, whatever the tiles
    (record,) = json.loads(output_of(capsys, *LAYER, *flags, "--json"))
    page = " ".join(output_of(capsys, *LAYER, *flags).split())
    plan._plan.cache_clear()
    assert record["plan"]["repairs"] == []
    assert f"at its end its blocks compute in {wider} what float16 cannot hold" in page


def test_repairs(capsys, monkeypatch):
    """Launches behind the kernel's own are in every form of the output."""
    family = sm90_tf32_flat_forward
    tiles = [tile for tile in family.TILES if tile.half]
    monkeypatch.setenv("TCONV_KERNEL", family.STEM)
    monkeypatch.setattr(family, "TILES", tiles)
    plan._plan.cache_clear()  # plans are kept by problem, whatever the tiles
    monkeypatch.setattr(disassemble, "find", lambda: "/bin/true")
    monkeypatch.setattr(disassemble, "sass", lambda cubin: f"{len(cubin)} bytes")
    (record,) = json.loads(output_of(capsys, *LAYER, "--json"))
    page, source, sass = (
        output_of(capsys, *LAYER, *how) for how in ((), ("--source",), ("--sass",))
    )
    plan._plan.cache_clear()
    stems = [family.STEM]
    names = [family.STEM, family.PACK_STEM, f"{family.STEM} (repair)"]
    assert [repair["kernel"] for repair in record["plan"]["repairs"]] == stems
    assert all(repair["blocks"] > 0 < repair["threads"] for repair in record["plan"]["repairs"])
    assert [compiled["kernel"] for compiled in record["compiled"]] == names
    assert page.count("behind it") == len(stems)
    page = " ".join(page.split())
    assert "computes in TF32 what float16 cannot hold" in page
    for name in names:
        assert f"{name}, " in page
        assert f"// {name} for forward" in source
        assert f"// {name} for forward" in sass


def test_what_is_launched_before_the_kernel(capsys):
    """Its name and what it does."""
    arguments = ("--layer", "64,64,3", "--input", "8x256x256", "--arch", "sm_90a")
    page = " ".join(output_of(capsys, *arguments).split())
    assert "before it sm90_tf32_pack lays the weights out: " in page
    (record,) = json.loads(output_of(capsys, *arguments, "--json"))
    assert record["plan"]["packing"]["kernel"] == "sm90_tf32_pack"


def test_what_adds_the_sums_of_blocks_that_share_a_tile(capsys):
    arguments = ("--layer", "512,256,1x16,stride=1x8,padding=0x4,bias=no", "--input", "16x1x32")
    options = ("--direction", "input_gradient", "--dtype", "bfloat16", "--layout", "channels_last")
    page = " ".join(output_of(capsys, *arguments, *options).split())
    assert "128x64/tap/shared" in page
    assert "behind it sm90_input_gradient adds in order what blocks that share a tile" in page
    assert "sm90_input_gradient (addition)" in page


def test_sass(capsys, monkeypatch, tmp_path):
    tool = tmp_path / "cuobjdump"
    tool.write_text('#!/bin/sh\necho "code of $1: $(head -c 4 "$2" | tail -c 3)"\n')
    tool.chmod(0o755)
    monkeypatch.setattr(disassemble, "find", lambda: tool)
    assert "code of -sass: ELF" in output_of(capsys, *LAYER, "--sass")
    tool.write_text("#!/bin/sh\necho too old >&2\nexit 3\n")
    assert cli.main(["explain", *LAYER, "--sass"]) == 1
    assert "could not read the kernel: too old" in capsys.readouterr().err


def test_sass_without_a_disassembler_names_the_package(capsys, monkeypatch):
    monkeypatch.setattr(disassemble, "find", lambda: None)
    assert cli.main(["explain", *LAYER, "--sass"]) == 1
    captured = capsys.readouterr()
    assert "pip install nvidia-cuda-nvdisasm" in captured.err
    assert captured.out == ""


def test_disassembler_is_found_on_path_and_in_wheels(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(disassemble, "_wheel_folders", lambda: iter([tmp_path]))
    assert disassemble.find() is None
    (tmp_path / "nvdisasm").touch()
    assert disassemble.find() == tmp_path / "nvdisasm"
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/true" if name == "cuobjdump" else None)
    assert str(disassemble.find()) == "/bin/true"


def test_without_the_compiler_the_plan_is_shown(capsys, monkeypatch):
    def missing(*arguments):
        raise MissingDependencyError("no NVRTC here: install it")

    monkeypatch.setattr(explain, "compile_cuda", missing)
    text = output_of(capsys, *LAYER)
    assert "no NVRTC here" in text
    assert "Candidates on sm_90a: " in text
    assert cli.main(["explain", *LAYER, "--sass"]) == 1
    assert "no NVRTC here" in capsys.readouterr().err


def test_no_kernel_is_an_answer_and_exit_code_1(capsys, monkeypatch):
    monkeypatch.setenv("TCONV_KERNEL", "no_such_kernel")
    assert cli.main(["explain", *LAYER]) == 1
    assert "got 'no_such_kernel'" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["explain", *LAYER, "--source"]) == 1
    assert "got 'no_such_kernel'" in capsys.readouterr().err


def test_png(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "taps.png"
    output_of(capsys, "--layer", "4,4,3x5,stride=2x3,dilation=2x1", "--png", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    for bad, says in ((tmp_path / "no" / "a.png", "No such file"), (tmp_path / "a.xyz", "xyz")):
        assert cli.main(["explain", *LAYER, "--png", str(bad)]) == 1
        assert says in capsys.readouterr().err


def test_png_without_matplotlib_names_the_command(capsys, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["explain", *LAYER, "--png", str(tmp_path / "a.png")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "pip install matplotlib" in error


def axes(count):
    for layer in random_layers(count, seed=5):
        yield from layer.axes


def test_drawing_is_the_definition():
    """Output o = i*stride - padding + t*dilation, for every input and tap, and nothing else."""
    for axis in axes(60):
        want = sorted(
            (i * axis.stride - axis.padding + t * axis.dilation, i, t)
            for i in range(axis.size)
            for t in range(axis.kernel)
        )
        want = [triple for triple in want if 0 <= triple[0] < axis.output_size]
        got = [(o, i, t) for o in range(axis.output_size) for i, t in drawing.taps_of(axis, o)]
        assert sorted(got) == want
        assert sum(drawing.outputs_of(axis, p) for p in axis.phases) == axis.output_size


def test_axis_drawing():
    assert drawing.axis_drawing(Axis(3, 3, 2, 1, 1)) == [
        "output  y0 y1 y2 y3 y4 y5",
        "phase    1  0  1  0  1  0",
        "x0 *    w1 w2",
        "x1 *       w0 w1 w2",
        "x2 *             w0 w1 w2",
    ]


def test_drawings_stay_small():
    for axis in (Axis(1920, 31), Axis(1000, 16, 8, 4), Axis(1, 100), Axis(70, 1, 9)):
        lines = drawing.axis_drawing(axis)
        assert len(lines) < 40
        assert max(map(len, lines)) < 100


def test_pixel_drawing_counts_taps():
    for layer in random_layers(20, seed=6):
        ones = torch.ones(1, 1, *layer.size), torch.ones(1, 1, *layer.kernel_size)
        stride, padding, output_padding, dilation, _ = layer.geometry
        counts = F.conv_transpose2d(*ones, None, stride, padding, output_padding, 1, dilation)
        want = [[str(int(n)) for n in row[:16]] for row in counts[0, 0, :8]]
        assert [line.split() for line in drawing.pixel_drawing(layer)] == want


@pytest.mark.parametrize(
    ("text", "input", "tf32", "milliseconds"),
    [
        ("64,64,3,bias=no", "8x1024x1024", True, 1.648),
        ("64,64,3,bias=no", "8x1024x1024", False, 12.148),
        ("32,64,3x5,2x3,1x2,0,4,dilation=2x1,bias=no", "16x128x256", True, 0.204),
        ("64,64,4,2,1,bias=no", "1x1080x1920", True, 0.724),
    ],
)
def test_floor_is_the_published_one(text, input, tf32, milliseconds):
    problem = Layer.parse(text, input).problem("forward", tf32=tf32)
    assert floor(problem, GPUS["h200"]).seconds * 1e3 == pytest.approx(milliseconds, rel=3e-3)


def test_ceilings_cover_every_arithmetic():
    for gpu in GPUS.values():
        Target.named(gpu.arch)
        for dtype in ("float32", "float64", "float16", "bfloat16"):
            for tf32 in (True, False):
                problem = Layer.parse("64,64,3").problem("forward", dtype, tf32=tf32)
                assert floor(problem, gpu).seconds > 0


def test_disassembler_that_cannot_run(monkeypatch, tmp_path):
    monkeypatch.setattr(disassemble, "find", lambda: shutil.which("false") and _false(tmp_path))
    with pytest.raises(TconvError, match="could not read"):
        disassemble.sass(b"")


def _false(folder):
    path = folder / "nvdisasm"
    path.symlink_to(shutil.which("false"))
    return path
