"""How an exported file launches the planned kernels: one function for each kernel family.

Like `transposed_convolution.py`, text for exported files: the functions of the families that a file
holds are copied into it. Each takes the constants that `families.py` lists for its family and the
tensors of the call. It gives a list of (blocks, arguments), one for each launch in order, and the
workspace that the call returns (True where there is none); or None where the kernel cannot take the
call's sizes or strides.
"""

# For Python 3.7: no zip(strict=).
# ruff: noqa: B905

import ctypes
import functools

import torch

from tconv.export.transposed_convolution import (
    ceiling_divide,
    device_properties,
    stride_arguments,
    used_phases,
)

# ----------------------------------------------------------------------------------------------


def prepare_general_forward(constants, x, weight, bias, y, parameters):  # type: ignore[no-untyped-def]
    """Blocks and arguments of the kernel general_forward."""
    if constants["used_phases"] != used_phases(y, parameters):
        return None
    pixel_height, pixel_width = (
        (y.shape[2 + i] - 1 + parameters.padding[i]) // parameters.stride[i]
        - parameters.padding[i] // parameters.stride[i]
        + 1
        for i in (0, 1)
    )
    pixels = x.shape[0] * pixel_height * pixel_width
    tiles = constants["tiles"] * ceiling_divide(pixels, constants["block_pixels"])
    if not constants["wide"] and exceeds_int(
        pixels, tiles, largest_offset(x), largest_offset(weight), largest_offset(y)
    ):
        return None
    arguments = {
        "source": x.data_ptr(),
        "weight": weight.data_ptr(),
        "bias": 0 if bias is None else bias.data_ptr(),
        "destination": y.data_ptr(),
        "tiles": tiles,
        "pixels": pixels,
        "pixel_height": pixel_height,
        "pixel_width": pixel_width,
        "source_height": x.shape[2],
        "source_width": x.shape[3],
        "destination_height": y.shape[2],
        "destination_width": y.shape[3],
        **stride_arguments("source", "nchw", x),
        **stride_arguments("weight", ["in", "out", "h", "w"], weight),
        **stride_arguments("destination", "nchw", y),
    }
    return [(tiles, arguments)], True


def prepare_direct_forward(constants, x, weight, bias, y, parameters):  # type: ignore[no-untyped-def]
    """Blocks and arguments of the kernel direct_forward."""
    counts = [
        ceiling_divide(y.shape[2 + i], parameters.stride[i] * constants["tile"][i]) for i in (0, 1)
    ]
    return tiled_launch(constants, x, weight, bias, y, counts)


def prepare_mma_forward(constants, x, weight, bias, y, parameters):  # type: ignore[no-untyped-def]
    """Blocks and arguments of mma_forward; of clear_counts before it where rows are handed out."""
    counts = [ceiling_divide(count_pixels(y, parameters, i), constants["tile"][i]) for i in (0, 1)]
    walks_rows = constants["walks_rows"]
    # Blocks that walk down the rows write them whole, of two sectors at least.
    if walks_rows and (counts[1] > 1 or y.shape[3] < 16):
        return None
    launch = tiled_launch(constants, x, weight, bias, y, counts, walks_rows)
    if launch is None or not constants["counts"]:
        return launch
    ((blocks, arguments),), _ = launch
    counted = torch.empty(constants["counts"], dtype=torch.float32, device=x.device)
    # Tiles and blocks are as many times the rows and those that walk down them.
    rows = arguments["tiles"] / blocks
    share = max(1, int(constants["share_tenths"] * rows / 10))
    moved = 4 * (x.numel() + weight.numel() + y.numel() + (0 if bias is None else bias.numel()))
    nanoseconds = constants["asked_rows"] * moved / (constants["bytes_per_nanosecond"] * rows)
    arguments.update(share=share, period=max(1000, int(nanoseconds)), counts=counted.data_ptr())
    return [(1, {"counts": counted.data_ptr()}), (blocks, arguments)], counted


def prepare_general_input_gradient(constants, x, weight, bias, y, parameters):  # type: ignore[no-untyped-def]
    """Blocks and arguments of the kernel general_input_gradient; x is written."""
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    tiles = constants["tiles"] * ceiling_divide(pixels, constants["block_pixels"])
    if not constants["wide"] and exceeds_int(
        pixels, tiles, largest_offset(x), largest_offset(weight), largest_offset(y)
    ):
        return None
    arguments = {
        "source": y.data_ptr(),
        "weight": weight.data_ptr(),
        "destination": x.data_ptr(),
        "tiles": tiles,
        "pixels": pixels,
        "pixel_height": x.shape[2],
        "pixel_width": x.shape[3],
        "source_height": y.shape[2],
        "source_width": y.shape[3],
        **stride_arguments("source", "nchw", y),
        **stride_arguments("weight", ["in", "out", "h", "w"], weight),
        **stride_arguments("destination", "nchw", x),
    }
    return [(tiles, arguments)], True


