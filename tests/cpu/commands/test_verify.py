"""`tconv verify`: it passes what is right, and fails what is wrong, with exit code 1."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F

from tconv import cli, reference, verify
from tconv.errors import MissingDependencyError
from tconv.jit.target import Target
from tconv.layers import DIRECTIONS, Layer
from tconv.plan import plan
from tconv.reference import MAPS, expected, operands, random_layers

SMALL = ("--layer", "5,4,3,2,1", "--input", "2x4x5")


def verified(capsys, *arguments, code=0):
    got = cli.main(["verify", *arguments])
    captured = capsys.readouterr()
    assert got == code, captured
    return captured.out


def test_on_the_emulator(capsys):
    text = verified(capsys, *SMALL, "--device", "emulator", "--layout", "mixed", "--cases", "1")
    assert "in the emulator" in text
    assert "1 random layers of seed 0" in text
    for name in MAPS:
        assert name in text
    assert "results are right" in text


def test_on_the_cpu_every_dtype_and_layout(capsys):
    options = ("--device", "cpu", "--dtype", "all", "--layout", "all", "--json")
    record = json.loads(verified(capsys, *SMALL, *options))
    rows = record["results"]
    assert record["device"] == "cpu"
    assert len(rows) == 4 * 4 * 4
    assert {row["name"] for row in rows} == set(MAPS)
    assert all(row["wrong"] is None for row in rows)
    # The bias's gradient is a sum of ours, the others are PyTorch's to the bit.
    maps = [row for row in rows if row["name"] != "bias_gradient"]
    assert all(row["error"] == row["torch_error"] for row in maps)
    assert {row["kernel"] for row in rows} == {""}


ONE = ("--layer", "1d:20,18,8,4,2", "--input", "2x7")


def test_one_dimension_on_the_emulator(capsys):
    options = ("--device", "emulator", "--layout", "contiguous", "--json")
    rows = json.loads(verified(capsys, *ONE, *options))["results"]
    problems = [Layer.parse(ONE[1], ONE[3]).problem(direction) for direction in DIRECTIONS]
    planned = [plan(problem, Target.named("sm_90a")).stem for problem in problems]
    assert [row["kernel"] for row in rows] == [*planned, ""]
    assert all(row["wrong"] is None for row in rows)
    # Others are views that no plan was asked for: channels innermost, and with gaps.
    text = verified(capsys, *ONE, "--device", "emulator", "--layout", "all")
    assert "All 16 results are right" in text and "1d:20,18,8,stride=4,padding=2 on 2x7" in text


def test_one_dimension_runs_the_functions_of_one(capsys, monkeypatch):
    seen = []
    for functions in (verify.functional, F):
        honest = functions.conv_transpose1d
        monkeypatch.setattr(
            functions,
            "conv_transpose1d",
            lambda x, w, *a, honest=honest: seen.append((x.shape, w.shape)) or honest(x, w, *a),
        )
        monkeypatch.setattr(functions, "conv_transpose2d", None)
    verified(capsys, *ONE, "--device", "cpu", "--dtype", "float64")
    assert len(seen) >= 4 and set(seen) == {((2, 20, 7), (20, 18, 8))}


def test_every_fourth_random_layer_is_of_one_dimension(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(verify, "check_layer", lambda layer, **rest: seen.append(layer) or [])
    verified(capsys, "--device", "emulator", "--cases", "40", "--seed", "2")
    assert [layer.dimensions for layer in seen] == [2, 2, 2, 1] * 10
    assert len({layer.text for layer in seen}) == 40
    monkeypatch.undo()
    text = verified(capsys, "--device", "emulator", "--cases", "4", "--layout", "mixed")
    assert "random 3: 1d:" in text and re.search(r"All \d+ results are right", text)


def test_emulated_rows_name_the_kernels(capsys, tmp_path):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps([Layer.parse("5,4,3,2,1", "2x4x5").record() | {"name": "one"}]))
    options = ("--layers", str(path), "--device", "emulator", "--json")
    rows = json.loads(verified(capsys, *options))["results"]
    target = Target.named("sm_90a")
    planned = [plan(Layer.parse("5,4,3,2,1", "2x4x5").problem(d), target).stem for d in DIRECTIONS]
    assert [row["kernel"] for row in rows] == [*planned, ""]
    assert {row["layer"] for row in rows} == {"one"}


def test_large_layers_are_shrunk_for_the_emulator_and_it_is_said(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(verify, "check_layer", lambda layer, **rest: seen.append(layer) or [])
    arguments = ("--layer", "64,64,3x7", "--input", "8x512x512", "--device", "emulator")
    text = verified(capsys, *arguments)
    assert "Shrunk for the emulator: 64,64,3x7 on 8x512x512 -> " in text
    assert seen[0].kernel_size == (3, 7)
    assert seen[0].problem("forward").flops <= 2 * verify.EMULATED_PRODUCTS


@pytest.mark.parametrize(
    ("text", "input"),
    [
        ("64,64,3", "8x1024x1024"),
        ("512,256,1x16,stride=1x8,padding=0x4", "16x1x32"),
        ("1d:512,256,16,stride=8,padding=4", "16x32"),
        ("4096,2048,3,stride=2,groups=8", "1x64x64"),
        ("256,256,4,2,1,groups=256", "8x128x128"),
        ("21,21,16,8,4", "4x64x64"),
        ("8,8,2,padding=20", "1x64x64"),
    ],
)
def test_shrunk_keeps_the_geometry(text, input):
    layer = Layer.parse(text, input)
    small = verify.shrunk(layer)
    assert small.geometry[:4] == layer.geometry[:4]
    assert small.kernel_size == layer.kernel_size
    assert small.groups == min(2, layer.groups)
    assert small.batch == min(2, layer.batch)
    assert small.problem("forward").flops <= 2 * verify.EMULATED_PRODUCTS
    assert verify.shrunk(small) == small
    for direction in ("forward", "input_gradient", "weight_gradient"):
        if min(layer.kernel_size) < 10:
            assert small.problem(direction).math == layer.problem(direction).math


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("wrong", ("off", "nan", "element", "dtype"))
def test_a_wrong_result_fails(capsys, monkeypatch, which, wrong):
    honest = verify._results

    def results(functions, layer, t):
        found = honest(functions, layer, t)
        if functions is verify.functional:
            bad = found[which].clone()
            if wrong == "off":
                bad *= 1 + 1e-5
            elif wrong == "nan":
                bad.view(-1)[-1] = float("nan")
            elif wrong == "element":
                bad.view(-1)[0] += 1e-2
            else:
                bad = bad.double()
            found[which] = bad
        return found

    monkeypatch.setattr(verify, "_results", results)
    text = verified(capsys, *SMALL, "--device", "cpu", code=1)
    assert "1 of 4 results are wrong" in text
    assert f"FAILED layer 1, float32, contiguous, {MAPS[which]}: " in text


def test_a_call_that_fails_is_a_failure_and_the_rest_goes_on(capsys, monkeypatch):
    def breaks_down(x, *arguments):
        if x.shape[1] == 5:
            raise RuntimeError("no kernel for five\nand more")
        return F.conv_transpose2d(x, *arguments)

    monkeypatch.setattr(verify.functional, "conv_transpose2d", breaks_down)
    text = verified(capsys, *SMALL, "--layer", "3,4,3", "--device", "cpu", code=1)
    assert "layer 1, float32, contiguous, call: RuntimeError: no kernel for five" in text
    assert "1 of 5 results are wrong" in text


def test_a_reference_that_does_not_fit_is_a_failure(capsys, monkeypatch):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("no room for it")

    monkeypatch.setattr(verify, "expected", full)
    text = verified(capsys, *SMALL, "--device", "cpu", code=1)
    assert "call: OutOfMemoryError: no room for it" in text


def test_where_pytorch_has_no_answer_its_columns_are_empty(capsys, monkeypatch):
    honest = verify._results

    def results(functions, layer, t):
        if functions is F:
            raise RuntimeError("not implemented for this dtype")
        return honest(functions, layer, t)

    monkeypatch.setattr(verify, "_results", results)
    rows = json.loads(verified(capsys, *SMALL, "--device", "cpu", "--json"))["results"]
    assert all(row["torch_error"] is None and row["wrong"] is None for row in rows)
    assert " - " in verified(capsys, *SMALL, "--device", "cpu")


def test_tf32_is_held_to_its_contract():
    """The bound is float32's, from operands rounded to nearest; truncation breaks it."""
    layer = Layer.parse("18,17,3", "1x5x6")
    t = operands(layer, torch.float32, "contiguous", "cpu")
    wants = expected(layer, t, tf32=True)
    x, w = (reference.round_to_tf32(a) for a in (t.x, t.w))
    assert wants[0].why_wrong(F.conv_transpose2d(x, w, t.bias)) is None
    x, w = ((a.view(torch.int32) & ~0x1FFF).view(torch.float32) for a in (t.x, t.w))
    assert "relative error" in wants[0].why_wrong(F.conv_transpose2d(x, w, t.bias))
    assert "relative error" in wants[0].why_wrong(F.conv_transpose2d(t.x, t.w, t.bias))


