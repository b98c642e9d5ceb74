"""Exported files at work: their Python on CPU tensors, their kernels in the emulator."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from emulated_plans import OF_16_BITS
from exported import (
    HALF,
    PROBLEMS,
    assert_right,
    export_half,
    load,
    on_emulator,
    planned_launches,
)
from layer_cases import CORNERS, LAYOUTS, Case, operands, random_cases
from tconv.export import Layer, export_file
from tconv.kernels import (
    FAMILIES,
    sm90_split_forward,
    sm90_tf32_forward,
)
from tconv.layers import DIRECTIONS
from tconv.reference import expected, poisoned_memory

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

# Layers whose planned kernels are tried, on the input planned for and on another.
PLANNED = (
    Layer(24, 20, (3, 4), stride=(2, 1), padding=(1, 1), size=(7, 9), batch=2),
    Layer(16, 32, (3, 5), (2, 3), (1, 2), groups=4, bias=False, dilation=(2, 1), size=(9, 11)),
    Layer(20, 16, (3, 3), (5, 5), (1, 1), (2, 0), dilation=(2, 2), size=(6, 5), batch=2),
    Layer(24, 3, (4, 4), (2, 2), (1, 1), size=(9, 16), batch=2),
    Layer(32, 32, (3, 3), size=(9, 37), batch=2, bias=False),
    Layer(32, 32, (3, 3), size=(9, 40), batch=2),
    Layer(24, 20, (2, 2), (2, 2), size=(7, 12), batch=2),
)


def names(module):
    """The kernels of the planned calls' launches, in order."""
    return [launch.name for launch in planned_launches(module)]


def case_of(layer, batch=None, size=None):
    """The layer as a case, on an input of the planned size or another."""
    groups = layer.groups
    return Case(
        batch or layer.batch, layer.in_channels // groups, layer.out_channels // groups, groups,
        size or layer.size, layer.kernel_size, layer.stride, layer.padding, layer.output_padding,
        layer.dilation, layer.bias,
    )  # fmt: skip


@pytest.mark.parametrize("case", CORNERS, ids=str)
def test_general_kernels_on_corners(case, module, full_float32):
    turn = CORNERS.index(case)
    dtype = (torch.float32, *DTYPES)[turn % 5]
    with on_emulator(module) as extension:
        assert_right(module, case, operands(case, dtype, LAYOUTS[turn % 4], "cpu"))
    assert [name.startswith("any_") for name in extension.launched] == [True] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_general_kernels_on_random_layers(dtype, module, full_float32):
    for seed, case in enumerate(random_cases(8, 50 + DTYPES.index(dtype))):
        with on_emulator(module, multiprocessors=1 + seed % 3):
            assert_right(module, case, operands(case, dtype, LAYOUTS[seed % 4], "cpu", seed))


def test_general_kernels_with_more_channels_and_pixels_than_a_tile(module, full_float32):
    for case in (
        Case(2, 70, 66, 1, (13, 9), (2, 3), (2, 1)),
        Case(3, 5, 9, 2, (31, 23), (3, 3), (2, 2), (1, 1), (1, 1)),
    ):
        with on_emulator(module):
            assert_right(module, case, operands(case, torch.float32, "contiguous", "cpu"))


def test_general_kernels_round_to_tf32_where_the_contract_says(module):
    for case in (
        Case(1, 16, 17, 1, (5, 6), (3, 3)),
        Case(1, 16, 15, 2, (4, 5), (4, 4), (2, 2), (1, 1)),
        Case(1, 8, 20, 1, (5, 4), (3, 3), (2, 2), (1, 1)),
    ):
        with on_emulator(module):
            assert_right(module, case, operands(case, torch.float32, "mixed", "cpu"), tf32=True)


