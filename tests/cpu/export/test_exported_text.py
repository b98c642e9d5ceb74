"""An exported file as text: what it imports, what it says, what KernelBench's checks would say."""

from __future__ import annotations

import ast
import inspect
import re
import sys

import pytest
import torch

from exported import KERNELBENCH, PROBLEMS, load, problem
from tconv.export.static_checks import check_text

FILES = (*KERNELBENCH, "layer", "decoder_block")


@pytest.mark.parametrize("name", (*KERNELBENCH, "layer"))
def test_kernelbench_static_checks_have_nothing_to_say(name, exported_files):
    assert check_text(exported_files[name].read_text()) == []


def test_operators_around_the_layer_are_warned_of_and_kept(exported_files):
    findings = check_text(exported_files["decoder_block"].read_text())
    assert not any(finding.refused for finding in findings)
    assert [finding.rule for finding in findings] == ["a function of torch.nn.functional"]


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("try:", True),
        ("except ValueError:", True),
        ('    """all, except one"""', True),
        ("    pass", True),
        ("int pass = 0;", True),
        ("import threading", True),
        ("class Lazy(torch.Tensor):", True),
        ("torch.cuda.synchronize = print", True),
        ("torch.nn.ConvTranspose2d(1, 1, 1)", False),
        ("torch.conv_transpose2d(x, w)", False),
        ("F.conv_transpose2d(x, w)", False),
        ("s = torch.cuda.Stream()", False),
        ("x.half()", False),
    ],
)
def test_static_checks_find(line, refused):
    sound = '__global__ load_inline bypass passed pass_rows torch.nn.Parameter("x")'
    assert check_text(f"{sound}\n# {line}\n") == []
    (finding,) = check_text(f"{sound}\n{line}\n")
    assert (finding.line, finding.refused) == (2, refused)


@pytest.mark.parametrize("name", FILES)
def test_one_file_for_old_pythons_that_imports_torch_alone(name, exported_files):
    text = exported_files[name].read_text()
    tree = ast.parse(text, feature_version=(3, 7))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
        assert not isinstance(node, (ast.Try, ast.Pass))
    assert imported - set(sys.stdlib_module_names) == {"torch"}
    assert not re.search(r"\btconv\.|import tconv|/work/|/home/", text)
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", (*KERNELBENCH, "decoder_block"))
def test_signatures_weights_and_random_numbers_are_the_models(name, exported_files):
    given = load(problem(name) if name in KERNELBENCH else PROBLEMS / f"{name}.py")
    made = load(exported_files[name])
    for method in ("__init__", "forward"):
        theirs, ours = (getattr(c, method) for c in (given.Model, made.ModelNew))
        assert str(inspect.signature(theirs)) == str(inspect.signature(ours))
    torch.manual_seed(3)
    model = given.Model(*given.get_init_inputs())
    after = torch.random.get_rng_state()
    torch.manual_seed(3)
    new = made.ModelNew(*made.get_init_inputs())
    assert torch.equal(after, torch.random.get_rng_state())
    state, own = model.state_dict(), new.state_dict()
    assert list(state) == list(own)
    assert all(torch.equal(state[key], own[key]) for key in state)
    new.load_state_dict(state, strict=True)


@pytest.mark.parametrize("bias", (True, False))
def test_the_layer_takes_and_shows_what_pytorchs_does(bias, module):
    arguments = (6, 4, (3, 2), (2, 3), (1, 0), (1, 2), 2, bias, (2, 1), "zeros")
    torch.manual_seed(0)
    theirs = torch.nn.ConvTranspose2d(*arguments, dtype=torch.float64)
    torch.manual_seed(0)
    ours = module.TransposedConvolution(*arguments, dtype=torch.float64)
    assert torch.equal(theirs.weight, ours.weight)
    assert bias == (ours.bias is not None) and (not bias or torch.equal(theirs.bias, ours.bias))
    assert theirs.extra_repr() == ours.extra_repr()
    assert list(inspect.signature(type(theirs)).parameters) == list(
        inspect.signature(type(ours)).parameters
    )
    for wrong in ((6, 4, 3, 1, 0, 0, 5), (6, 4, 3, 1, 0, 0, 0)):
        with pytest.raises(ValueError) as expected:
            torch.nn.ConvTranspose2d(*wrong)
        with pytest.raises(ValueError, match=str(expected.value)):
            module.TransposedConvolution(*wrong)


def test_kernelbench_can_execute_it_after_the_problem(exported_files):
    # Its evaluation does so: both texts in one namespace without a file, with lines put first.
    context: dict = {}
    exec(problem(75).read_text(), context)
    text = exported_files[75].read_text()
    exec("import os\nos.environ['SOME_FOLDER'] = '.'\n" + text, context)
    assert context["ModelNew"](*context["get_init_inputs"]())


@pytest.mark.parametrize(
    ("torch_version", "cuda", "flags", "headers"),
    [("1.13.1", "11.8", ["-std=c++17"], False), ("2.13.0+cu130", "13.0", [], True)],
)
def test_how_it_is_compiled(torch_version, cuda, flags, headers, exported_files, monkeypatch):
    module = load(exported_files["layer"])
    seen = {}

    def old(name, cpp_sources, cuda_sources, functions, extra_cflags, extra_cuda_cflags,
            with_pytorch_error_handling):  # fmt: skip
        seen.update(locals())
        return "compiled"

    def new(name, cpp_sources, cuda_sources, functions, extra_cflags, extra_cuda_cflags,
            with_pytorch_error_handling, no_implicit_headers=False):  # fmt: skip
        seen.update(locals())
        return "compiled"

    monkeypatch.setattr(module, "load_inline", new if headers else old)
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert module.load_kernels() == "compiled" and module.load_kernels() == "compiled"
    assert seen["functions"] == ["launch"]
    assert seen["extra_cflags"] == ["-O2", *flags]
    assert seen.get("no_implicit_headers", False) == headers
    # PyTorch leaves its own architectures out where a flag has "arch" in it; the name is one.
    assert "arch" not in seen["name"] and len(seen["name"]) < 60
    assert "__global__" in seen["cuda_sources"] and "PYBIND11_MODULE" not in seen["cpp_sources"]


def test_specific_instructions_are_compiled_for_where_the_toolkit_knows_them(module, monkeypatch):
    class Planned:
        capabilities = ((9, 0),)
        specific = True

    monkeypatch.setattr(module, "PLANNED_CALLS", [Planned()])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    capabilities = [(9, 0), (8, 0), (9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    monkeypatch.setattr(torch.version, "cuda", "12.1")
    assert module.architecture_flags() == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    assert module.architecture_flags() == []