def prepare_general_weight_gradient(constants, x, weight, bias, y, parameters):  # type: ignore[no-untyped-def]
    """Blocks, arguments and partial sums of the kernel general_weight_gradient."""
    shape, depth, tiles = constants["shape"], constants["depth"], constants["tiles"]
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    # Blocks enough for four on each multiprocessor, of 8 steps each or more, and no sum so long
    # that it loses more than cuDNN's.
    wanted = ceiling_divide(4 * device_properties(x.device.index)[0], tiles)
    wanted = max(wanted, ceiling_divide(pixels, constants["most_chain"]))
    splits = max(1, min(wanted, constants["most_splits"], pixels // (8 * depth)))
    split_pixels = ceiling_divide(pixels, splits * depth) * depth
    splits = ceiling_divide(pixels, split_pixels)
    if not constants["wide"] and exceeds_int(
        pixels + splits * depth, tiles * splits, largest_offset(x), largest_offset(y)
    ):
        return None
    partial = torch.empty((splits, *shape), dtype=torch.float32, device=x.device)
    arguments = {
        "x": x.data_ptr(),
        "y": y.data_ptr(),
        "partial": partial.data_ptr(),
        "tiles": tiles * splits,
        "pixels": pixels,
        "split_pixels": split_pixels,
        "height": x.shape[2],
        "width": x.shape[3],
        "out_height": y.shape[2],
        "out_width": y.shape[3],
        **stride_arguments("x", "nchw", x),
        **stride_arguments("y", "nchw", y),
    }
    return [(tiles * splits, arguments)], partial


def prepare_sm90_tf32_forward(constants, x, weight, bias, y, parameters):  # type: ignore[no-untyped-def]
    """Blocks and arguments of the kernels sm90_tf32_pack and sm90_tf32_forward, or the latter's
    like for strict float32, sm90_split_forward.
    """
    half = constants["half"]
    # A row of pixels stands for row_step rows of the input, and for all their phases.
    steps = (parameters.stride[0] * constants["row_step"], parameters.stride[1])
    # Of pixels; the first tile of a row has some that have no outputs.
    counts = (
        (y.shape[2 + i] - 1 + parameters.padding[i]) // steps[i]
        - parameters.padding[i] // steps[i]
        + 1
        + (0, constants["lead"])[i]
        for i in (0, 1)
    )
    tiles_y, tiles_x = (
        1 + ceiling_divide(max(0, count - constants["tile"][i]), constants["tile_step"][i])
        for i, count in enumerate(counts)
    )
    tiles = constants["row_groups"] * x.shape[0] * tiles_y * tiles_x
    if y.stride(3) != 1 or not (constants["map_box"] is None or is_aligned(x)):
        return None
    # Behind the weights lies a count of tiles; in float16 notes of the weights and of the tiles,
    # one for each warp that brings one, lie behind it.
    status = constants["packed_words"]
    rings = constants["rings"]
    notes = constants["weight_words"] + 4 * tiles // rings
    noted = 1 + (notes if half else 0)
    if not constants["wide"] and exceeds_int(
        4 // rings * tiles, largest_offset(x), largest_offset(weight), largest_offset(y)
    ):
        return None
    packed = torch.empty(status + noted, dtype=torch.float32, device=x.device)
    packing = {
        "weight": weight.data_ptr(),
        "packed": packed.data_ptr(),
        "status": packed.data_ptr() + 4 * status,
        "items": constants["packed_items"],
        "half_items": constants["half_items"],
        **stride_arguments("weight", ["in", "out", "h", "w"], weight),
    }
    arguments = {
        "source": x.data_ptr(),
        "packed": packed.data_ptr(),
        "status": packed.data_ptr() + 4 * status,
        "bias": 0 if bias is None else bias.data_ptr(),
        "destination": y.data_ptr(),
        "tiles": tiles,
        "tiles_y": tiles_y,
        "tiles_x": tiles_x,
        "patch_row": constants["patch_row"],
        "source_height": x.shape[2],
        "source_width": x.shape[3],
        "destination_height": y.shape[2],
        "destination_width": y.shape[3],
        **stride_arguments("source", "nchw", x),
        **stride_arguments("destination", "nch", y),
        "weight": weight.data_ptr(),
        **stride_arguments("weight", ["in", "out", "h", "w"], weight),
    }
    if constants["map_box"] is not None:
        arguments["source_map"] = tensor_map(
            x.data_ptr(),
            tuple(reversed(x.shape)),
            tuple(4 * step for step in reversed(x.stride()[:3])),
            constants["map_box"],
        )
    # One block for each multiprocessor; its rings walk the tiles.
    blocks = min(device_properties(x.device.index)[0], ceiling_divide(tiles, rings))
    return [(constants["packed_blocks"], packing), (blocks, arguments)], packed


def prepare_sm90_tf32_flat_forward(constants, x, weight, bias, y, parameters):  # type: ignore[no-untyped-def]
    """Blocks and arguments of the kernels sm90_tf32_flat_pack and sm90_tf32_flat_forward, the
    latter once more where it multiplies in float16: for values that float16 cannot hold.
    """
    # How the pixels are laid out depends on the image's size.
    if tuple(x.shape) != constants["x_shape"] or tuple(y.shape) != constants["y_shape"]:
        return None
    if y.stride(3) != 1:
        return None
    if not constants["wide"] and exceeds_int(
        largest_offset(x), largest_offset(weight), largest_offset(y)
    ):
        return None
    packed = torch.empty(constants["packed_elements"], dtype=torch.float32, device=x.device)
    operands, again = constants["operands"], constants["again"]
    images = {"batch": x.shape[0], **constants["images"]}
    packing = {
        "packed": packed.data_ptr(),
        **images,
        **flat_packing_arguments(operands, x, weight),
    }
    arguments = {
        **flat_operand_arguments(operands, packed.data_ptr()),
        "bias": 0 if bias is None else bias.data_ptr(),
        "destination": y.data_ptr(),
        "tiles": constants["tiles"],
        **images,
        "destination_height": y.shape[2],
        "destination_width": y.shape[3],
        **stride_arguments("destination", "nch", y),
    }
    if constants["rows"] is not None:
        arguments["rows"] = constants["rows"]
    # One block for each multiprocessor, which walks the tiles.
    blocks = min(device_properties(x.device.index)[0], constants["tiles"])
    launches = [(constants["packed_blocks"], packing), (blocks, arguments)]
    if again is None:
        arguments.update(flat_packing_arguments(operands, x, weight))
    else:
        # Behind the operands in float16 there is room for those in TF32, then for what the launches
        # tell each other.
        packed_again = packed.data_ptr() + 4 * operands["elements"]
        told, begin = {}, packed_again + 4 * again["elements"]
        for name, words in zip(("status", "notes", "images", "slight"), constants["note_words"]):
            told[name] = begin
            begin += 4 * words
        packing.update(told)
        repair = {
            **arguments,
            **flat_operand_arguments(again, packed_again),
            **flat_packing_arguments(again, x, weight),
            "packed_again": packed_again,
            "status": told["status"],
            "images": told["images"],
            "blocks_in_front": blocks,
            "most_slight": constants["most_slight"],
        }
        arguments.update(
            told,
            note_count=constants["packed_blocks"],
            slight_vectors=constants["note_words"][-1] // 4,
            most_slight=constants["most_slight"],
        )
        launches.append((blocks, repair))
    return launches, packed


def flat_packing_arguments(operands, x, weight):  # type: ignore[no-untyped-def]
    """Arguments of a kernel that lays out operands for sm90_tf32_flat_forward."""
    return {
        "source": x.data_ptr(),
        "weight": weight.data_ptr(),
        "items": sum(operands["items"]),
        "weight_items": operands["items"][0],
        "weight_elements": operands["weight_elements"],
        "positions": operands["positions"],
        "source_height": x.shape[2],
        "source_width": x.shape[3],
        **stride_arguments("source", "nchw", x),
        **stride_arguments("weight", ["in", "out", "h", "w"], weight),
    }


def flat_operand_arguments(operands, address):  # type: ignore[no-untyped-def]
    """Arguments of a launch of sm90_tf32_flat_forward on operands laid out at an address."""
    return {
        "pixel_map": tensor_map(
            address + 4 * operands["weight_elements"],
            operands["map_sizes"],
            (128, 128 * operands["positions"]),
            operands["map_box"],
            3,  # a swizzle of 128 bytes
        ),
        "packed": address,
    }


def prepare_sm90_tf32_wide_forward(constants, x, weight, bias, y, parameters):  # type: ignore[no-untyped-def]
    """Blocks and arguments of the kernels sm90_tf32_wide_pack and sm90_tf32_wide_forward."""
    counts = [count_pixels(y, parameters, axis) for axis in (0, 1)]
    pitch, image_positions = constants["pitches"]
    if constants["sizes"] is None:
        tiles_y, tiles_x = (ceiling_divide(counts[i], constants["tile"][i]) for i in (0, 1))
        pixel_tiles = x.shape[0] * tiles_y * tiles_x
        positions = 0
    else:
        # How the images lie in one line depends on their size.
        if (tuple(x.shape[2:]), tuple(y.shape[2:])) != constants["sizes"]:
            return None
        tiles_y = tiles_x = 1
        positions = x.shape[0] * image_positions
        # None behind the last image's last output.
        used = (x.shape[0] - 1) * image_positions + (counts[0] - 1) * pitch + counts[1]
        pixel_tiles = ceiling_divide(used, constants["tile"][1])
    tiles = pixel_tiles * constants["column_tiles"]
    vectors = not constants["source_vectors"] or (is_aligned(x) and x.shape[3] % 4 == 0)
    if (
        not vectors
        or not y.is_contiguous()
        or y.shape[3] % constants["store_vector"]
        or y.data_ptr() % 16
        or exceeds_int(tiles, positions)
    ):
        return None
    if not constants["wide"] and exceeds_int(
        largest_offset(x), largest_offset(weight), largest_offset(y)
    ):
        return None
    packed = torch.empty(constants["packed_elements"], dtype=torch.float32, device=x.device)
    packing = {
        "weight": weight.data_ptr(),
        "packed": packed.data_ptr(),
        **stride_arguments("weight", ["in", "out", "h", "w"], weight),
    }
    arguments = {
        "source": x.data_ptr(),
        "weight": weight.data_ptr(),
        "packed": packed.data_ptr(),
        "bias": 0 if bias is None else bias.data_ptr(),
        "destination": y.data_ptr(),
        "tiles": tiles,
        "tiles_x": tiles_x,
        "tiles_y": tiles_y,
        "batch": x.shape[0],
        "pitch": pitch,
        "image_positions": image_positions,
        "source_height": x.shape[2],
        "source_width": x.shape[3],
        "destination_height": y.shape[2],
        "destination_width": y.shape[3],
        **stride_arguments("source", "nchw", x),
        **stride_arguments("weight", ["in", "out", "h", "w"], weight),
        **stride_arguments("destination", "nch", y),
    }
    # One block for each multiprocessor, which walks the tiles.
    blocks = min(device_properties(x.device.index)[0], tiles)
    return [(constants["packed_blocks"], packing), (blocks, arguments)], packed


def prepare_sm90_tf32_overlap_forward(constants, x, weight, bias, y, parameters):  # type: ignore[no-untyped-def]
    """Blocks and arguments of the kernel sm90_tf32_overlap_forward."""
    # How an image is cut into strips depends on its width.
    if (x.shape[3], y.shape[3]) != constants["widths"]:
        return None
    vectors = not constants["source_vectors"] or (is_aligned(x) and x.shape[3] % 4 == 0)
    if not vectors or not y.is_contiguous() or y.data_ptr() % 16:
        return None
    groups = constants["groups"]
    rows = constants["rows_above"] + count_pixels(y, parameters, 0)
    lines = x.shape[0] * constants["strips"] * rows
    if not constants["wide"] and exceeds_int(
        lines, largest_offset(x), largest_offset(weight), largest_offset(y)
    ):
        return None
    # All rows of pixels, shared out among the warpgroups of the blocks that stay on the device;
    # side by side in the strips of an image where rows are many.
    blocks = max(1, device_properties(x.device.index)[0] // groups)
    warpgroups, strips, least = (
        constants[name] for name in ("warpgroups", "strips", "least_share")
    )
    slots, abreast = blocks * warpgroups, 1
    share = ceiling_divide(lines, slots)
    full = share >= least
    if full and slots >= strips:
        of_strip = ceiling_divide(lines // strips, slots // strips)
        if 20 * of_strip <= 21 * share:
            abreast, share = strips, of_strip
    shares = abreast * ceiling_divide(lines // abreast, share)
    arguments = {
        "source": x.data_ptr(),
        "weight": weight.data_ptr(),
        "bias": 0 if bias is None else bias.data_ptr(),
        "destination": y.data_ptr(),
        "lines": lines // abreast,
        "share": share,
        "rows": rows,
        "strips": strips // abreast,
        "abreast": abreast,
        "step": 1 if full else blocks,
        "source_height": x.shape[2],
        "source_width": x.shape[3],
        "destination_height": y.shape[2],
        "destination_width": y.shape[3],
        **stride_arguments("source", "nchw", x),
        **stride_arguments("weight", ["in", "out", "h", "w"], weight),
        **stride_arguments("destination", "nch", y),
    }
    wanted = ceiling_divide(shares, warpgroups) if full else shares
    return [(groups * min(blocks, wanted), arguments)], True


def count_pixels(y, parameters, axis):  # type: ignore[no-untyped-def]
    """Pixels q of an axis, each for the outputs from q*stride - padding on."""
    stride, padding = parameters.stride[axis], parameters.padding[axis]
    return (y.shape[2 + axis] - 1 + padding) // stride - padding // stride + 1


def tiled_launch(constants, x, weight, bias, y, counts, walks_rows=False):  # type: ignore[no-untyped-def]
    """Blocks and arguments of a kernel whose blocks walk tiles, `counts` along y and x."""
    multiprocessors, capability = device_properties(x.device.index)
    tiles_y, tiles_x = counts
    group_tiles = constants["group_tiles"]
    tiles = group_tiles * x.shape[0] * tiles_y * tiles_x
    vectors = not constants["source_vectors"] or (is_aligned(x) and x.shape[3] % 4 == 0)
    if (
        capability < constants["least"]
        or not vectors
        or not y.is_contiguous()
        or y.shape[3] % constants["store_vector"]
        or y.data_ptr() % 16
    ):
        return None
    if not constants["wide"] and exceeds_int(
        tiles, largest_offset(x), largest_offset(weight), largest_offset(y)
    ):
        return None
    arguments = {
        "source": x.data_ptr(),
        "weight": weight.data_ptr(),
        "bias": 0 if bias is None else bias.data_ptr(),
        "destination": y.data_ptr(),
        "tiles": tiles,
        "tiles_y": tiles_y,
        "tiles_x": tiles_x,
        "source_height": x.shape[2],
        "source_width": x.shape[3],
        "destination_height": y.shape[2],
        "destination_width": y.shape[3],
        **stride_arguments("source", "nchw", x),
        **stride_arguments("weight", ["in", "out", "h", "w"], weight),
        **stride_arguments("destination", "nch", y),
    }
    # As many blocks as stay on the device, each with the weights of one group where that can be.
    most = multiprocessors * constants["blocks"]
    if walks_rows or group_tiles * 8 <= most:
        most = max(most - most % group_tiles, group_tiles)
    return [(min(tiles, most), arguments)], True


@functools.lru_cache(maxsize=1024)
def tensor_map(
    address: int, sizes: "tuple", strides: "tuple", box: "tuple", swizzle: int = 0
) -> bytes:
    """What the copy engine wants to know of a float32 tensor, from the driver.

    Sizes, strides in bytes (of all but the first) and the box that one instruction copies are
    given with the innermost dimension first; the swizzle as the driver numbers it, 0 for none.
    """
    rank = len(sizes)
    result = ctypes.create_string_buffer(128 + 64)
    aligned = -(-ctypes.addressof(result) // 64) * 64
    error = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        7,  # float32
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * rank)(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),  # every element
        0,  # not interleaved
        swizzle,
        2,  # 128 bytes at a time into L2
        0,  # zero outside
    )
    if error != 0:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {error}")
    return ctypes.string_at(aligned, 128)


def is_aligned(x: torch.Tensor) -> bool:
    """Whether a tensor map can describe it: adjacent columns, all else on 16 bytes."""
    steps = x.stride()
    return (
        steps[3] == 1
        and x.data_ptr() % 16 == 0
        and all(step > 0 and step * 4 % 16 == 0 for step in steps[:3])
    )


def exceeds_int(*counts: int) -> bool:
    """Whether a count, with the last tile's overhang, does not fit the kernels' 32-bit indices."""
    return max(counts) >= 2**31 - 2**20


def largest_offset(tensor: torch.Tensor) -> int:
    """The largest element offset in the tensor."""
    return sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