@pytest.mark.parametrize(
    "kernel",
    (
        "", "general_forward", "sm90_tf32_forward", "sm90_tf32_flat_forward",
        "sm90_tf32_wide_forward", "sm90_tf32_overlap_forward",
    ),
)  # fmt: skip
@pytest.mark.parametrize("layer", PLANNED, ids=[f"layer{i}" for i in range(len(PLANNED))])
def test_planned_kernels(layer, kernel, tmp_path, monkeypatch):
    if kernel.startswith(("sm90", "mma")) and layer.in_channels // layer.groups < 16:
        pytest.skip(f"{kernel or 'the plan'} does not serve this layer")
    monkeypatch.setenv("TCONV_KERNEL", kernel)
    report = export_file(None, layer, tmp_path / "model_new.py")
    if kernel and any(f"TCONV_KERNEL={kernel}" in note for note in report.notes):
        pytest.skip(report.notes[0])
    assert len(report.plans) == 3 and not report.notes
    module = load(tmp_path / "model_new.py")
    planned = names(module)
    for batch, size in ((None, None), (3, None), (None, (5, 8))):
        case = case_of(layer, batch, size)
        tensors = operands(case, torch.float32, "contiguous", "cpu")
        with on_emulator(module) as extension:
            assert_right(module, case, tensors, tf32=True)
        if batch is size is None:
            assert extension.launched == planned
        else:
            assert not set(planned) & set(extension.launched)
    # Without TF32 those that use it give way; so does every one to another type.
    case = case_of(layer)
    tensors = operands(case, torch.float32, "contiguous", "cpu")
    with on_emulator(module) as extension, without_tf32():
        assert_right(module, case, tensors)
    strict = [launch.name for c in module.PLANNED_CALLS if not c.tf32 for launch in c.launches]
    assert [name for name in extension.launched if not name.startswith("any_")] == strict
    with on_emulator(module) as extension:
        assert_right(module, case, operands(case, torch.float64, "contiguous", "cpu"))
    assert not set(planned) & set(extension.launched)


# Outputs are contiguous float32 here, which `depthwise_forward` leaves to `direct_forward`.
NOT_PLANNED = (*OF_16_BITS, "depthwise_forward")


@pytest.mark.parametrize("stem", [f.STEM for f in FAMILIES if f.STEM not in NOT_PLANNED])
def test_the_launches_of_every_family_run(stem, tmp_path, monkeypatch):
    """What the file says of them is what the plan says; other sizes run the general kernels."""
    channels = 4 if stem == "direct_forward" else 32
    rows = 3 if stem == "direct_forward" or "overlap" in stem else 24
    strict = stem == "sm90_split_forward"
    layer = Layer(channels, rows, (4, 4), (2, 2), (1, 1), batch=2, size=(6, 8))
    if stem == "sm90_tf32_wide_forward":
        layer = Layer(channels, rows, (2, 2), (2, 2), batch=2, size=(6, 8))
    if stem == "mma_frames_forward":
        layer = Layer(channels, rows, (1, 40), (1, 20), batch=2, size=(6, 8))
    if stem.startswith("pointwise"):
        channels = 4 if stem == "pointwise_forward" else 32
        layer = Layer(channels, rows, (1, 1), (2, 2), batch=2, size=(6, 8))
    if stem.startswith("depthwise"):
        layer = Layer(8, 8, (4, 4), (2, 2), (1, 1), groups=8, batch=2, size=(6, 8))
    monkeypatch.setenv("TCONV_KERNEL", stem)
    if strict:
        monkeypatch.setattr("tconv.problem.float32_math", lambda *_, **__: "ieee")
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    export_file(None, layer, tmp_path / "model_new.py")
    module = load(tmp_path / "model_new.py")
    planned = names(module)
    assert stem in planned
    for batch, size in ((None, None), (1, None), (None, (5, 8))):
        case = case_of(layer, batch, size)
        tensors = operands(case, torch.float32, "contiguous", "cpu")
        with on_emulator(module) as extension:
            assert_right(module, case, tensors, tf32=not strict)
        if batch is size is None:
            assert extension.launched == planned
        else:
            assert not set(planned) & set(extension.launched)


