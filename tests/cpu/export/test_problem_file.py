"""What is read from a file with a `Model`, what is written in its place, what is refused."""

from __future__ import annotations

import ast
import os

import pytest
import torch

from exported import PROBLEMS, load, problem
from tconv.errors import TconvError
from tconv.export import ExportError, Layer, export_file
from tconv.export.problem_file import calls, rewrite

IMPORTS = "import torch\nimport torch.nn as nn\n"
INPUTS = """
def get_inputs():
    return [torch.rand(2, 4, 5, 6)]

def get_init_inputs():
    return []
"""


def model(layer: str, imports: str = IMPORTS, base: str = "torch.nn.Module") -> str:
    return f"""{imports}
class Model({base}):
    def __init__(self):
        super(Model, self).__init__()
        self.layer = {layer}

    def forward(self, x):
        return self.layer(x)
{INPUTS}"""


@pytest.mark.parametrize(
    ("imports", "layer"),
    [
        ("import torch\nimport torch.nn as nn\n", "nn.ConvTranspose2d(4, 3, 3)"),
        ("import torch\n", "torch.nn.ConvTranspose2d(4, 3, 3)"),
        ("import torch\nfrom torch import nn as layers\n", "layers.ConvTranspose2d(4, 3, 3)"),
        ("import torch\nfrom torch.nn import ConvTranspose2d\n", "ConvTranspose2d(4, 3, 3)"),
        ("import torch\nfrom torch.nn import ReLU, ConvTranspose2d as Up\n", "Up(4, 3, 3)"),
        ("import torch\nfrom torch.nn import *\n", "ConvTranspose2d(4, 3, 3)"),
        (
            "import torch\nimport torch.nn.modules.conv\n",
            "torch.nn.modules.conv.ConvTranspose2d(4, 3, 3)",
        ),
    ],
)
def test_the_layer_is_found_under_every_name(imports, layer):
    text = rewrite(model(layer, imports), "problem.py").text
    assert "self.layer = TransposedConvolution(4, 3, 3)" in text
    assert "super(ModelNew, self)" in text and "class ModelNew(torch.nn.Module)" in text
    assert "ConvTranspose2d" not in text.replace("from torch.nn import *", "")


@pytest.mark.parametrize(
    ("imports", "layer"),
    [
        ("import torch\nimport torch.nn as nn\n", "nn.ConvTranspose1d(4, 3, 3)"),
        ("import torch\nfrom torch.nn import ConvTranspose1d as Up\n", "Up(4, 3, 3)"),
        ("import torch\nfrom torch.nn import *\n", "ConvTranspose1d(4, 3, 3)"),
    ],
)
def test_so_is_the_layer_of_one_dimension(imports, layer):
    text = rewrite(model(layer, imports), "problem.py").text
    assert "self.layer = TransposedConvolution1d(4, 3, 3)" in text
    called = model(layer, imports).replace("self.layer(x)", "torch.conv_transpose1d(x, x)")
    assert "return transposed_convolution_1d(x, x)" in rewrite(called, "problem.py").text


def test_the_rest_stays_as_it_was():
    source = (PROBLEMS / "decoder_block.py").read_text()
    text = rewrite(source, "problem.py").text
    changed = [
        (old, new)
        for old, new in zip(source.splitlines(), text.splitlines(), strict=True)
        if old != new
    ]
    assert len(changed) == 3  # the class, the layer, the function


def test_columns_count_bytes():
    text = model("nn.Sequential(nn.ConvTranspose2d(4, 3, 3))").replace(
        "self.layer = ", "ü = 'äöü€𝄞'; self.layer = "
    )
    assert (
        "ü = 'äöü€𝄞'; self.layer = nn.Sequential(TransposedConvolution(4, 3, 3))"
        in rewrite(text, "problem.py").text
    )


def test_the_layers_parameters_are_read_without_data():
    (call,) = calls(problem(75).read_text(), "problem.py")
    assert call.input_shape == (16, 32, 128, 256) and call.weight_shape == (32, 16, 3, 5)
    assert (call.stride, call.padding, call.dilation) == ((2, 3), (1, 2), (2, 1))
    assert call.groups == 4 and not call.bias
    (call,) = calls(problem(79).read_text(), "problem.py")
    assert call.input_shape == (16, 32, 1, 131072) and call.weight_shape == (32, 64, 1, 3)
    assert (call.stride, call.padding, call.dilation) == ((1, 2), (0, 1), (1, 2))
    layer, function = calls((PROBLEMS / "decoder_block.py").read_text(), "problem.py")
    assert layer.bias and layer.stride == (2, 2)
    assert not function.bias and function.groups == 4


