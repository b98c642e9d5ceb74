"""Compile a kernel's source with NVRTC, keep it on disk, load it and launch it.

    target.py      what the planner needs to know of a GPU
    compile.py     KernelSource -> cubin, with its resources
    cache.py       the disk cache, shared with the emulator
    files.py       files and folders that nobody else can have changed
    module.py      a cubin loaded on one device, and its launch
    runtime.py     KernelSource -> loaded Kernel, remembered
    tensor_map.py  descriptors for the bulk tensor copy engine
    libraries.py   NVRTC and the driver, found at first use

Importing this package imports none of CUDA's libraries and opens no file.
"""
