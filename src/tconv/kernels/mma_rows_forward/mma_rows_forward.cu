// out[n, co, oy, ox] of layers whose time goes into writing output rows: products on mma.sync, rows
// by bulk copies.
//
// Units, products and weights are those of <common/mma_tiles.cuh>. Tiles are one row of pixels high
// and as wide as the image. A block computes neighbouring rows of an image from top to bottom, and
// their output rows leave by bulk copies, in whole sectors (<mma_rows_forward/plane_rows.cuh>).
//
// ring: where a step has all input channels, the patch is a ring of rows, of which one is new to a
// tile. `rows_ahead` rows are prefetched at a time: device memory gives neighbouring rows that are
// loaded together for less.
//
// Layer::dynamic_tail: blocks go at different speeds, and even shares of the rows would end at
// different times. So each computes a static share of `share` rows, then further ones, one at a
// time, that it takes from a counter of its group tile. A launch before has cleared the counters.
//
// Prefetch windows, with a dynamic tail and a ring: all blocks prefetch during the first half of
// every `period` nanoseconds of the global timer, unless they need a row before. Device memory then
// reads and writes in turns.
#include <common/mma_outputs.cuh>
#include <mma_rows_forward/plane_rows.cuh>
#include <ptx/globaltimer.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

using namespace mma_tiles;

constexpr int group_tiles = Layer::groups * channel_tiles;

static_assert(tile_rows == 1 && ring == (chunks == 1), "tiles of one row follow each other");
static_assert(teams == 1 && Layer::row_groups == 1, "a warp has all rows of a channel");
// A tile's rows reach into its last warp's pixels.
static_assert((team_warps - 1) * part_columns >= 2 * plane_rows::sector, "rows have two sectors");

// A gathered row starts up to a sector behind `lead`. Behind its end a sector is spare.
constexpr int lead = plane_rows::sector;
static_assert(lead + 2 * plane_rows::sector + head + piece <= output_pitch,
              "rows have room on either side");

constexpr bool has_blank_rows = Layer::phases_y < Layer::stride_y;  // that no tap reaches

// The tiles from `begin` to before `end`, in steps of `group_tiles`: consecutive rows. A block has
// one share. With a dynamic tail it then has shares of one row each.
struct Share {
    Index begin, end;
};

// A blank row's values, of each channel or of all: as many as one copy takes.
constexpr int blank_elements = has_blank_rows ? Layer::blank_elements : 8;
constexpr int blank_channels = has_blank_rows && Layer::bias ? tile_channels : 1;
static_assert(Layer::buffers == 1 || Layer::buffers == 2, "passes take turns");

struct Shared {
    alignas(16) float patch[ring ? 1 : 2][depth * patch_channel];
    alignas(32) float outputs[Layer::buffers][pass_channels * output_pitch];
    float carried[tile_channels][plane_rows::sector];  // what the last row left of its last sector
    alignas(16) float blank[blank_channels][blank_elements];
    Weights weights;
    Share share;
    bool prefetches;  // Layer::dynamic_tail: whether this is a prefetch window
    Position positions[2];  // of this tile and the next: here they cost no registers
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

struct Block : Outputs<Block, Shared> {
    using Outputs<Block, Shared>::Outputs;

    TCONV_DEVICE Index next_tile() const { return position().tile + Index(group_tiles); }

    TCONV_DEVICE Index end_tile() const { return shared.share.end; }

    // Enters this block's first share and returns its first tile. The number of blocks is a
    // multiple of group_tiles.
    TCONV_DEVICE Index begin_tiles() const {
        if constexpr (Layer::dynamic_tail) {
            return begin_share(arguments);
        } else {
            Index shares = Index(gridDim.x) / group_tiles, share = Index(blockIdx.x) / group_tiles;
            Index rows = arguments.tiles / group_tiles;
            Index most = rows / shares, longer = rows - most * shares;
            Index first = share * most + (share < longer ? share : longer);
            Index own = Index(blockIdx.x) - share * group_tiles;
            Index begin = first * group_tiles + own;
            Index end = begin + (most + (share < longer ? 1 : 0)) * group_tiles;
            if (threadIdx.x == 0) shared.share = {begin, end};
            return begin;
        }
    }

