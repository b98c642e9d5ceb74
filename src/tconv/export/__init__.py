"""`tconv export`: a self-contained single-file `ModelNew` from a file with a `Model`.

    from tconv.export import ExportError, Layer, export_file

    report = export_file(Path("problem.py"), None, Path("model_new.py"))
    report = export_file(None, Layer(64, 32, (4, 4), stride=(2, 2)), Path("model_new.py"))
    print(report)

The file that it writes imports nothing but torch and the standard library. Its CUDA source is the
kernels that the plan chose for the given problem, specialised, and a general kernel for every
other layer and input; `load_inline` compiles both at the user's end.
"""

from __future__ import annotations

from tconv.export.layer import Layer
from tconv.export.problem_file import ExportError
from tconv.export.write import DEFAULT_ARCH, Report, export_file

__all__ = ["DEFAULT_ARCH", "ExportError", "Layer", "Report", "export_file"]
