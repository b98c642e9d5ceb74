"""NVRTC of several CUDA releases, each as pip installs it, called through ctypes.

The wheels of CUDA 11 and 12 share file names with each other, and the pins of torch's own CUDA
builds exclude them: so each goes to a folder of its own, at the first use, and stays there.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tconv.jit.compile import locale_kept

FOLDER = Path(__file__).resolve().parents[1] / ".pytest_cache" / "nvrtc-releases"

WHEELS = {
    "11.8": "nvidia-cuda-nvrtc-cu11==11.8.89",
    "12.1": "nvidia-cuda-nvrtc-cu12==12.1.105",
}
RELEASES = (*WHEELS, "13")


class Nvrtc:
    """One NVRTC library.

    Attributes:
        version: (major, minor).
        architectures: what it compiles for, from sm_75 on, oldest first; from CUDA 12 on with
            sm_90a beside sm_90, and so on.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = major.value, minor.value
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        known = sorted(number for number in numbers if number >= 75)
        specific = self.version >= (12, 0)
        self.architectures = tuple(
            f"sm_{number}{suffix}"
            for number in known
            for suffix in (("", "a") if specific and number >= 90 else ("",))
        )

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        assert result == 0, f"{name} answered {result}"

    def compile(self, text: str, arch: str) -> str:
        """The log; fails the test, with the log, where the text does not compile."""
        program = ctypes.c_void_p()
        encoded = text.encode()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), encoded, b"exported.cu", 0, None, None
        )
        options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17", b"--ptxas-options=-v"]
        try:
            with locale_kept():
                result = self._library.nvrtcCompileProgram(
                    program, len(options), (ctypes.c_char_p * len(options))(*options)
                )
            size = ctypes.c_size_t()
            self._call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            self._call("nvrtcGetProgramLog", program, log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))
        message = log.value.decode(errors="replace")
        assert result == 0, f"NVRTC {self.version} for {arch}:\n{message[:6000]}"
        return message


@functools.cache
def nvrtc(release: str) -> Nvrtc:
    """NVRTC of a release; skips the test, with the reason, where it cannot be installed."""
    if release in WHEELS:
        return Nvrtc(_installed(WHEELS[release]))
    try:
        files = metadata.files("nvidia-cuda-nvrtc") or []
    except metadata.PackageNotFoundError:
        pytest.skip("nvidia-cuda-nvrtc, which is CUDA 13's, is not installed")
    (path,) = (file for file in files if file.name.startswith("libnvrtc.so."))
    return Nvrtc(Path(str(path.locate())))


def _installed(wheel: str) -> Path:
    folder = FOLDER / wheel.replace("==", "-")
    library = "nvidia/cuda_nvrtc/lib/nvrtc.so"
    if not folder.is_dir():
        scratch = folder.with_name(f"{folder.name}.{id(folder)}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--target", str(scratch), wheel]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            pytest.skip(f"pip cannot install {wheel}: {last}")
        # Under a name by which tconv does not take it for the NVRTC that it uses.
        (path,) = (scratch / library).parent.glob("libnvrtc.so.*")
        path.rename(scratch / library)
        try:
            scratch.rename(folder)
        except OSError:  # another worker was first
            assert folder.is_dir()
    return folder / library