    // --- the dynamic tail: templates, since other kernels have no arguments for it

    // The tiles of rows `begin` to before `end` of this block's group tile.
    template <typename Row>
    TCONV_DEVICE static Share tiles_of(Row begin, Row end) {
        Index own = Index(blockIdx.x) % group_tiles;
        return {begin * group_tiles + own, end * group_tiles + own};
    }

    template <typename Fields>
    TCONV_DEVICE Index begin_share(const Fields& arguments) const {
        Index first = Index(blockIdx.x) / group_tiles * arguments.share;
        Share own = tiles_of(first, first + arguments.share);
        if (threadIdx.x == 0) shared.share = own;
        return own.begin;
    }

    template <typename Fields>
    TCONV_DEVICE void read_timer(const Fields& arguments) {
        if (threadIdx.x != 0) return;
        auto period = uint32_t(arguments.period);
        shared.prefetches = ptx::globaltimer() % period < period / 2;
    }

    // Takes a row from the counter at the last tile of a share. There may be none left.
    // NOTE: before the wait for the tile's copies, which takes as long. ptxas has few scoreboards:
    // the first thread's next load may wait for this one as well.
    template <typename Fields>
    TCONV_DEVICE void take_row(const Fields& arguments) {
        if (threadIdx.x != 0 || next_tile() < end_tile()) return;
        ptx::griddepcontrol_wait();  // the launch before clears the counters
        taken = atomicAdd(static_cast<uint32_t*>(arguments.counts) + blockIdx.x % group_tiles, 1u);
    }

    // Enters the row that was taken, if it exists, as a share of its own.
    template <typename Fields>
    TCONV_DEVICE bool enter_row(const Fields& arguments) {
        __syncthreads();  // no thread still reads the last share, or its patch
        turn ^= 1;
        if (threadIdx.x == 0) {
            Index row = Index(gridDim.x) / group_tiles * arguments.share + Index(taken);
            shared.share = tiles_of(row, row + 1);
            shared.positions[turn] = Position(shared.share.begin, arguments);
        }
        __syncthreads();
        if (shared.share.begin >= arguments.tiles) return false;
        load_first(position());
        return true;
    }

    struct RowShape {
        static constexpr int rows = 1;
        static constexpr int vectors = used_vectors;
        static constexpr int channels = depth;
        static constexpr int channel_pitch = patch_channel;
        static constexpr int unrolled = 4;
        TCONV_DEVICE static int place(int, int column) { return column; }
    };

    // Where a row of the ring lies. Rows are counted from the first row of the image's first tile.
    TCONV_DEVICE float* ring_row(int row) const {
        return shared.patch[0] + row % channel_rows * patch_pitch;
    }

    // Starts the copies of the rows before `end` that are not yet loaded.
    TCONV_DEVICE void load_rows(const Position& of, int end) {
        int left = of.tile_x * tile_columns + Layer::first_column - skew;
#pragma unroll 1
        for (; loaded < end; ++loaded) {
            image_tiles::Patch<threads, RowShape>::load(ring_row(loaded), arguments, of, 0,
                                                        Layer::first_row + loaded, left,
                                                        arguments.source_height);
        }
    }

    // Loads the patch of a share's first tile.
    TCONV_DEVICE void load_first(const Position& first) {
        if constexpr (ring) {
            loaded = rounded = first.tile_y;
            load_rows(first, first.tile_y + patch_rows);
        } else {
            load_patch(shared.patch[stage], first, 0);
        }
    }

    TCONV_DEVICE void begin_step(bool last_of_tile, int next_channel) {
        if constexpr (Layer::dynamic_tail) {
            if (last_of_tile) take_row(arguments);
        }
        Outputs<Block, Shared>::begin_step(last_of_tile, next_channel);
    }