@pytest.mark.parametrize("turn", (0, 1))
@pytest.mark.parametrize("stem", OF_16_BITS)
def test_the_launches_of_16_bit_kernels_run(stem, turn, tmp_path, monkeypatch):
    """Planned for a type that the file is run in; other types and strides run the general ones."""
    layer = (
        Layer(32, 24, (4, 4), (2, 2), (1, 1), batch=2, size=(6, 8)),
        Layer(40, 21, (3, 2), (1, 3), (1, 0), bias=False, batch=3, size=(5, 7)),
    )[turn]
    dtype = DTYPES[2 + turn]
    name = str(dtype).removeprefix("torch.")
    monkeypatch.setenv("TCONV_KERNEL", stem)
    report = export_file(None, layer, tmp_path / "model_new.py", dtype=name)
    assert len(report.plans) == 3 and not report.notes
    module = load(tmp_path / "model_new.py")
    planned = names(module)
    assert stem in planned
    case = case_of(layer)
    with on_emulator(module) as extension:
        assert_right(module, case, operands(case, dtype, "contiguous", "cpu"))
    assert extension.launched == planned
    for other, layout in ((torch.float32, "contiguous"), (dtype, "channels_last")):
        with on_emulator(module) as extension:
            assert_right(module, case, operands(case, other, layout, "cpu"), tf32=True)
        assert not set(planned) & set(extension.launched)


@pytest.mark.parametrize(("arch", "prefix"), (("sm_80", "sm80"), ("sm_90a", "sm90")))
def test_kernels_of_16_bits_are_those_of_the_gpu(arch, prefix, tmp_path):
    layer = Layer(64, 64, (4, 4), (2, 2), (1, 1), batch=8, size=(32, 32))
    report = export_file(None, layer, tmp_path / "model_new.py", arch=arch, dtype="bfloat16")
    assert [line.split()[0] for line in report.plans] == [f"{prefix}_{of}" for of in DIRECTIONS]


def test_phases_without_outputs(tmp_path):
    layer = Layer(3, 4, (2, 3), (6, 70_000), (4, 0), (3, 5), batch=2, size=(2, 1))
    export_file(None, layer, tmp_path / "model_new.py")
    module = load(tmp_path / "model_new.py")
    for size, forward in (((2, 1), "general_forward"), ((3, 1), "any_forward_narrow_float32")):
        case = case_of(layer, size=size)
        with on_emulator(module) as extension:
            assert_right(module, case, operands(case, torch.float32, "contiguous", "cpu"))
        assert extension.launched[0] == forward


@contextlib.contextmanager
def without_tf32():
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = True


def test_what_forbids_tf32(module, monkeypatch):
    assert module.tf32_allowed()
    with without_tf32():
        assert not module.tf32_allowed()
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=True):
        assert not module.tf32_allowed()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert module.tf32_allowed()  # it was loaded before
    assert not load(Path(module.__file__)).tf32_allowed()


def test_strides_that_were_not_planned_for_run_the_general_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("TCONV_KERNEL", "sm90_tf32_forward")
    layer = PLANNED[5]
    export_file(None, layer, tmp_path / "model_new.py")
    module = load(tmp_path / "model_new.py")
    planned = [launch.name for launch in module.PLANNED_CALLS[0].launches]
    general = ["any_forward_float32"]
    wide, odd = torch.randn(2, 32, 9, 48), torch.randn(2, 32, 9, 41)
    last = wide[..., :40].contiguous(memory_format=torch.channels_last)
    for x, kernels in (
        (wide[..., :40].contiguous(), planned),
        (wide[..., 4:44], planned),
        (wide[..., 1:41], general),  # its address
        (odd[..., :40], general),  # its rows
        (last, general),
        (last[:1].expand(2, -1, -1, -1), general),
    ):
        assert x.shape == (2, 32, 9, 40)
        ours = module.ModelNew(*module.get_init_inputs())
        with on_emulator(module) as extension, torch.no_grad():
            y = ours(x)
        assert extension.launched == kernels
        with torch.no_grad():
            want = F.conv_transpose2d(x.contiguous(), *ours.parameters())
        torch.testing.assert_close(y, want, rtol=1e-2, atol=1e-2)


def unusual(tensors):
    """The tensors, and some that float16 cannot hold."""
    yield tensors
    x = tensors.x.clone()
    x[-1, 3, -2, 5] = 1e5
    yield dataclasses.replace(tensors, x=x)
    for scale in (1e5, 1e-9):
        yield dataclasses.replace(tensors, w=tensors.w * scale)


