"""NVRTC in a process of its own."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tconv.errors import CompileError
from tconv.jit import compile as compiling
from tconv.jit.compile import compile_cuda
from tconv.jit.nvrtc_process import NvrtcProcess

pytestmark = pytest.mark.usefixtures("nvrtc")


@pytest.fixture
def kernel(text_source):
    """Compiles a kernel of its own for each number, in a process."""

    def build(number, process, body="arguments.output[threadIdx.x] = {};"):
        return compile_cuda(text_source(body=body.format(number)), "sm_90a", process=process)

    return build


@pytest.fixture
def alone(monkeypatch):
    """A process that notes of each kernel whether it was left to this one."""
    found = []

    class Noted(NvrtcProcess):
        def run(self, request):
            answer = super().run(request)
            found.append(answer is None)
            return answer

    return Noted, found


def test_the_cubin_is_the_same(kernel, alone, monkeypatch):
    made, in_this_process = alone
    with made() as process:
        first, second = kernel(1, process), kernel(2, process)
        number = process._process.pid
    assert in_this_process == [False, False]
    assert not os.path.exists(f"/proc/{number}"), "it has ended"
    monkeypatch.setattr("tconv.jit.cache._caches", {})
    compiling.default_cache().clear()
    here = kernel(1, None)
    assert not here.cached and first.cubin == here.cubin != second.cubin
    assert first.resources == here.resources


def test_nothing_starts_for_what_is_in_the_cache(kernel):
    kernel(1, None)
    with NvrtcProcess() as process:
        assert kernel(1, process).cached
        assert process._process is None and not process._started


def test_an_error_is_raised_as_without_it(kernel, alone):
    made, in_this_process = alone
    with made() as process:
        with pytest.raises(CompileError, match="tiny did not compile for sm_90a") as caught:
            kernel(1, process, "none();")
        assert 'identifier "none" is undefined' in str(caught.value)
        kernel(1, process)
    assert in_this_process == [True, False]


def test_a_process_that_is_killed_is_done_without(kernel, alone):
    made, in_this_process = alone
    with made() as process:
        kernel(1, process)
        os.kill(process._process.pid, signal.SIGKILL)
        assert kernel(2, process).cubin and kernel(3, process).cubin
    assert in_this_process == [False, True, True]


def test_a_process_that_does_not_start_is_done_without(kernel, alone, monkeypatch, tmp_path):
    made, in_this_process = alone
    ends, waits = tmp_path / "python-ends", tmp_path / "waits"
    for path, text in ((ends, "exit 1"), (waits, "sleep 100")):
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)
    for executable in (str(tmp_path / "python"), str(ends), str(waits), "", None):
        monkeypatch.setattr(sys, "executable", executable)
        with made() as process:
            kernel(len(in_this_process), process)
    assert in_this_process == [True] * 5


def test_another_nvrtc_is_not_asked(kernel, alone, monkeypatch):
    monkeypatch.setattr(compiling, "nvrtc_build", lambda: "another")
    made, in_this_process = alone
    with made() as process:
        kernel(1, process)
    assert in_this_process == [True]
