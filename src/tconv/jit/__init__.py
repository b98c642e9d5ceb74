"""Compiles a kernel's source with NVRTC, caches it on disk, loads it and launches it.

    target.py         what the planner needs to know of a GPU
    compile.py        KernelSource -> cubin, with its resources
    nvrtc_process.py  NVRTC in a process of its own
    cache.py          the disk cache, shared with the emulator
    files.py          files and folders that no other user can change
    module.py         a cubin loaded on one device, and its launch
    runtime.py        KernelSource -> loaded Kernel, cached in memory
    tensor_map.py     descriptors for the bulk tensor copy engine
    libraries.py      NVRTC and the driver, loaded at first use

Importing this package imports none of CUDA's libraries and opens no file.
"""