@pytest.mark.parametrize("name", HALF)
def test_products_in_float16_are_repaired(name, tmp_path, monkeypatch):
    family, layer = export_half(name, tmp_path / "model_new.py", monkeypatch)
    module = load(tmp_path / "model_new.py")
    tf32 = family is not sm90_split_forward
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    planned = [launch.name for launch in module.PLANNED_CALLS[0].launches]
    stem, packing = family.STEM, getattr(family, "PACK_STEM", sm90_tf32_forward.PACK_STEM)
    # Other blocks recompute what does not fit.
    repairs = [f"{stem}_repair"] if family.STEM == "sm90_tf32_flat_forward" else []
    assert planned == [packing, stem, *repairs]
    case = case_of(layer)
    for tensors in unusual(operands(case, torch.float32, "contiguous", "cpu")):
        with on_emulator(module) as extension:
            assert_output_right(module, case, tensors, tf32=tf32)
        assert extension.launched == planned
    monkeypatch.setenv("TCONV_SANITIZE", "1")
    with on_emulator(module, schedule="random:3"):
        assert_output_right(module, case, tensors, tf32=tf32)


def assert_output_right(module, case, t, *, tf32=True):
    stride, padding, output_padding, dilation, groups = case.geometry
    with torch.no_grad(), poisoned_memory():
        y = module.transposed_convolution(
            t.x, t.w, t.bias, stride, padding, output_padding, groups, dilation
        )
    (want,) = expected(case.layer, t, tf32=tf32, output_alone=True)
    wrong = want.why_wrong(y)
    assert wrong is None, f"{case}: {wrong}"


def test_what_a_planned_call_counts_on(module):
    call = copy.copy(module.PLANNED_CALLS[0])
    layer = module.ModelNew(*module.get_init_inputs()).conv_transpose2d
    parameters = module.Parameters(layer.stride, layer.padding, (0, 0), layer.dilation, 1)
    x_shape, w_shape, y_shape = call.shapes
    dense = {
        "x": torch.empty(x_shape),
        "w": layer.weight,
        "y": torch.empty(y_shape),
        "bias": torch.empty(1),
    }

    def serves(capability=(9, 0), **operands):
        with on_emulator(module, capability=capability):
            return call.serves("forward", {**dense, **operands}, w_shape, parameters, call.tf32)

    assert call.has_bias and not (call.wide_offsets or call.x_aligned or call.specific)
    assert (8, 0) in call.capabilities and (7, 0) not in call.capabilities
    assert serves() and serves((8, 0)) and not serves((7, 0)) and not serves(bias=None)
    steps = (2**31, 2**28, 16, 1)
    assert not serves(x=torch.empty_strided(x_shape, steps, device="meta"))
    # No element is that far, but kernels are given the stride of an axis of size 1 too.
    assert not serves(bias=torch.empty_strided((1,), (2**31,)))
    odd = torch.empty(dense["y"].numel() + 1)[1:].view(y_shape)
    longer = torch.empty(*y_shape[:3], y_shape[3] + 1)[..., :-1]
    for name, y in (("y_aligned", odd), ("whole_rows", longer)):
        setattr(call, name, False)
        assert serves(y=y)
        setattr(call, name, True)
        assert serves() and not serves(y=y)
        setattr(call, name, False)
    call.specific = True
    with on_emulator(module):
        module.has_specific_instructions = lambda: False
        assert not call.serves("forward", dense, w_shape, parameters, call.tf32)


def test_a_layer_on_two_sizes_has_a_plan_for_each(tmp_path):
    given = tmp_path / "problem.py"
    given.write_text(
        "import torch\nimport torch.nn as nn\n\n\nclass Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.up = nn.ConvTranspose2d(8, 8, 3)\n\n"
        "    def forward(self, x):\n        return self.up(self.up(x))\n\n\n"
        "def get_inputs():\n    return [torch.rand(1, 8, 5, 6)]\n\n\n"
        "def get_init_inputs():\n    return []\n"
    )
    export_file(given, None, tmp_path / "model_new.py")
    module = load(tmp_path / "model_new.py")
    assert [call.direction for call in module.PLANNED_CALLS].count("forward") == 2
    theirs, ours = load(given).Model(), module.ModelNew()
    ours.load_state_dict(theirs.state_dict())
    (x,) = load(given).get_inputs()
    with on_emulator(module) as extension:
        torch.testing.assert_close(ours(x), theirs(x))
    assert not any(name.startswith("any_") for name in extension.launched)


