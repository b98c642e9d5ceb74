// For persistent blocks that loop over the tiles of images: a tile's position, the patch of the
// input that it reads, the steps of a block, and stores as wide as output rows are aligned for.
#pragma once

#include <common/element.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/memory.cuh>
#include <ptx/registers.cuh>

namespace image_tiles {

using Index = Layer::Index;

// NOTE: the compiler cannot keep what is derived from this value, which would cost registers.
TCONV_DEVICE int own_thread() { return int(ptx::opaque(threadIdx.x)); }

template <int channel_tiles, int tile_channels>
struct Position {
    // Group, then tile of its channels, innermost. Blocks that run together share their inputs.
    // Where the grid is a multiple of the number of group tiles, each block keeps its weights.
    int group_tile;
    int tile_y, tile_x;
    Index image;
    Index tile;

    Position() = default;

    TCONV_DEVICE Position(Index tile, const Arguments& arguments) : tile(tile) {
        constexpr int group_tiles = Layer::groups * channel_tiles;
        Index rest = tile / group_tiles;
        group_tile = int(tile - rest * group_tiles);
        Index next = rest / arguments.tiles_x;
        tile_x = int(rest - next * arguments.tiles_x);
        image = next / arguments.tiles_y;
        tile_y = int(next - image * arguments.tiles_y);
    }

    TCONV_DEVICE Index group() const { return Index(group_tile / channel_tiles); }
    TCONV_DEVICE int first_channel() const { return group_tile % channel_tiles * tile_channels; }
};

// A patch in shared memory: some input channels of a rectangle, zero outside the image. Its Shape:
//
//   rows, vectors             of a channel: its rows, and vectors of 4 columns in each
//   channels, channel_pitch   of a step, and the floats between them in shared memory
//   unrolled                  channels whose copies are unrolled
//   place(row, column)        where an element of the first channel lies
template <int threads, typename Shape>
struct Patch {
    // `copied` is the elements of one copy. `places` is the copies of one channel. A thread copies
    // the same places of every channel_lanes-th channel.
    static constexpr int copied = Layer::source_vectors ? 4 : 1;
    static constexpr int row_copies = 4 * Shape::vectors / copied;
    static constexpr int places = Shape::rows * row_copies;
    static constexpr int place_threads = places <= 32                        ? 32
                                         : places <= 64                      ? 64
                                         : places <= 96 && threads % 96 == 0 ? 96
                                                                             : threads;
    static constexpr int channel_lanes = threads / place_threads;
    static constexpr int lane_channels = (Shape::channels + channel_lanes - 1) / channel_lanes;
    static constexpr int unrolled = Shape::unrolled;
    static_assert(channel_lanes * place_threads == threads, "every thread copies");

    // Whether the step has this channel to copy.
    TCONV_DEVICE static bool is_copied(int channel) {
        return Shape::channels % channel_lanes == 0 || channel < Shape::channels;
    }

    TCONV_DEVICE static float* copy_place(float* patch, int i) {
        return patch + Shape::place(i / row_copies, i % row_copies * copied);
    }

    // Copies the patch from row `top` and column `left` on. `left` is a multiple of 4 where copies
    // are vectors. Rows from `bottom` on are outside.
    template <typename At>
    TCONV_DEVICE static void load(float* patch, const Arguments& arguments, const At& of,
                                  int first_channel, int top, int left, int bottom) {
        int lane = own_thread() / place_threads;
        const float* source =
            static_cast<const float*>(arguments.source) + of.image * arguments.source_stride_n +
            (of.group() * Layer::in_channels + first_channel + lane) * arguments.source_stride_c;
        Index step = channel_lanes * arguments.source_stride_c;
#pragma unroll 1
        for (int i = own_thread() % place_threads; i < places; i += place_threads) {
            int y = top + i / row_copies;
            int x = left + i % row_copies * copied;
            bool inside =
                unsigned(y) < unsigned(bottom) && unsigned(x) < unsigned(arguments.source_width);
            Index step_x = Layer::source_vectors ? Index(1) : Index(arguments.source_stride_w);
            const float* from =
                inside ? source + (y * arguments.source_stride_h + x * step_x) : source;
            float* to = copy_place(patch, i) + lane * Shape::channel_pitch;
#pragma unroll unrolled
            for (int k = 0; k < lane_channels; ++k) {
                int channel = k * channel_lanes + lane;
                constexpr bool whole = Layer::in_channels % Shape::channels == 0;
                // NOTE: channels beyond the last are zeroed, so that their weights add nothing.
                bool valid = inside && (whole || first_channel + channel < Layer::in_channels);
                if (is_copied(channel)) {
                    if constexpr (Layer::source_vectors) {
                        ptx::cp_async_cg_16(to, from, valid);
                    } else {
                        ptx::cp_async_ca<4>(to, from, valid);
                    }
                }
                from += step;
                to += channel_lanes * Shape::channel_pitch;
            }
        }
    }