def test_few_channels_are_held_to_float32():
    layer = Layer.parse("15,17,2", "1x5x6")
    t = operands(layer, torch.float32, "contiguous", "cpu")
    wants = expected(layer, t, tf32=True)
    assert wants[0].why_wrong(F.conv_transpose2d(t.x, t.w, t.bias)) is None
    assert torch.equal(wants[0].exact, wants[0].contract)
    assert not torch.equal(wants[1].exact, wants[1].contract)


def test_few_channels_of_many_products_are_held_to_tf32():
    """In forward alone: the gradient of the input sums over too few channels."""
    layer = Layer.parse("8,5,4x5", "1x5x6")
    t = operands(layer, torch.float32, "contiguous", "cpu")
    wants = expected(layer, t, tf32=True)
    assert not torch.equal(wants[0].exact, wants[0].contract)
    assert torch.equal(wants[1].exact, wants[1].contract)
    x, w = (reference.round_to_tf32(a) for a in (t.x, t.w))
    assert wants[0].why_wrong(F.conv_transpose2d(x, w, t.bias)) is None


def test_the_output_alone_is_the_first_map():
    for layer in random_layers(6, seed=4, channels=24):
        t = operands(layer, torch.float32, "contiguous", "cpu")
        want, *_ = expected(layer, t, tf32=True)
        (found,) = expected(layer, t, tf32=True, output_alone=True)
        assert (found.name, found.terms, found.cuts) == (want.name, want.terms, want.cuts)
        for name in ("exact", "contract", "magnitude"):
            assert torch.equal(getattr(found, name), getattr(want, name))