def test_a_model_around_the_layer_trains(exported_files, full_float32):
    given, made = load(PROBLEMS / "decoder_block.py"), load(exported_files["decoder_block"])
    torch.manual_seed(0)
    model = given.Model(*given.get_init_inputs())
    new = made.ModelNew(*made.get_init_inputs())
    new.load_state_dict(model.state_dict(), strict=True)
    inputs = given.get_inputs()
    with on_emulator(made) as extension:
        for module in (model, new):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                module(*inputs).square().mean().backward()
                optimizer.step()
    assert any(name.endswith("_2") for name in extension.launched)  # one of the second layer's
    for want, got in zip(model.parameters(), new.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_derivatives_of_second_order(module):
    layer = module.TransposedConvolution(
        4, 2, (2, 1), stride=(2, 1), padding=(1, 0), groups=2, dtype=torch.float64
    )
    x = torch.randn(1, 4, 2, 2, dtype=torch.float64, requires_grad=True)
    with on_emulator(module):
        assert torch.autograd.gradgradcheck(
            lambda x, w, b: module.transposed_convolution(x, w, b, (2, 1), (1, 0), 0, 2),
            (x, layer.weight, layer.bias),
        )


def test_only_the_gradients_asked_for(module):
    layer = module.TransposedConvolution(4, 2, 3)
    x = torch.randn(1, 4, 3, 3)
    layer.weight.requires_grad_(False)
    with on_emulator(module) as extension:
        layer(x).sum().backward()
    assert len(extension.launched) == 1 and layer.bias.grad is not None


@pytest.mark.parametrize("index", range(4))
def test_a_pending_negation_is_done_before_a_kernel_reads(index, module):
    case = Case(2, 2, 3, 2, (4, 5), (3, 2), (2, 1))
    tensors = operands(case, torch.float64, "contiguous", "cpu")
    given = [tensors.x, tensors.w, tensors.bias, tensors.grad_output]
    results = []
    for _ in range(2):
        leaves = [tensor.detach().requires_grad_() for tensor in given[:3]]
        assert [t.is_neg() for t in (*leaves, given[3])].count(True) == len(results)
        with on_emulator(module):
            y = module.transposed_convolution(*leaves, (2, 1), 0, 0, 2)
            first = torch.autograd.grad(y, leaves, given[3], create_graph=True)
            second = torch.autograd.grad([g.sin().sum() for g in first[:2]], leaves[:2])
        results.append([y, *first, *second])
        given[index] = torch.complex(given[index], -given[index]).conj().imag
        assert given[index].is_neg()
    assert all(map(torch.equal, *results))


def test_memory_formats_are_pytorchs(module):
    x, w = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 3)
    last = torch.channels_last
    for a, b in ((x, w), (x.to(memory_format=last), w), (x, w.to(memory_format=last))):
        b = b.detach().requires_grad_()
        with on_emulator(module):
            y = module.transposed_convolution(a, b)
            y.backward(torch.ones_like(y))
        assert y.stride() == F.conv_transpose2d(a, b).stride()
        assert b.grad.stride() == b.stride()


def test_unbatched_and_empty_inputs(module):
    layer = module.TransposedConvolution(4, 2, 3, stride=2)
    x = torch.randn(4, 5, 6)
    with on_emulator(module) as extension:
        assert torch.equal(layer(x), layer(x.unsqueeze(0)).squeeze(0))
        launched = len(extension.launched)
        empty = torch.empty(0, 4, 5, 6, requires_grad=True)
        y = layer(empty)
        assert y.shape == (0, 2, 11, 13)
        y.sum().backward()
        assert len(extension.launched) == launched
    assert empty.grad.shape == empty.shape
    assert not layer.weight.grad.any() and not layer.bias.grad.any()


