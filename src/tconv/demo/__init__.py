"""The demonstration: a photograph through two real up-sampling heads, beside PyTorch.

`python -m tconv demo` builds an FCN-8s head and a U-Net from `torch.nn` modules, converts them
with `tconv.convert`, and shows that pictures and gradients are PyTorch's within the numerics
contract. `tconv.demo.show.run` is the whole of it, top to bottom.
"""