    // The same for a ring. It loads an image's first patch, of which nothing was prefetched.
    // NOTE: templates, as they have no use where a tile takes several steps.
    template <typename = void>
    TCONV_DEVICE void begin_tile() {
        begin_ring_step();
    }

    template <typename = void>
    TCONV_DEVICE void begin_ring_step() {
        if (position().tile_y == 0 && position().tile != shared.share.begin) {
            __syncthreads();
            loaded = rounded = 0;
            load_rows(position(), patch_rows);
        }
        if constexpr (Layer::dynamic_tail) take_row(arguments);
        ptx::cp_async_wait_all();
        if constexpr (!Layer::round_on_load) {
            for (; rounded < loaded; ++rounded) {
                image_tiles::Patch<threads, RowShape>::round(ring_row(rounded));
            }
        }
        if (new_weights) round_weights();
        new_weights = false;
        if constexpr (Layer::dynamic_tail) read_timer(arguments);
        __syncthreads();  // as above
        if (next_tile() < end_tile()) {
            Position next(next_tile(), arguments);
            publish(next, turn ^ 1);
            bool needed = loaded < next.tile_y + patch_rows;
            bool prefetches = Layer::dynamic_tail ? shared.prefetches : needed;
            if (next.tile_y > 0 && (needed || prefetches)) {
                Index tiles_after = (end_tile() - next.tile - 1) / group_tiles;
                int below = arguments.tiles_y - 1 - next.tile_y;
                if (tiles_after < below) below = int(tiles_after);
                // Rows that later tiles of the share read, and rows that the ring has room for.
                int more = next.tile_y + patch_rows + below - loaded;
                int room = position().tile_y + channel_rows - loaded;
                if (room < more) more = room;
                load_rows(next, loaded + (prefetches ? more : 1));
            }
        }
    }

    // Stores by bulk copies. Rows of a plane are written from top to bottom.
    TCONV_DEVICE void store_sums(const Unit& unit) {
        constexpr int begin = head - Layer::first_output_x;  // of a gathered row: column 0
        const Position& at = position();
        int height = arguments.destination_height, width = arguments.destination_width;
        int top = at.tile_y * (tile_rows * Layer::stride_y) + Layer::first_output_y;
        int below = top + tile_rows * Layer::stride_y;
        // This block writes the image's rows from first_row to before end_row, or more of them.
        int first_row = at.tile == shared.share.begin && top > 0 ? top : 0;
        int end_row = next_tile() >= shared.share.end && below < height ? below : height;

        int unit_channel = unit.channel_block * Layer::unit_channels;
        constexpr int rows_together = 32 / plane_rows::lanes;  // by a warp
        int own_row = own_thread() % 32 / plane_rows::lanes;
        bool leads = plane_rows::lane() == 0;
        const float* bias = shared.weights.bias + unit_channel;
        float* planes = static_cast<float*>(arguments.destination) +
                        (at.image * arguments.destination_stride_n +
                         (at.group() * Layer::out_channels + at.first_channel() + unit_channel) *
                             arguments.destination_stride_c);
        int rest = Layer::out_channels - at.first_channel() - unit_channel;
#pragma unroll
        for (int i = 0; i < warp_rows; ++i) {
#pragma unroll
            for (int pass = 0; pass < halves * Layer::unit_phases; ++pass) {
                int half = pass / Layer::unit_phases, phase = pass % Layer::unit_phases;
                int index = unit.phase_group * Layer::unit_phases + phase;
                int y = top + (unit.row + i) * Layer::stride_y + phase_y(index);
                bool exists = unsigned(y) < unsigned(height);
                if (!has_blank_rows && !exists) continue;
                float* rows = planes + (8 * half * arguments.destination_stride_c +
                                        y * arguments.destination_stride_h);
                int first_shift = plane_rows::place(rows - begin);
                int next_shift = int(arguments.destination_stride_c % plane_rows::sector);
                auto shift = [&](int c) {
                    return (first_shift + c * next_shift) % plane_rows::sector;
                };
                float* outputs = shared.outputs[buffer] + lead;
                buffer ^= Layer::buffers - 1;
                // Waits until what was last written from this buffer has been read.
                if (leads) ptx::cp_async_bulk_wait_group_read<Layer::buffers - 1>();
                team_barrier();
                float* own = outputs + unit.part * (part_columns * stride_x);
                bool wrong = gather(own, bias, i, phase, half, shift);
                if (exists && wrong) repair(own, unit, phase, half, y, shift);
                team_barrier();
                int blank = blank_behind(index);
#pragma unroll 1
                for (int round = 0; round < pass_channels; round += team_warps * rows_together) {
                    int c = round + own_row * team_warps + unit.part;
                    bool own = c < pass_channels && c + 8 * half < rest;
                    if (!own) c = 0;
                    float* row = rows + c * arguments.destination_stride_c;
                    float* piece = outputs + (c * output_pitch + shift(c) + begin);
                    float value = bias[8 * half + c];
                    plane_rows::Plane plane{own, width,
                                            shared.carried[unit_channel + 8 * half + c]};
                    if (exists)
                        plane.write(row, piece, y > first_row, end_of(y, end_row, blank > 0),
                                    value);
                    if (!has_blank_rows || blank == 0) continue;
                    int blank_channel = Layer::bias ? unit_channel + 8 * half + c : 0;
                    const float* values = shared.blank[blank_channel];
#pragma unroll 1
                    for (int k = 1; k <= blank; ++k) {
                        row += arguments.destination_stride_h;
                        if (unsigned(y + k) >= unsigned(height)) continue;
                        plane.write_blank<blank_elements>(row, values, value, y + k > first_row,
                                                          end_of(y + k, end_row, k < blank));
                    }
                }
                if (leads) ptx::cp_async_bulk_commit_group();
            }
        }
    }

