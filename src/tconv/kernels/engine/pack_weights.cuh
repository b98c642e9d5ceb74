// Packs the weights of an engine kernel: [group][block of rows][set][chunk][slot] pieces of
// `group_rows` rows and the channels of a stage, swizzled. Zeros stand behind the last row and
// channel.
//
// An item is `item_rows` rows and 16 reduced channels with some taps of both axes. Its weights are
// copied to shared memory in the order in which they lie, by vectors where they allow it, and
// gathered from there.
#pragma once

#include <common/element.cuh>
#include <common/split.cuh>
#include <engine/fold.cuh>

namespace {

namespace weights {

using Index = Layer::Index;
using Element = Layer::Element;

constexpr int group_rows = Layer::group_rows, item_rows = Layer::item_rows, item_depth = 16;
// In strict float32, a piece has the lines of all high parts, then middle and low ones.
constexpr int parts = Layer::strict ? 3 : 1;
constexpr int vector = 16 / int(sizeof(Element));  // 8, or 4 of float32
constexpr int chunk_values = Layer::strict ? 8 : vector;
constexpr int line_chunks = Layer::line_bytes / 16;
constexpr int depth = line_chunks * chunk_values;
constexpr int item_chunks = item_depth / chunk_values;
constexpr int block_rows = Layer::block_rows;
constexpr int row_blocks = (Layer::rows + block_rows - 1) / block_rows;
constexpr int row_parts = group_rows / item_rows;
constexpr int chunks = (Layer::reduced + depth - 1) / depth;
constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int part_taps = Layer::part_taps;
constexpr int tap_parts = (taps + part_taps - 1) / part_taps;
constexpr int item_depths = chunks * (depth / item_depth);
constexpr int all_slots = Layer::all_slots > 0 ? Layer::all_slots : 1;
constexpr int items = Layer::groups * row_blocks * row_parts * item_depths * tap_parts;

// The weight's two axes of channels, of a group and of an item.
constexpr int in_limit = Layer::turned ? Layer::rows : Layer::reduced;
constexpr int out_limit = Layer::turned ? Layer::reduced : Layer::rows;
constexpr int ins = Layer::turned ? item_rows : item_depth;
constexpr int outs = Layer::turned ? item_depth : item_rows;
constexpr int pad = 8;  // elements; other banks, and vectors stay whole

// Where a slot of an item reads and writes.
struct Slot {
    int tap;    // of the item
    int piece;  // behind the first of the block of rows
};

// Where an item begins.
struct Item {
    int group, block, row, channel, tap;  // row: of the block
};

// An item's place in shared memory, in elements.
template <bool taps_adjacent>
struct Place {
    static constexpr int out = taps_adjacent ? part_taps : 1;
    static constexpr int tap = taps_adjacent ? 1 : outs + pad;
    static constexpr int in = taps_adjacent ? outs * part_taps + pad : part_taps * (outs + pad);
};

// Copies an item, by vectors of `width` weights that follow each other in memory.
template <int width, bool taps_adjacent>
TCONV_DEVICE void copy(const Arguments& arguments, Element* staged, const Item& item) {
    using Placed = Place<taps_adjacent>;
    struct alignas(width * sizeof(Element)) Vector {
        Element values[width];
    };
    constexpr int of_in = outs * part_taps / width, count = ins * of_in;
    constexpr int batch = 4;  // loads under way at a time
    int first_row = item.block * block_rows + item.row;
    int first_in = Layer::turned ? first_row : item.channel;
    int first_out = Layer::turned ? item.channel : first_row;
    for (int first = threadIdx.x; first < count; first += batch * Layer::threads) {
        Vector values[batch];
        int places[batch];
#pragma unroll
        for (int k = 0; k < batch; ++k) {
            int i = first + k * Layer::threads, in = i / of_in, rest = (i - in * of_in) * width;
            int out = taps_adjacent ? rest / part_taps : rest % outs;
            int tap = taps_adjacent ? rest - out * part_taps : rest / outs;
            bool exists = i < count && first_in + in < in_limit && first_out + out < out_limit &&
                          item.tap + tap < taps;
            places[k] = exists ? in * Placed::in + out * Placed::out + tap * Placed::tap : -1;
            if (!exists) continue;
            int y = (item.tap + tap) / Layer::kernel_x, x = item.tap + tap - y * Layer::kernel_x;
            Unfolded of(first_out + out);
            const auto* from =
                static_cast<const Element*>(arguments.weight) +
                Index(item.group * in_limit + first_in + in) * arguments.weight_stride_in +
                Index(of.channel) * arguments.weight_stride_out +
                Index(y * Layer::fold_y + of.y) * arguments.weight_stride_h +
                Index(x * Layer::fold_x + of.x) * arguments.weight_stride_w;
            values[k] = *reinterpret_cast<const Vector*>(from);
        }
#pragma unroll
        for (int k = 0; k < batch; ++k) {
            if (places[k] >= 0) *reinterpret_cast<Vector*>(staged + places[k]) = values[k];
        }
    }
}

// As the tensor cores take it: float32 rounded to TF32, unless it is split.
TCONV_DEVICE float as_operand(float value) { return operand<!Layer::strict>(value); }

template <typename Value>
TCONV_DEVICE Value as_operand(Value value) {
    return value;
}

// Writes the parts of eight channels in strict float32, so many lines apart: of neighbours beside
// each other, or, as raw tiles read them, of channels and the fourth behind. A template, as others
// have none.
template <int count>
TCONV_DEVICE void write_parts(const Element (&values)[count], uint4* to, int apart) {
    if constexpr (count == 8 && sizeof(Element) == 4) {
        constexpr int next = Layer::raw ? 4 : 1, step = Layer::raw ? 1 : 2;
        auto two = [&](int i) { return Split::scaled(values[i * step], values[i * step + next]); };
        Split a = two(0), b = two(1), c = two(2), d = two(3);
        to[0] = {a.high, b.high, c.high, d.high};
        to[apart] = {a.middle, b.middle, c.middle, d.middle};
        to[2 * apart] = {a.low, b.low, c.low, d.low};
    }
}

// Writes lines of an item: the channels of each row and slot, by a thread for each 16 bytes.
template <bool taps_adjacent>
TCONV_DEVICE void gather(const Arguments& arguments, const Element* staged, const Slot* slots,
                         const Item& item) {
    using Placed = Place<taps_adjacent>;
    constexpr int of_row = Layer::turned ? Placed::in : Placed::out;
    constexpr int of_channel = Layer::turned ? Placed::out : Placed::in;
    Index first_piece = Index(item.group * row_blocks + item.block) * Layer::all_slots * chunks;
    constexpr int count = item_chunks * item_rows * Layer::all_slots;
    for (int i = threadIdx.x; i < count; i += Layer::threads) {
        int chunk = i % item_chunks, row = i / item_chunks / all_slots;
        Slot slot = slots[i / item_chunks - row * all_slots];
        if (tap_parts > 1 && (slot.tap < 0 || slot.tap >= part_taps)) continue;
        int channel = item.channel + chunk * chunk_values;
        const Element* from =
            staged + row * of_row + chunk * chunk_values * of_channel + slot.tap * Placed::tap;
        bool exists =
            item.row + row < block_rows && item.block * block_rows + item.row + row < Layer::rows;
        int left = exists ? Layer::reduced - channel : 0;
        struct alignas(16) {
            Element values[chunk_values];
        } line;
#pragma unroll
        for (int k = 0; k < chunk_values; ++k) {
            line.values[k] = k < left ? as_operand(from[k * of_channel]) : Element{};
        }
        int to_row = item.row + row, to_chunk = channel % depth / chunk_values;
        int at = to_chunk ^ (to_row / (8 / line_chunks) % line_chunks);
        constexpr int part_lines = group_rows * line_chunks;
        Index to = (first_piece + slot.piece) * (parts * part_lines) + to_row * line_chunks + at;
        if constexpr (Layer::strict) {
            write_parts(line.values, static_cast<uint4*>(arguments.packed) + to, part_lines);
        } else {
            static_cast<decltype(line)*>(arguments.packed)[to] = line;
        }
    }
}

TCONV_DEVICE void pack(const Arguments& arguments, unsigned char* memory, int number) {
    auto* slots = reinterpret_cast<Slot*>(memory);
    auto* staged = reinterpret_cast<Element*>(memory + Layer::slot_bytes);
    int rest = number / tap_parts, next = rest / item_depths, blocks = next / row_parts;
    Item item = {blocks / row_blocks, blocks % row_blocks, next % row_parts * item_rows,
                 rest % item_depths * item_depth, number % tap_parts * part_taps};
    for (int i = threadIdx.x; i < Layer::all_slots; i += Layer::threads) {
        int set = Layer::slot_set[i];
        int begin = Layer::set_begin[set], count = Layer::set_begin[set + 1] - begin;
        slots[i] = {Layer::slot_tap[i] - item.tap,
                    begin * chunks + item.channel / depth * count + i - begin};
    }
    // Vectors lie on 16 bytes, and no vector has weights that the tensor lacks.
    bool on_vectors = !is_folded && reinterpret_cast<uintptr_t>(arguments.weight) % 16 == 0 &&
                      arguments.weight_stride_in % vector == 0 &&
                      (tap_parts == 1 || taps % vector == 0);
    bool taps_adjacent = arguments.weight_stride_w == 1 &&
                         arguments.weight_stride_h == Layer::kernel_x &&
                         arguments.weight_stride_out == taps;
    bool outs_adjacent = arguments.weight_stride_out == 1 &&
                         (arguments.weight_stride_h | arguments.weight_stride_w) % vector == 0;
    if (on_vectors && taps_adjacent && (out_limit % vector == 0 || part_taps % vector == 0)) {
        copy<vector, true>(arguments, staged, item);
    } else if (on_vectors && outs_adjacent && out_limit % vector == 0) {
        copy<vector, false>(arguments, staged, item);
        __syncthreads();
        return gather<false>(arguments, staged, slots, item);
    } else {
        copy<1, true>(arguments, staged, item);
    }
    __syncthreads();
    gather<true>(arguments, staged, slots, item);
}

}  // namespace weights

}  // namespace
