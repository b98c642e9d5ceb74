"""Exported files in one dimension: the same kernels with a height of 1, on views of the tensors."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from exported import KERNELBENCH, load, on_emulator, planned_launches, problem
from layer_cases import Case, operands
from tconv.export import Layer, export_file
from tconv.reference import expected, poisoned_memory

ONE_DIMENSION = tuple(n for n in KERNELBENCH if "ConvTranspose1d" in problem(n).read_text())

# A vocoder's layer, one channel, one column, groups with output padding, empty phases.
CASES = (
    Case(2, 20, 18, 1, (1, 7), (1, 16), (1, 8), (0, 4)),
    Case(2, 1, 3, 1, (1, 9), (1, 4), (1, 2), (0, 1)),
    Case(2, 5, 1, 1, (1, 1), (1, 3), bias=False),
    Case(1, 3, 2, 3, (1, 8), (1, 5), (1, 3), (0, 2), (0, 2)),
    Case(1, 4, 4, 1, (1, 8), (1, 3), (1, 2), (0, 1), dilation=(1, 2)),
)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def test_kernelbench_has_three():
    assert ONE_DIMENSION == (64, 74, 79)


def small(number, folder):
    """A problem of KernelBench's with few channels and a short input."""
    text = problem(number).read_text()
    for name, value in (("batch", 2), ("length", 44), ("in_channels", 32), ("out_channels", 24)):
        text, count = re.subn(rf"^{name} = \d+$", f"{name} = {value}", text, flags=re.MULTILINE)
        assert count == 1
    path = folder / f"small_{number}.py"
    path.write_text(text)
    return path


def axes(value):
    """The width's number of each pair of a geometry, and the groups."""
    *pairs, groups = value
    assert all(height == one for (height, _), one in zip(pairs, (1, 0, 0, 1), strict=True))
    return [width for _, width in pairs] + [groups]


def assert_right(module, case, t, *, tf32=False):
    """Output and gradients of 3-d tensors, within the numerics contract."""
    x, w = (value.squeeze(2).detach().requires_grad_() for value in (t.x, t.w))
    bias = None if t.bias is None else t.bias.detach().requires_grad_()
    stride, padding, output_padding, dilation, groups = axes(case.geometry)
    with poisoned_memory():
        y = module.transposed_convolution_1d(
            x, w, bias, stride, padding, (output_padding,), groups, dilation
        )
        y.backward(t.grad_output.squeeze(2))
    assert y.is_contiguous()
    assert x.grad.stride() == x.stride() and w.grad.stride() == w.stride()
    for got, want in zip((y.detach(), x.grad, w.grad), expected(case.layer, t, tf32=tf32)[:3],
                         strict=True):  # fmt: skip
        wrong = want.why_wrong(got.unsqueeze(2))
        assert wrong is None, f"{want.name}: {case}: {wrong}"


@pytest.mark.parametrize("number", ONE_DIMENSION)
def test_kernelbench_problems_run_the_planned_kernels(number, tmp_path):
    given = small(number, tmp_path)
    report = export_file(given, None, tmp_path / "model_new.py")
    assert len(report.plans) == 3 and not report.notes
    made, problem_module = load(tmp_path / "model_new.py"), load(given)
    arguments = problem_module.get_init_inputs()
    model, new = problem_module.Model(*arguments).double(), made.ModelNew(*arguments)
    model.load_state_dict(new.state_dict(), strict=True)
    (x,) = problem_module.get_inputs()
    x.requires_grad_()
    wide = x.detach().double().requires_grad_()
    with on_emulator(made) as extension:
        got = new(x)
        every = [x, *new.parameters()]
        gradients = torch.autograd.grad(got, every, torch.ones_like(got), retain_graph=True)
        launched = list(extension.launched)
        # Of strides of zero, which no plan is made for.
        expanded = torch.autograd.grad(got.sum(), every)
    assert launched == [launch.name for launch in planned_launches(made)]
    want = model(wide)
    wants = torch.autograd.grad(want.sum(), [wide, *model.parameters()])
    for one, other in zip(expanded, wants, strict=True):
        assert (one.double() - other).norm() <= 1e-3 * other.norm()
    assert got.shape == want.shape and got.is_contiguous()
    for one, other in zip((got, *gradients), (want, *wants), strict=True):
        assert (one.double() - other).norm() <= 1e-3 * other.norm()


