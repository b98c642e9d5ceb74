"""KernelBench's static checks for the CUDA backend: what they refuse or warn of, as far as needed.

They read a file's text, docstrings and strings included, after cutting each line at `#` and `//`.
This module is written from their rules. To be sure, run KernelBench's own checks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line that breaks a rule.

    Attributes:
        line: its number, from 1.
        rule: what the rule says.
        refused: whether the checks refuse the file; otherwise they warn.
    """

    line: int
    rule: str
    refused: bool

    def __str__(self) -> str:
        return f"line {self.line}: {self.rule}"


_REFUSED = {
    "the word try with a colon, or except: a fall-back": r"\btry\s*:|\bexcept(\s*:|\s+\w)",
    "the word pass: an inherited implementation": r"\bpass\b",
    "threads or processes": r"\bthreading\b|\bmultiprocessing\b|concurrent\.futures"
    r"|(Thread|Process)PoolExecutor",
    "a tensor subclass": r"_make_subclass|\bclass\s+\w+.*\((torch\.)?Tensor\)"
    r"|torch\.Tensor\.__new__",
    "a timing function that is replaced": r"torch\.cuda\.(Event(\.record|\.elapsed_time)?"
    r"|synchronize)\s*=|\btime\.(perf_counter|time)\s*=",
}
_WARNED = {
    "a compute layer of torch.nn": r"torch\.nn\.(?!(Module|parameter|Parameter|ParameterList"
    r"|ParameterDict|ModuleList|ModuleDict|init)\b)",
    "a function of torch.nn.functional": r"\bnn\.functional\.\w|\bF\.(conv|linear|relu|gelu|softmax"
    r"|batch_norm|layer_norm|dropout|max_pool|avg_pool)",
    "an operator of torch": r"\btorch\.(mm|bmm|matmul|einsum|linear|conv(_transpose)?[123]?d?"
    r"|(adaptive_)?(avg|max)_pool[123]d|relu|hardtanh|elu|selu|leaky_relu|gelu|softsign|softplus"
    r"|(log_)?softmax|tanh|sigmoid|hardsigmoid|silu|mish|(batch|group|layer|instance|rms)_norm"
    r"|normalize|cross_entropy|kl_div|(mse|huber|triplet_margin)_loss|cosine_similarity"
    r"|logsumexp|clamp|dropout)(\s*\(|\s|$)",
    "a stream": r"\bcuda\.Stream\s*\(|with\s+torch\.cuda\.stream|\.(wait|record)_stream\s*\(",
    "a conversion to float16": r"__float2half(_rn)?\s*\(|\(\s*__half\s*\)\s*[\w\->.]"
    r"|static_cast\s*<\s*(__half|half)\s*>|\.half\s*\(|\.float16\s*\("
    r"|\.to\s*\(\s*(dtype\s*=\s*)?torch\.(float16|half)\b",
}


def check_text(text: str) -> list[Finding]:
    """All findings in a file's text, in order; none for a clean file.

    A file without `__global__` or without `load_inline` is refused too, at line 1.
    """
    findings = []
    lines = [re.split(r"#|//", line, maxsplit=1)[0] for line in text.split("\n")]
    for number, line in enumerate(lines, 1):
        for rules, refused in ((_REFUSED, True), (_WARNED, False)):
            for rule, pattern in rules.items():
                if re.search(pattern, line):
                    findings.append(Finding(number, rule, refused))
    cut = "\n".join(lines)
    for needed in ("__global__", "load_inline"):
        if needed not in cut:
            findings.append(Finding(1, f"{needed} does not stand in it", True))
    return findings