    // Rounds to TF32 what the thread itself has copied: its own wait for the copies is enough.
    TCONV_DEVICE static void round(float* patch) {
        using Part = Vector<float, copied>;
        int lane = own_thread() / place_threads;
#pragma unroll 1
        for (int i = own_thread() % place_threads; i < places; i += place_threads) {
            float* to = copy_place(patch, i) + lane * Shape::channel_pitch;
#pragma unroll unrolled
            for (int k = 0; k < lane_channels; ++k) {
                if (is_copied(k * channel_lanes + lane)) {
                    Part part = *reinterpret_cast<Part*>(to);
#pragma unroll
                    for (int v = 0; v < copied; ++v) part.values[v] = operand<true>(part.values[v]);
                    *reinterpret_cast<Part*>(to) = part;
                }
                to += channel_lanes * Shape::channel_pitch;
            }
        }
    }
};

// A persistent block that loops over tiles. A tile takes one or more steps. A step multiplies a
// patch while the copies of the next step's patch, of the same or of the next tile, are under way.
// `Kernel` derives from this; `Shared` has patch[2] and positions[2]. Kernel has
//
//   round_step()                   rounds what the step copied, where that is done in place
//   prefetch_weights(position)     may start the copies of the next tile's weights
//   load_patch(patch, position, first_channel)
template <typename Kernel, typename Shared, typename Position>
struct Block {
    const Arguments& arguments;
    Shared& shared;
    int stage = 0;
    int turn = 0;  // which of the positions is this tile's
    bool new_weights = true;

    TCONV_DEVICE Block(const Arguments& arguments, Shared& shared)
        : arguments(arguments), shared(shared) {}

    TCONV_DEVICE Kernel& kernel() { return static_cast<Kernel&>(*this); }

    TCONV_DEVICE const Position& position() const { return shared.positions[turn]; }

    TCONV_DEVICE Index next_tile() const { return position().tile + Index(gridDim.x); }

    // All threads' copies of the position are the same. They may read it after the next barrier.
    TCONV_DEVICE void publish(const Position& position, int turn) {
        if (threadIdx.x == 0) shared.positions[turn] = position;
    }

    TCONV_DEVICE void prefetch_weights(const Position&) const {}

    // Waits for this step's copies and starts those of the next step: of the tile's `next_channel`,
    // or of the next tile if this step is the tile's last.
    TCONV_DEVICE void begin_step(bool last_of_tile, int next_channel) {
        ptx::cp_async_wait_all();
        kernel().round_step();
        new_weights = false;
        // NOTE: a step has one barrier. After it copies are visible, and no thread still reads the
        // stage that the next copies fill.
        __syncthreads();
        stage ^= 1;
        if (!last_of_tile) {
            kernel().load_patch(shared.patch[stage], position(), next_channel);
        } else if (next_tile() < arguments.tiles) {
            Position next(next_tile(), arguments);
            publish(next, turn ^ 1);
            new_weights = next.group_tile != position().group_tile;
            kernel().prefetch_weights(next);
            kernel().load_patch(shared.patch[stage], next, 0);
        }
    }
};

// Rows that are not aligned to vectors begin anywhere in a line of 128 bytes. A warp's lanes then
// begin at the line's start. Otherwise each store would share two sectors of 32 bytes with its
// neighbours, and memory takes 1.5 times as long for partial sectors.
template <int stored>
constexpr int most_behind = stored < 4 ? 32 - stored : 0;

// The elements between a line's start and `row`, at most `most_behind`.
template <int stored>
TCONV_DEVICE int behind_line(const float* row) {
    return stored < 4 ? int(reinterpret_cast<uintptr_t>(row) / sizeof(float) % 32) : 0;
}

// Writes neighbouring outputs that no later access of the kernel reads.
template <int count>
TCONV_DEVICE void store(float* destination, const Vector<float, count>& value) {
    const float* v = value.values;
    static_assert(count == 1 || count == 2 || count == 4, "a store is 4, 8 or 16 bytes");
    if constexpr (count == 4) {
        ptx::st_global_cs_v4(destination, make_float4(v[0], v[1], v[2], v[3]));
    } else if constexpr (count == 2) {
        ptx::st_global_cs_v2(destination, make_float2(v[0], v[1]));
    } else {
        ptx::st_global_cs(destination, v[0]);
    }
}

}  // namespace image_tiles