def test_a_layer_given_by_its_parameters(tmp_path):
    layer = Layer(6, 4, (1, 4), (1, 2), (0, 1), (0, 1), 2, False, (1, 3), 3, (1, 9), dimensions=1)
    export_file(None, layer, tmp_path / "model_new.py")
    made = load(tmp_path / "model_new.py")
    assert made.get_init_inputs() == [6, 4, (4,), (2,), (1,), (1,), 2, False, (3,)]
    (x,) = made.get_inputs()
    assert x.shape == (3, 6, 9)
    new = made.ModelNew(*made.get_init_inputs())
    theirs = torch.nn.ConvTranspose1d(*made.get_init_inputs())
    theirs.weight = new.conv_transpose1d.weight
    with on_emulator(made) as extension, torch.no_grad():
        torch.testing.assert_close(new(x), theirs(x))
    assert extension.launched == [launch.name for launch in made.PLANNED_CALLS[0].launches]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_general_kernels(case, module, full_float32):
    dtype = DTYPES[CASES.index(case) % 4]
    with on_emulator(module) as extension:
        assert_right(module, case, operands(case, dtype, "contiguous", "cpu"))
    assert [name.startswith("any_") for name in extension.launched] == [True] * 3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_channels_innermost_are_read_where_they_lie(case, module, full_float32, monkeypatch):
    """[N, L, C] transposed; two dimensions would take it for channels_last."""
    stride, padding, output_padding, dilation, groups = axes(case.geometry)
    t = operands(case, torch.float32, "contiguous", "cpu")
    x, w, y = (
        value.squeeze(2).transpose(1, 2).contiguous().transpose(1, 2)
        for value in (t.x, t.w, t.grad_output)
    )
    read = []
    launch = module.launch_kernel
    monkeypatch.setattr(
        module, "launch_kernel", lambda *a: (read.append(a[4]["source"]), launch(*a))
    )
    with on_emulator(module), torch.no_grad():
        got = module.transposed_convolution_1d(
            x, w, t.bias, stride, padding, output_padding, groups, dilation
        )
    assert read == [x.data_ptr()] and got.is_contiguous()
    (want,) = expected(case.layer, t, output_alone=True)
    assert want.why_wrong(got.unsqueeze(2)) is None
    monkeypatch.undo()
    x, w = (value.detach().requires_grad_() for value in (x, w))
    with on_emulator(module):
        module.transposed_convolution_1d(
            x, w, t.bias, stride, padding, output_padding, groups, dilation
        ).backward(y)
    for grad, of, wanted in zip((x.grad, w.grad), (x, w), expected(case.layer, t)[1:3],
                                strict=True):  # fmt: skip
        assert wanted.why_wrong(grad.unsqueeze(2)) is None
        assert grad.shape == of.shape


def test_the_layer_is_pytorchs(module):
    arguments = (6, 4, 3, 2, 1, 1, 2, True, 2)
    torch.manual_seed(0)
    theirs = torch.nn.ConvTranspose1d(*arguments, dtype=torch.float64)
    torch.manual_seed(0)
    ours = module.TransposedConvolution1d(*arguments, dtype=torch.float64)
    assert ours.extra_repr() == theirs.extra_repr()
    for (name, value), (other, want) in zip(
        ours.state_dict().items(), theirs.state_dict().items(), strict=True
    ):
        assert name == other and torch.equal(value, want)
    x = torch.randn(2, 6, 5, dtype=torch.float64)
    with on_emulator(module):
        for given in ((x,), (x[0],), (x[:0],), (x, [11]), (x, [2, 4, 12]), (x[0], [12])):
            torch.testing.assert_close(ours(*given), theirs(*given))
    for wrong in ([10], [13], [1, 2]):
        with pytest.raises(ValueError) as expected_error:
            theirs(x, wrong)
        with pytest.raises(ValueError, match=re.escape(str(expected_error.value))):
            ours(x, wrong)
    for layer in (torch.nn.ConvTranspose1d, module.TransposedConvolution1d):
        with pytest.raises(ValueError, match=r"^Only .zeros. padding mode .* ConvTranspose1d$"):
            layer(4, 3, 3, padding_mode="reflect")


def test_second_derivatives(module):
    x, w = torch.randn(2, 4, 3), torch.randn(4, 2, 3)
    results = []
    for function in (module.transposed_convolution_1d, F.conv_transpose1d):
        leaves = [value.double().requires_grad_() for value in (x, w)]
        with on_emulator(module):
            output = function(*leaves, None, 2, 1)
            first = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
            results.append(torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves))
    torch.testing.assert_close(*results)


def test_raises_what_pytorch_raises(module):
    x, w = torch.randn(2, 4, 6), torch.randn(4, 3, 3)
    with on_emulator(module):
        for arguments in (
            (x[:, :3], w),
            (x[0, 0], w),
            (x[None], w),
            (x, w[None]),
            (x, w, torch.randn(4)),
            (x, w, None, 1, 0, 1),
            (x, w, None, 1, -1),
            (x, w, None, 0),
            (x, w, None, (1, 2)),
            (x[:, :, :0], w),
        ):
            with pytest.raises(RuntimeError) as theirs:
                F.conv_transpose1d(*arguments)
            with pytest.raises(RuntimeError) as ours:
                module.transposed_convolution_1d(*arguments)
            assert str(ours.value) == str(theirs.value)