def test_a_model_that_looks_at_its_data_runs_on_the_cpu():
    text = model("nn.ConvTranspose2d(4, 3, 3)").replace("(x)\n", "(x if x.sum() > 0 else -x)\n")
    (call,) = calls(text, "problem.py")
    assert call.input_shape == (2, 4, 5, 6)


REFUSED = [
    ("x = 1\n", "has no class Model"),
    ("class Model(:\n", "line 1: invalid syntax"),
    (model("nn.Conv2d(4, 3, 3)"), "has no ConvTranspose1d or ConvTranspose2d"),
    (model("nn.ConvTranspose3d(4, 3, 3)"), "or ConvTranspose2d, only ConvTranspose3d"),
    (model("nn.LazyConvTranspose1d(3, 3)"), "write it as a ConvTranspose1d"),
    (model("nn.LazyConvTranspose2d(3, 3)"), "write it as a ConvTranspose2d"),
    (model("nn.ConvTranspose2d(4, 3, 3)") + "ModelNew = Model\n", "has a ModelNew already"),
    (
        model("nn.ConvTranspose2d(4, 3, 3, padding_mode='reflect')"),
        'does not run: ValueError: Only "zeros" padding mode',
    ),
    (model("nn.ConvTranspose2d(5, 3, 3)"), "does not run: RuntimeError: Given transposed=1"),
    (
        model("nn.ConvTranspose2d(4, 3, 3, dtype=torch.complex64)").replace(
            "6)]", "6, dtype=torch.complex64)]"
        ),
        "the layer computes in complex64",
    ),
    (
        model("nn.ConvTranspose2d(4, 3, 3)").replace("get_inputs", "inputs"),
        "no function get_inputs",
    ),
    (
        model("nn.ConvTranspose2d(4, 3, 3)") + "\ndef load_kernels():\n    return 1\n",
        "binds names that the exported kernels use too, rename them: load_kernels",
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_exported_is_said_in_one_line(text, message, tmp_path):
    path, output = tmp_path / "problem.py", tmp_path / "model_new.py"
    path.write_text(text)
    with pytest.raises(ExportError) as raised:
        export_file(path, None, output)
    assert message in str(raised.value) and len(str(raised.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_or_a_layer(tmp_path):
    for given in ((None, None), (problem(57), Layer(4, 3, (3, 3)))):
        with pytest.raises(TconvError, match="a file or a layer"):
            export_file(*given, tmp_path / "model_new.py")


def test_the_report_says_what_was_planned_and_what_to_know(tmp_path):
    path = tmp_path / "problem.py"
    path.write_text(
        "from __future__ import annotations\n"
        + model("nn.ConvTranspose2d(4, 3, 3)", IMPORTS + "import numpy\n")
        + "\nclass Empty:\n    pass\n"
    )
    report = export_file(path, None, tmp_path / "model_new.py", arch="sm_80")
    text = str(report)
    assert "ModelNew from problem.py, planned for sm_80" in text
    assert len(report.plans) == 3 and "_forward" in report.plans[0]
    assert "keeps its imports of numpy" in text
    assert "`from __future__`" in text
    assert "static checks refuse line" in text and "the word pass" in text
    assert (tmp_path / "model_new.py").read_text().count("from __future__") == 1
    assert load(tmp_path / "model_new.py").ModelNew


def test_a_dtype_without_planned_kernels_is_noted(tmp_path):
    path = tmp_path / "problem.py"
    path.write_text(
        model("nn.ConvTranspose2d(4, 3, 3, dtype=torch.float64)").replace(
            "6)]", "6, dtype=torch.float64)]"
        )
    )
    report = export_file(path, None, tmp_path / "model_new.py")
    assert report.plans == () and "float64 runs the general kernels" in str(report)


@pytest.mark.parametrize(
    "name",
    [
        "problem.py",
        'it\'s "quoted".py',
        'doc"""string.py',
        "two\nraise SystemExit  # lines.py",
        "a return\rraise SystemExit.py",
        "back\\slash.py",
        "{braces}.py",
        os.fsdecode(b"no \xff unicode.py"),
    ],
    ids=ascii,
)
def test_the_given_files_name_adds_nothing_but_comments(name, tmp_path):
    texts = []
    for given in ("plain.py", name):
        (tmp_path / given).write_text(model("nn.ConvTranspose2d(4, 3, 3)") + INPUTS)
        report = export_file(tmp_path / given, None, tmp_path / "model_new.py")
        assert report.source == given
        texts.append((tmp_path / "model_new.py").read_text(encoding="utf-8"))
    assert ast.dump(ast.parse(texts[1])) == ast.dump(ast.parse(texts[0]))
    assert repr(name) in texts[1].replace("\n# ", " ")


def test_exporting_draws_no_random_numbers(tmp_path):
    before = torch.random.get_rng_state()
    export_file(problem(71), None, tmp_path / "model_new.py")
    assert torch.equal(before, torch.random.get_rng_state())