def test_reference_in_parts_is_the_whole(monkeypatch):
    for layer in random_layers(6, seed=3):
        t = operands(layer, torch.float32, "contiguous", "cpu")
        whole = reference.maps(layer, t.x, t.w, t.bias, t.grad_output)
        with monkeypatch.context() as patched:
            patched.setattr(reference, "_MOST_ELEMENTS", 1)
            parts = reference.maps(layer, t.x, t.w, t.bias, t.grad_output)
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_a_shrunk_layer_runs_the_kernels_of_the_layer_it_stands_for(monkeypatch):
    """A stand-in for the planner prefers another kernel for the large layer than for the small."""
    large, small = Layer.parse("32,32,3", "4x64x64"), Layer.parse("20,20,3", "1x6x7")
    rows = verify.check_layer(small, device="emulator", like=large)
    planned = verify._kernels(large, "emulator", "float32", "contiguous", True)
    served = verify._kernels_like(small, large, "emulator", "float32", "contiguous", True)
    own = verify._kernels(small, "emulator", "float32", "contiguous", True)
    assert {row.name: row.kernel for row in rows if row.kernel} == own | served
    assert all(planned[name] == stem for name, stem in served.items())
    assert all(row.wrong is None for row in rows)
    monkeypatch.setenv("TCONV_KERNEL", "general_forward")
    assert verify._kernels_like(small, large, "emulator", "float32", "contiguous", True) == {}


def test_flags_are_as_before(capsys):
    before = torch.backends.cudnn.allow_tf32
    verified(capsys, *SMALL, "--device", "cpu", "--no-tf32")
    assert torch.backends.cudnn.allow_tf32 == before
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device_is_said(capsys):
    assert cli.main(["verify", "--device", "cuda"]) == 1
    assert "--device emulator" in capsys.readouterr().err