def test_autocast(module, monkeypatch):
    layer = module.TransposedConvolution(4, 2, 3)
    x = torch.randn(1, 4, 3, 3)
    with on_emulator(module), torch.autocast("cpu", dtype=torch.bfloat16):
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda: True)
        assert layer(x).dtype == torch.bfloat16
        assert layer(x.double().float()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "arguments",
    [
        ((2, 3, 6, 6), (4, 3, 3, 3)),
        ((3, 6, 6), (4, 3, 3, 3)),
        ((6, 6), (4, 3, 3, 3)),
        ((1, 1, 4, 6, 6), (4, 3, 3, 3)),
        ((2, 4, 0, 6), (4, 3, 3, 3)),
        ((2, 4, 6, 6), (4, 3, 3, 3), (4,)),
        ((2, 4, 6, 6), (4, 3, 3, 3), None, 1, 0, 1),
        ((2, 4, 6, 6), (4, 3, 3, 3), None, (2, 1), 0, (1, 1)),
        ((2, 4, 6, 6), (4, 3, 3, 3), None, 1, 0, -1),
        ((2, 4, 6, 6), (4, 3, 3, 3), None, 1, -1),
        ((2, 4, 6, 6), (4, 3, 3, 3), None, 0),
        ((2, 4, 6, 6), (4, 3, 3, 3), None, (1, 2, 3)),
        ((2, 4, 6, 6), (4, 3, 3, 3), None, 1, 0, 0, 3),
    ],
    ids=str,
)
def test_bad_input_raises_what_pytorch_raises(arguments, module):
    x, w, *rest = arguments
    bias = torch.randn(rest[0]) if rest and rest[0] is not None else None
    given = (torch.randn(x), torch.randn(w), bias, *rest[1:])
    with pytest.raises(RuntimeError) as theirs:
        F.conv_transpose2d(*given)
    with on_emulator(module), pytest.raises(RuntimeError) as ours:
        module.transposed_convolution(*given)
    assert str(ours.value) == str(theirs.value)


def test_other_bad_input(module):
    x, w = torch.randn(2, 4, 1, 1), torch.randn(4, 3, 3, 3)
    with pytest.raises(RuntimeError, match="expected an input on a CUDA device, got one on cpu"):
        module.transposed_convolution(x, w)
    with on_emulator(module):
        with pytest.raises(RuntimeError, match=r"should be the same"):
            module.transposed_convolution(x.double(), w)
        with pytest.raises(RuntimeError, match=r"no kernels for tensors of torch\.int64"):
            module.transposed_convolution(x.long(), w.long())
        with pytest.raises(RuntimeError, match="Output size is too small"):
            module.transposed_convolution(x, w, padding=3)
        for name in ("stride", "dilation"):
            with pytest.raises(RuntimeError, match=f"must be below .*{name}=.2147483648, 1"):
                module.transposed_convolution(x, w, **{name: (2**31, 1)})


def test_output_size(module):
    theirs = torch.nn.ConvTranspose2d(4, 3, 3, stride=2)
    ours = module.TransposedConvolution(4, 3, 3, stride=2)
    x = torch.randn(2, 4, 6, 6)
    with on_emulator(module):
        for size in ((13, 14), (2, 3, 14, 14)):
            assert ours(x, output_size=size).shape == theirs(x, output_size=size).shape
        assert ours(x[0], output_size=(14, 14)).shape == (3, 14, 14)
        for size in ([20, 20], [20, 20, 3]):
            with pytest.raises(ValueError) as expected:
                theirs(x, output_size=size)
            with pytest.raises(ValueError) as raised:
                ours(x, output_size=size)
            assert str(raised.value) == str(expected.value)


def test_under_sanitizers(module, full_float32, monkeypatch):
    monkeypatch.setenv("TCONV_SANITIZE", "1")
    for case in (CORNERS[4], CORNERS[7], CORNERS[8]):
        with on_emulator(module):
            assert_right(module, case, operands(case, torch.float32, "mixed", "cpu"))


@pytest.mark.parametrize("schedule", ("reverse", "random:7"))
def test_no_order_of_threads_changes_a_bit(schedule, module):
    case = Case(2, 9, 17, 1, (6, 7), (3, 3), (2, 2), (1, 1))
    results = []
    for order in ("forward", schedule):
        tensors = operands(case, torch.float32, "contiguous", "cpu")
        with on_emulator(module, schedule=order):
            x, w = tensors.x.requires_grad_(), tensors.w.requires_grad_()
            y = module.transposed_convolution(x, w, None, 2, 1)
            results.append([y, *torch.autograd.grad(y.square().sum(), (x, w))])
    assert all(map(torch.equal, *results))