    // Fills in the values of blank rows. A block's channels never change.
    TCONV_DEVICE void fill_blank(const Position& of) {
        for (int c = own_thread() / 32; c < blank_channels; c += warps) {
            bool exists = Layer::bias && of.first_channel() + c < Layer::out_channels;
            Index channel = of.group() * Layer::out_channels + of.first_channel() + c;
            float value = exists ? static_cast<const float*>(arguments.bias)[channel] : 0;
            for (int e = own_thread() % 32; e < blank_elements; e += 32) shared.blank[c][e] = value;
        }
    }

    TCONV_DEVICE static plane_rows::End end_of(int y, int end_row, bool blank_below) {
        using plane_rows::End;
        return y + 1 >= end_row ? End::written : blank_below ? End::filled : End::carried;
    }

    // The number of phases in y without a tap between this one and the next that has some.
    TCONV_DEVICE static int blank_behind(int index) {
        int count = 0;
#pragma unroll
        for (int k = 0; k < Layer::stride_y - Layer::phases_y; ++k) count += before(k) == index;
        return count;
    }

    TCONV_DEVICE void run() {
        Position first(begin_tiles(), arguments);
        publish(first, 0);
        load_first(first);
        clear_weights();
        load_weights(first);
        if constexpr (has_blank_rows) fill_blank(first);
        while (true) {
            compute_tile();
            if (next_tile() >= end_tile()) {
                if constexpr (Layer::dynamic_tail) {
                    if (enter_row(arguments)) continue;
                }
                break;
            }
            if (new_weights) {
                __syncthreads();  // no thread still reads the last tile's weights
                turn ^= 1;
                load_weights(position());
            } else {
                turn ^= 1;
            }
        }
        ptx::cp_async_bulk_commit_group();  // of blank rows, which no pass waits for
        ptx::cp_async_bulk_wait_group_read<0>();
    }
};

}  // namespace

TCONV_KERNEL(mma_rows_forward, Layer::threads, Layer::blocks) {
    TCONV_DYNAMIC_SHARED(memory);
    Block(arguments, *reinterpret_cast<Shared*>(memory)).run();
}