def test_missing_compiler_is_said(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cli.main(["verify", "--device", "emulator"]) == 1
    error = capsys.readouterr().err
    assert "no-such-compiler" in error
    assert error.count("\n") == 1


PROBLEM = """
import torch

class Model(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.up = torch.nn.ConvTranspose2d(channels, 3, 3, stride=2)
    def forward(self, x):
        return torch.relu(self.up(x))

def get_inputs():
    return [torch.rand(2, 4, 5, 6)]

def get_init_inputs():
    return [4]
"""

EXPORTED = PROBLEM.replace("class Model(", "class ModelNew(")


def exported(tmp_path, text):
    (tmp_path / "problem.py").write_text(PROBLEM)
    (tmp_path / "model_new.py").write_text(text)
    return verify.check_exported(
        tmp_path / "model_new.py", tmp_path / "problem.py", device="cpu", tf32=False
    )


def test_exported(tmp_path):
    rows = exported(tmp_path, EXPORTED)
    assert [row.name for row in rows] == ["output", "input0.grad", "up.weight.grad", "up.bias.grad"]
    assert all(row.wrong is None and row.error < 1e-6 for row in rows)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("torch.relu(self.up(x))", "torch.relu(self.up(x)) + 1e-3", "relative error"),
        ("super().__init__()", "super().__init__(); torch.rand(1)", "other weights"),
        ("self.up", "self.layer", "Missing key|Error"),
        ("relu(self.up(x))", "relu(self.up(x)).half()", "must be torch.float32"),
        ("torch.relu(self.up(x))", "torch.relu(self.up(x).detach())", "RuntimeError"),
    ],
)
def test_exported_and_wrong(tmp_path, before, after, says):
    rows = exported(tmp_path, EXPORTED.replace(before, after))
    wrong = [row.wrong for row in rows if row.wrong]
    assert wrong
    assert re.search(says, wrong[0])


@pytest.mark.parametrize(
    ("text", "says"),
    [("x = 1", "it lacks ModelNew"), ("x = ", "cannot be loaded: SyntaxError")],
)
def test_exported_file_that_is_none(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        exported(tmp_path, text)


def test_exported_on_the_command_line(capsys, monkeypatch, tmp_path):
    for name, text in (("problem.py", PROBLEM), ("model_new.py", EXPORTED)):
        (tmp_path / name).write_text(text)
    options = ["--exported", str(tmp_path / "model_new.py")]
    assert cli.main(["verify", *options]) == 2
    assert cli.main(["verify", *options, "--layer", "4,3,3", "--layer", "4,3,2"]) == 2
    options += ["--problem", str(tmp_path / "problem.py")]
    assert cli.main(["verify", *options, "--cases", "3"]) == 2
    if not torch.cuda.is_available():
        assert cli.main(["verify", *options]) == 1
        assert "runs on a GPU only" in capsys.readouterr().err
    on_cpu = verify.check_exported
    monkeypatch.setattr(
        verify, "check_exported", lambda *a, **k: on_cpu(*a, **(k | {"device": "cpu"}))
    )
    monkeypatch.setattr("tconv.cli.verify._device", lambda wished: "cuda")
    assert "All 4 results are right" in verified(capsys, *options)


def test_missing_dependency_is_no_failed_check(monkeypatch):
    def missing(*arguments):
        raise MissingDependencyError("no NVRTC")

    monkeypatch.setattr(verify.functional, "conv_transpose2d", missing)
    with pytest.raises(MissingDependencyError):
        verify.check_layer(Layer.parse("2,2,2", "1x3x3"), device="cpu")


def test_what_is_finished_is_shown_on_an_interruption(capsys, monkeypatch):
    honest, seen = verify.check_layer, []

    def check(layer, **options):
        if seen:
            raise KeyboardInterrupt
        seen.append(layer)
        return honest(layer, **options)

    monkeypatch.setattr(verify, "check_layer", check)
    layers = ("--layer", "5,4,3", "--layer", "6,4,3", "--device", "cpu")
    text = verified(capsys, *layers, code=130)
    assert "Interrupted after 1 of 2" in text
    assert "layer 1" in text and "layer 2  " not in text
    assert f"All {len(MAPS)} results are right" in text


@pytest.mark.parametrize(("option", "explained"), [((), True), (("--no-tf32",), False)])
def test_tf32_is_named_where_it_explains_an_error(capsys, option, explained):
    layer = ("--layer", "64,16,3", "--input", "1x5x6", "--device", "emulator")
    text = " ".join(verified(capsys, *layer, *option).split())
    assert ("TF32 explains these errors" in text) is explained
    assert ("--no-tf32 takes full float32" in text) is explained
