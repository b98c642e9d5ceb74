// out[n, co, oy, ox] of layers that are bound by what they move, on mma.sync with TF32 operands.
//
// Pixel q of an axis stands for the outputs o = q*stride + phase - padding, phase in 0..stride-1.
// Tap t is of phase t*dilation % stride and reads input q - shift, shift = t*dilation / stride. At
// one slot, a shift of each axis, all phases that have a tap there read the same inputs: they are
// stacked, with the channels, into the rows of one product.
//
//   row     (phase in y, phase in x, out channel), 16 to a fragment; those without a tap are zero
//   column  one of 8 pixels of a row
//   depth   8 input channels of a slot
//
// A unit is what a warp accumulates at a time: unit_channels out channels with all their phases in
// x and unit_phases of those in y, of warp_rows rows of 8*fragments pixels. A block owns some units
// that share their inputs, a tile. Blocks stay and walk the tiles:
//
//   step      a patch of `depth` input channels with its halo, by cp.async, zero outside the
//             image; the next step's, be it of the next tile, is under way during this one
//   weights   of all input channels, as fragments, one vector a lane; kept until a tile of another
//             group or of other channels comes up
//   store     a warp gathers its outputs in shared memory in the order of the rows, at most 8 of
//             them at a time, then writes them piece by piece
//
// Layer::split: strict float32, six products for one (<common/split.cuh>). Weights lie in shared
// memory as parts, pixels are split in registers, and the products of 8 channels of a slot go to a
// temporary: the tensor cores cut their sums after every product, and an ordinary addition, which
// rounds, takes it to the unit's sums.
//
// Layer::team: the warps of a row gather it together and each writes whole rows of some channels,
// from lines of 128 bytes on: fewer sectors have parts.
//
// Layer::bulk: a block walks down the rows of an image, and they leave by bulk copies, in whole
// sectors (<mma_forward/plane_rows.cuh>). Layer::roll: so do the patch's rows, of which one is new
// to a tile. They come `rows_ahead` at a time, to the places of those that are no longer read:
// device memory gives neighbouring rows that are asked for together for less.
//
// Layer::hands_out: blocks go at different speeds, and even shares of the rows would end at
// different times. So each walks down `share` rows, then takes further ones, one at a time, from a
// count of its group tile, which a launch before has cleared. And where the patch's rows roll all
// blocks ask for the rows ahead in the same halves of `period` nanoseconds, if they need none
// before: device memory reads and writes in turns.
#include <common/constant_tables.cuh>
#include <common/exact_output.cuh>
#include <common/image_tiles.cuh>
#include <mma_forward/plane_rows.cuh>
#include <common/split.cuh>
#include <ptx/barrier.cuh>
#include <ptx/globaltimer.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/mma.cuh>

namespace {

using Index = Layer::Index;
using image_tiles::own_thread;
using image_tiles::store;

constexpr int threads = Layer::threads;
constexpr int warps = threads / 32;
constexpr int fragments = Layer::fragments;
constexpr int warp_rows = Layer::warp_rows;
constexpr int stride_x = Layer::stride_x;

constexpr int part_columns = 8 * fragments;
constexpr int tile_columns = Layer::parts * part_columns;
constexpr int tile_rows = Layer::row_groups * warp_rows;
constexpr int tile_channels = Layer::channel_blocks * Layer::unit_channels;
constexpr int channel_tiles = (Layer::out_channels + tile_channels - 1) / tile_channels;

constexpr int kinds = Layer::channel_blocks * Layer::phase_groups;  // units with other weights
constexpr int units = Layer::parts * Layer::row_groups * kinds;
constexpr int unit_rows = Layer::unit_phases * Layer::phases_x * Layer::unit_channels;
constexpr int row_fragments = (unit_rows + 15) / 16;

constexpr int depth = Layer::depth;
constexpr int chunks = (Layer::in_channels + depth - 1) / depth;
constexpr int steps_8 = (Layer::in_channels + 7) / 8;

static_assert(depth % 8 == 0, "a step is whole fragments");
static_assert(chunks == 1 || units <= warps, "sums live through a tile's steps");

// The patch: [depth][patch_rows][patch_pitch]. Its column `skew` is the least input column that
// the tile's first pixel reads; column 0 lies on a multiple of 4 of the image's columns.
constexpr int skew = Layer::skew;
constexpr int patch_rows = tile_rows + Layer::span_y;
constexpr int used_vectors = Layer::patch_vectors;
static_assert(4 * used_vectors >= skew + tile_columns + Layer::span_x,
              "a patch has what tiles read");
constexpr int patch_pitch = 4 * used_vectors;
// NOTE: 8 modulo 16: four channels by eight neighbouring pixels lie in all 32 banks.
constexpr int channel_rows = patch_rows + (Layer::roll ? Layer::rows_ahead : 0);
constexpr int patch_channel =
    channel_rows * patch_pitch + (24 - channel_rows * patch_pitch % 16) % 16;
constexpr int stages = Layer::roll ? 1 : 2;

// [kind][8 input channels][slot in y][slot in x][fragment of rows][lane][word]. Split: high, middle
// and low parts, each of row g and of row g + 8, of channels t and t + 4 together.
constexpr int lane_weights = Layer::split ? 6 : 4;
constexpr int fragment_weights = 32 * lane_weights;
constexpr int slot_weights = row_fragments * fragment_weights;
constexpr int step_weights = Layer::slots_y * Layer::slots_x * slot_weights;
constexpr int kind_weights = steps_8 * step_weights;

// Warps that gather their outputs together: those of the same rows and channels.
constexpr int team_warps = Layer::team ? Layer::parts : 1;
constexpr int teams = warps / team_warps;
static_assert(warps % team_warps == 0, "a warp's units are all of the same part");
static_assert(!Layer::roll ||
                  (Layer::bulk && tile_rows == 1 && chunks == 1 && Layer::rows_ahead > 0),
              "tiles of one row follow each other");
static_assert(teams < 16, "each has a barrier of its own, and 0 is __syncthreads()'s");
static_assert(!Layer::bulk || (teams == 1 && Layer::row_groups == 1),
              "a warp has all rows of a channel");
// Rows of a tile reach into its last warp's pixels.
static_assert(!Layer::bulk || (team_warps - 1) * part_columns >= 2 * plane_rows::sector,
              "rows have two sectors");

constexpr int group_tiles = Layer::groups * channel_tiles;

// A team's outputs of one pass: pieces of rows, of as many channels. A piece starts `head` after a
// multiple of 4 of the row.
constexpr int halves = Layer::unit_channels == 16 ? 2 : 1;  // of 8 channels, of lanes' rows
constexpr int pass_channels = Layer::unit_channels < 8 ? Layer::unit_channels : 8;
constexpr int head = Layer::head;
constexpr int team_columns = Layer::team ? tile_columns : part_columns;
constexpr int piece = team_columns * stride_x;
constexpr int output_pitch = Layer::output_pitch;
static_assert(head + piece <= output_pitch && output_pitch % 4 == 0, "rows start on a vector");
static_assert(Layer::unit_channels <= 8 || Layer::unit_channels == 16, "a pass is a lane's row");

struct Weights {
    alignas(16) float values[kinds * kind_weights];
    float bias[tile_channels];
};

using Position = image_tiles::Position<channel_tiles, tile_channels>;

// Layer::bulk: a gathered row starts up to a sector behind `lead`, and has one to spare behind its
// end.
constexpr int lead = Layer::bulk ? plane_rows::sector : 0;
static_assert(!Layer::bulk || lead + 2 * plane_rows::sector + head + piece <= output_pitch,
              "rows have room on either side");

constexpr bool has_blank_rows = Layer::phases_y < Layer::stride_y;  // that no tap reaches

// The tiles from `begin` to before `end`, in steps of `group_tiles`, follow each other on this
// block: all of its tiles or, where rows are handed out, its share or one of those.
struct Walk {
    Index begin, end;
};

constexpr int carried_channels = Layer::bulk ? tile_channels : 1;
// Their values, as many times as a copy of them takes at a time, of each channel or of all.
constexpr int blank_elements = Layer::bulk && has_blank_rows ? Layer::blank_elements : 8;
constexpr int blank_channels = Layer::bulk && has_blank_rows && Layer::bias ? tile_channels : 1;
static_assert(Layer::buffers == 1 || Layer::buffers == 2, "passes take turns");

struct Shared {
    alignas(16) float patch[stages][depth * patch_channel];
    alignas(32) float outputs[Layer::buffers][teams][pass_channels * output_pitch];
    // Layer::bulk: of each channel, what the rows so far left of a sector.
    float carried[carried_channels][plane_rows::sector];
    alignas(16) float blank[blank_channels][blank_elements];
    Weights weights;
    Walk walk;
    bool asks;  // Layer::hands_out: whether this is a time to ask for rows ahead
    Position positions[2];  // of this tile and the next: here they cost no registers
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// The widest store that output rows are aligned for.
using Stored = Vector<float, Layer::store_vector>;
constexpr int stored = Layer::store_vector;

// What a warp accumulates, of the tile's.
struct Unit {
    int part, row, phase_group, channel_block;

    TCONV_DEVICE explicit Unit(int unit) {
        // NOTE: parts innermost: warps side by side write neighbouring pieces of the same rows.
        part = unit % Layer::parts;
        int rest = unit / Layer::parts;
        channel_block = rest % Layer::channel_blocks;
        rest /= Layer::channel_blocks;
        phase_group = rest % Layer::phase_groups;
        row = rest / Layer::phase_groups * warp_rows;
    }

    TCONV_DEVICE int kind() const { return channel_block * Layer::phase_groups + phase_group; }
};

// What outputs are looked at for.
template <bool split>
struct Noting {
    using Of = NotFinite<float>;
};

template <>
struct Noting<true> {
    using Of = Unsound;
};

struct Block {
    const Arguments& arguments;
    Shared& shared;
    int stage = 0;
    int turn = 0;  // which of the positions is this tile's
    bool new_weights = true;
    int buffer = 0;  // that outputs are gathered in next
    // Layer::roll: the patch's rows before these have been asked for, and rounded in place.
    int asked = 0, rounded = 0;
    // Layer::hands_out: the first thread's, of the rows handed out the one that comes next.
    // NOTE: a register, shared memory would be waited for at once.
    uint32_t taken = 0;

    float sums[warp_rows][row_fragments][fragments][4];

    TCONV_DEVICE Block(const Arguments& arguments, Shared& shared)
        : arguments(arguments), shared(shared) {}

    TCONV_DEVICE const Position& position() const { return shared.positions[turn]; }

    TCONV_DEVICE Index next_tile() const {
        return position().tile + (Layer::bulk ? Index(group_tiles) : Index(gridDim.x));
    }

    TCONV_DEVICE Index end_tile() const { return Layer::bulk ? shared.walk.end : arguments.tiles; }

    // The first tile of this block. Blocks are a multiple of group_tiles where they walk down.
    TCONV_DEVICE Index begin_tiles() const {
        if constexpr (Layer::hands_out) {
            return begin_share(arguments);
        } else if constexpr (Layer::bulk) {
            Index walks = Index(gridDim.x) / group_tiles, walk = Index(blockIdx.x) / group_tiles;
            Index rows = arguments.tiles / group_tiles;
            Index most = rows / walks, longer = rows - most * walks;
            Index first = walk * most + (walk < longer ? walk : longer);
            Index own = Index(blockIdx.x) - walk * group_tiles;
            Index begin = first * group_tiles + own;
            Index end = begin + (most + (walk < longer ? 1 : 0)) * group_tiles;
            if (threadIdx.x == 0) shared.walk = {begin, end};
            return begin;
        } else {
            return Index(blockIdx.x);
        }
    }

    // --- rows that are handed out: templates, since other kernels have no arguments for them

    // The tiles of rows `begin` to before `end`, of this block's group tile.
    template <typename Row>
    TCONV_DEVICE static Walk tiles_of(Row begin, Row end) {
        Index own = Index(blockIdx.x) % group_tiles;
        return {begin * group_tiles + own, end * group_tiles + own};
    }

    template <typename Fields>
    TCONV_DEVICE Index begin_share(const Fields& arguments) const {
        Index first = Index(blockIdx.x) / group_tiles * arguments.share;
        Walk walk = tiles_of(first, first + arguments.share);
        if (threadIdx.x == 0) shared.walk = walk;
        return walk.begin;
    }

    template <typename Fields>
    TCONV_DEVICE void look_at_clock(const Fields& arguments) {
        if (threadIdx.x != 0) return;
        auto period = uint32_t(arguments.period);
        shared.asks = ptx::globaltimer() % period < period / 2;
    }

    // Takes the row behind this walk where its last tile is at hand; there may be none left.
    // NOTE: before the wait for the tile's copies, which takes as long. ptxas has few scoreboards:
    // the first thread's next load may wait for this one as well.
    template <typename Fields>
    TCONV_DEVICE void take_row(const Fields& arguments) {
        if (threadIdx.x != 0 || next_tile() < end_tile()) return;
        ptx::griddepcontrol_wait();  // the launch before clears the counts
        taken = atomicAdd(static_cast<uint32_t*>(arguments.counts) + blockIdx.x % group_tiles, 1u);
    }

    // Enters the row that was taken as a walk of its own, if it exists.
    template <typename Fields>
    TCONV_DEVICE bool enter_row(const Fields& arguments) {
        __syncthreads();  // no thread still reads the last walk, or its patch
        turn ^= 1;
        if (threadIdx.x == 0) {
            Index row = Index(gridDim.x) / group_tiles * arguments.share + Index(taken);
            shared.walk = tiles_of(row, row + 1);
            shared.positions[turn] = Position(shared.walk.begin, arguments);
        }
        __syncthreads();
        if (shared.walk.begin >= arguments.tiles) return false;
        load_first(position());
        return true;
    }

    // All threads' copies of the position are the same; they may read it after the next barrier.
    TCONV_DEVICE void publish(const Position& position, int turn) {
        if (threadIdx.x == 0) shared.positions[turn] = position;
    }

    // --- copies ---------------------------------------------------------------------------------

    struct PatchShape {
        static constexpr int rows = patch_rows;
        static constexpr int vectors = used_vectors;
        static constexpr int channels = depth;
        static constexpr int channel_pitch = patch_channel;
        // NOTE: sums live through the steps of deep tiles: unrolling further would spill.
        static constexpr int unrolled = chunks > 1 ? 2 : 4;
        TCONV_DEVICE static int place(int row, int column) { return row * patch_pitch + column; }
    };
    using Patch = image_tiles::Patch<threads, PatchShape>;

    struct RowShape {
        static constexpr int rows = 1;
        static constexpr int vectors = used_vectors;
        static constexpr int channels = depth;
        static constexpr int channel_pitch = patch_channel;
        static constexpr int unrolled = 4;
        TCONV_DEVICE static int place(int, int column) { return column; }
    };

    // Layer::roll: where a row of the patch lies; rows are counted from the image's first tile's.
    TCONV_DEVICE float* rolled(int row) const {
        return shared.patch[0] + row % channel_rows * patch_pitch;
    }

    // Layer::roll: asks for the rows before `end` that have not been asked for.
    TCONV_DEVICE void load_rows(const Position& of, int end) {
        int left = of.tile_x * tile_columns + Layer::first_column - skew;
#pragma unroll 1
        for (; asked < end; ++asked) {
            image_tiles::Patch<threads, RowShape>::load(rolled(asked), arguments, of, 0,
                                                        Layer::first_row + asked, left,
                                                        arguments.source_height);
        }
    }

    TCONV_DEVICE void load_patch(float* patch, const Position& of, int first_channel) const {
        int top = of.tile_y * tile_rows + Layer::first_row;
        int left = of.tile_x * tile_columns + Layer::first_column - skew;
        Patch::load(patch, arguments, of, first_channel, top, left, arguments.source_height);
    }

    // The patch of a walk's first tile.
    TCONV_DEVICE void load_first(const Position& first) {
        if constexpr (Layer::roll) {
            asked = rounded = first.tile_y;
            load_rows(first, first.tile_y + patch_rows);
        } else {
            load_patch(shared.patch[stage], first, 0);
        }
    }

    // The place of a tile's weight of a tap.
    TCONV_DEVICE static int weight_place(int in, int out, int tap_y, int tap_x) {
        int phase_y = Layer::tap_phase_y[tap_y];
        int group = phase_y / Layer::unit_phases;
        int kind = out / Layer::unit_channels * Layer::phase_groups + group;
        int row = (phase_y % Layer::unit_phases * Layer::phases_x + Layer::tap_phase_x[tap_x]) *
                      Layer::unit_channels +
                  out % Layer::unit_channels;
        int slot = Layer::tap_slot_y[tap_y] * Layer::slots_x + Layer::tap_slot_x[tap_x];
        return kind * kind_weights + in / 8 * step_weights + slot * slot_weights +
               row / 16 * fragment_weights + (row % 8 * 4 + in % 4) * lane_weights + row / 8 % 2 +
               in / 4 % 2 * 2;
    }

    // A thread has all taps of two channels.
    // NOTE: parts lie where the weight of 4 channels on was copied to. Where there is none, what
    // was left there may be the bits of a NaN: so zeros are copied.
    TCONV_DEVICE void load_weights(const Position& of) const {
        constexpr int channels = Layer::split ? 8 * steps_8 : Layer::in_channels;
        Weights& weights = shared.weights;
        const float* source = static_cast<const float*>(arguments.weight) +
                              of.group() * Layer::in_channels * arguments.weight_stride_in;
        constexpr bool whole = Layer::out_channels % tile_channels == 0;
#pragma unroll 1
        for (int i = own_thread(); i < channels * tile_channels; i += threads) {
            int in = i / tile_channels, out = i % tile_channels;
            int channel = of.first_channel() + out;
            bool inside = (whole || channel < Layer::out_channels) &&
                          (channels == Layer::in_channels || in < Layer::in_channels);
#pragma unroll
            for (int y = 0; y < Layer::kernel_y; ++y) {
#pragma unroll
                for (int x = 0; x < Layer::kernel_x; ++x) {
                    const float* from =
                        source +
                        (inside ? in * arguments.weight_stride_in +
                                      channel * arguments.weight_stride_out +
                                      y * arguments.weight_stride_h + x * arguments.weight_stride_w
                                : 0);
                    ptx::cp_async_ca<4>(&weights.values[weight_place(in, out, y, x)], from, inside);
                }
            }
        }
        const float* bias = static_cast<const float*>(arguments.bias);
        for (int i = own_thread(); i < tile_channels; i += threads) {
            if constexpr (Layer::bias) {
                bool inside = of.first_channel() + i < Layer::out_channels;
                Index offset = of.group() * Layer::out_channels + of.first_channel() + i;
                ptx::cp_async_ca<4>(&weights.bias[i], bias + (inside ? offset : 0), inside);
            } else {
                weights.bias[i] = 0;
            }
        }
    }

    // Those of rows, channels and slots without a tap, which no copy ever reaches.
    TCONV_DEVICE void clear_weights() const {
        for (int i = own_thread() * 4; i < kinds * kind_weights; i += threads * 4) {
            *reinterpret_cast<Vector<float, 4>*>(&shared.weights.values[i]) = Vector<float, 4>{};
        }
        __syncthreads();
    }

    // Of all threads, and those that no copy reaches, in an order in which no lanes meet in a bank.
    TCONV_DEVICE void round_weights() const {
        __syncthreads();
        for (int i = own_thread(); i < kinds * kind_weights / fragment_weights * 32; i += threads) {
            float* at = &shared.weights.values[i / 32 * fragment_weights + i % 32 * lane_weights];
            if constexpr (Layer::split) {
                Split top(at[0], at[2]), bottom(at[1], at[3]);
                using Pair = Vector<uint32_t, 2>;
                auto* to = reinterpret_cast<Pair*>(at);
                to[0] = {{top.high, bottom.high}};
                to[1] = {{top.middle, bottom.middle}};
                to[2] = {{top.low, bottom.low}};
            } else {
                auto values = *reinterpret_cast<Vector<float, 4>*>(at);
#pragma unroll
                for (float& value : values.values) value = operand<true>(value);
                *reinterpret_cast<Vector<float, 4>*>(at) = values;
            }
        }
    }

    // Waits for this step's copies and starts those of the next: of the tile's `next_channel`, or
    // where the step is the tile's last, of the next tile.
    TCONV_DEVICE void begin_step(bool last_of_tile, int next_channel) {
        if constexpr (Layer::hands_out) {
            if (last_of_tile) take_row(arguments);
        }
        ptx::cp_async_wait_all();
        if constexpr (!Layer::round_on_load) Patch::round(shared.patch[stage]);
        if (new_weights) round_weights();
        new_weights = false;
        // NOTE: the one barrier of a step: copies are visible after it, and no thread still reads
        // the stage that the next copies go to.
        __syncthreads();
        stage ^= 1;
        if (!last_of_tile) {
            load_patch(shared.patch[stage], position(), next_channel);
        } else if (next_tile() < end_tile()) {
            Position next(next_tile(), arguments);
            publish(next, turn ^ 1);
            new_weights = next.group_tile != position().group_tile;
            load_patch(shared.patch[stage], next, 0);
        }
    }

    // The same where rows roll. The first tile of an image comes at once, nothing is ahead of it.
    TCONV_DEVICE void begin_rolled() {
        if (position().tile_y == 0 && position().tile != shared.walk.begin) {
            __syncthreads();
            asked = rounded = 0;
            load_rows(position(), patch_rows);
        }
        if constexpr (Layer::hands_out) take_row(arguments);
        ptx::cp_async_wait_all();
        if constexpr (!Layer::round_on_load) {
            for (; rounded < asked; ++rounded) {
                image_tiles::Patch<threads, RowShape>::round(rolled(rounded));
            }
        }
        if (new_weights) round_weights();
        new_weights = false;
        if constexpr (Layer::hands_out) look_at_clock(arguments);
        __syncthreads();  // as above
        if (next_tile() < end_tile()) {
            Position next(next_tile(), arguments);
            publish(next, turn ^ 1);
            bool needed = asked < next.tile_y + patch_rows;
            bool asks = Layer::hands_out ? shared.asks : needed;
            if (next.tile_y > 0 && (needed || asks)) {
                Index tiles_after = (end_tile() - next.tile - 1) / group_tiles;
                int below = arguments.tiles_y - 1 - next.tile_y;
                if (tiles_after < below) below = int(tiles_after);
                // Rows that are read later on, and those that there is room for.
                int more = next.tile_y + patch_rows + below - asked;
                int room = position().tile_y + channel_rows - asked;
                if (room < more) more = room;
                load_rows(next, asked + (asks ? more : 1));
            }
        }
    }

    // --- products -------------------------------------------------------------------------------

    TCONV_DEVICE void clear_sums() {
#pragma unroll
        for (int i = 0; i < warp_rows; ++i) {
#pragma unroll
            for (int m = 0; m < row_fragments; ++m) {
#pragma unroll
                for (int n = 0; n < fragments; ++n) {
#pragma unroll
                    for (int v = 0; v < 4; ++v) sums[i][m][n][v] = 0;
                }
            }
        }
    }

    // The slot in y that pixel row i reads of patch row r, or -1.
    TCONV_DEVICE static int slot_of(int r, int i) {
        int found = -1;
#pragma unroll
        for (int k = 0; k < Layer::slots_y; ++k) {
            if (Layer::offset_y[k] == r - i) found = k;
        }
        return found;
    }

    TCONV_DEVICE static bool is_read(int r) {
        bool any = false;
#pragma unroll
        for (int i = 0; i < warp_rows; ++i) any |= slot_of(r, i) >= 0;
        return any;
    }

    // Whether some row of fragment m has a tap at the slot, in the phase group that has most.
    TCONV_DEVICE static bool has_tap(int m, int slot_y, int slot_x) {
        bool any = false;
#pragma unroll
        for (int row = 16 * m; row < 16 * m + 16; row += Layer::unit_channels == 16 ? 16 : 1) {
            int phase = row / Layer::unit_channels;
            if (row >= unit_rows) continue;
            bool y = Layer::phase_groups > 1;
            bool x = false;
#pragma unroll
            for (int t = 0; t < Layer::kernel_y; ++t) {
                y |= Layer::tap_slot_y[t] == slot_y &&
                     Layer::tap_phase_y[t] == phase / Layer::phases_x;
            }
#pragma unroll
            for (int t = 0; t < Layer::kernel_x; ++t) {
                x |= Layer::tap_slot_x[t] == slot_x &&
                     Layer::tap_phase_x[t] == phase % Layer::phases_x;
            }
            any |= x && y;
        }
        return any;
    }

    // Whether a phase group has a tap at the slot in y.
    TCONV_DEVICE static bool group_has_tap(int group, int slot_y) {
        bool any = Layer::phase_groups == 1;
#pragma unroll
        for (int t = 0; t < Layer::kernel_y; ++t) {
            any |= Layer::tap_slot_y[t] == slot_y && Layer::tap_phase_y[t] == group;
        }
        return any;
    }

    TCONV_DEVICE static uint32_t pixel_bits(float value) {
        return Layer::round_on_load ? ptx::cvt_rna_tf32_f32(value) : __float_as_uint(value);
    }

    // Column c of a fragment is pixel c/2 + c%2 * 4: a lane's two sums are 4 pixels apart and
    // neighbouring lanes' pixels neighbours, which spreads the gathering stores over the banks.
    TCONV_DEVICE static int pixel_of(int column) { return column / 2 + column % 2 * 4; }

    // Where row r of a tile's patch lies in a channel.
    TCONV_DEVICE static int row_place(int tile_y, int r) {
        return (Layer::roll ? (tile_y + r) % channel_rows : r) * patch_pitch;
    }

    // Adds the products of `count` times 8 channels of the patch to the unit's sums.
    TCONV_DEVICE void multiply(const float* patch, const Unit& unit, int first_8, int count) {
        int lane = own_thread() % 32;
        const float* source = patch + lane % 4 * patch_channel + unit.row * patch_pitch +
                              (unit.part * part_columns + skew + pixel_of(lane / 4));
        const float* weight =
            shared.weights.values + unit.kind() * kind_weights + first_8 * step_weights + lane * 4;
        int tile_y = Layer::roll ? position().tile_y : 0;
#pragma unroll 1
        for (int k = 0; k < count; ++k) {
#pragma unroll
            for (int r = 0; r < Layer::span_y + warp_rows; ++r) {
                if (!is_read(r)) continue;
                // NOTE: uniform over the warp. Groups of phases have no pixel rows to share.
                if (Layer::phase_groups > 1 && !group_has_tap(unit.phase_group, slot_of(r, 0))) {
                    continue;
                }
#pragma unroll
                for (int x = 0; x < Layer::slots_x; ++x) {
                    uint32_t a[warp_rows][row_fragments][4];
#pragma unroll
                    for (int i = 0; i < warp_rows; ++i) {
                        int slot = slot_of(r, i);
                        if (slot < 0) continue;
#pragma unroll
                        for (int m = 0; m < row_fragments; ++m) {
                            if (!has_tap(m, slot, x)) continue;
                            using Four = Vector<uint32_t, 4>;
                            Four part = *reinterpret_cast<const Four*>(
                                weight + (slot * Layer::slots_x + x) * slot_weights + m * 128);
#pragma unroll
                            for (int v = 0; v < 4; ++v) a[i][m][v] = part.values[v];
                        }
                    }
                    const float* from = source + row_place(tile_y, r) + Layer::offset_x[x];
#pragma unroll
                    for (int n = 0; n < fragments; ++n) {
                        uint32_t b[2] = {pixel_bits(from[8 * n]),
                                         pixel_bits(from[4 * patch_channel + 8 * n])};
#pragma unroll
                        for (int i = 0; i < warp_rows; ++i) {
                            int slot = slot_of(r, i);
                            if (slot < 0) continue;
#pragma unroll
                            for (int m = 0; m < row_fragments; ++m) {
                                if (!has_tap(m, slot, x)) continue;
                                ptx::mma_m16n8k8_tf32(sums[i][m][n], a[i][m], b);
                            }
                        }
                    }
                }
            }
            source += 8 * patch_channel;
            weight += step_weights;
        }
    }

    // The same with split operands. bfloat16 is twice as deep, so that two products of parts go
    // side by side. Each step's and slot's leave the tensor cores, which cut what they add: high
    // parts, whose one product has 16 bits, on their own, and are added as float32 adds.
    TCONV_DEVICE void multiply_split(const float* patch, const Unit& unit, int first_8, int count) {
        static_assert(!Layer::split || warp_rows == 1, "split tiles have one row of pixels a warp");
        int lane = own_thread() % 32;
        const float* source = patch + lane % 4 * patch_channel + unit.row * patch_pitch +
                              (unit.part * part_columns + skew + pixel_of(lane / 4));
        const float* weight = shared.weights.values + unit.kind() * kind_weights +
                              first_8 * step_weights + lane * lane_weights;
        // NOTE: ptxas loads as many slots ahead as it sees, until it spills. Which fragments of
        // rows have a tap is the slot's in x alone, but for units of several phases in y.
        constexpr bool unrolled = Layer::unit_phases > 1;
        int tile_y = position().tile_y;
#pragma unroll 1
        for (int k = 0; k < count; ++k) {
#pragma unroll(unrolled ? Layer::slots_y : 1)
            for (int slot = 0; slot < Layer::slots_y; ++slot) {
                if (Layer::phase_groups > 1 && !group_has_tap(unit.phase_group, slot)) continue;
                int offset = entry(Layer::offset_y, slot);
                const float* row = source + row_place(tile_y, offset);
                const float* fragment = weight + slot * (Layer::slots_x * slot_weights);
#pragma unroll(unrolled ? Layer::slots_x : 1)
                for (int x = 0; x < Layer::slots_x; ++x) {
                    const float* from = row + entry(Layer::offset_x, x);
                    uint32_t middle_high[fragments][2], low_middle[fragments][2];
#pragma unroll
                    for (int n = 0; n < fragments; ++n) {
                        Split parts(from[8 * n], from[4 * patch_channel + 8 * n]);
                        middle_high[n][0] = low_middle[n][1] = parts.middle;
                        middle_high[n][1] = parts.high;
                        low_middle[n][0] = parts.low;
                    }
#pragma unroll
                    for (int m = 0; m < row_fragments; ++m) {
                        // NOTE: uniform over the warp.
                        if (unrolled ? !has_tap(m, slot, x)
                                     : !(entry(Layer::slot_fragments, x) >> m & 1)) {
                            continue;
                        }
                        auto parts = reinterpret_cast<const Vector<uint32_t, 2>*>(
                            fragment + x * slot_weights + m * fragment_weights);
                        const auto &high = parts[0].values, &middle = parts[1].values,
                                   &low = parts[2].values;
                        const uint32_t both[4] = {high[0], high[1], middle[0], middle[1]};
#pragma unroll
                        for (int n = 0; n < fragments; ++n) {
                            constexpr float zero[4] = {};
                            float large[4], small[4];
                            const uint32_t pixel_high[1] = {middle_high[n][1]};
                            // NOTE: the order in which ptxas spills nothing.
                            ptx::mma_m16n8k8_bf16(small, low, pixel_high, zero);
                            ptx::mma_m16n8k16_bf16(small, both, low_middle[n]);
                            ptx::mma_m16n8k8_bf16(large, high, pixel_high, zero);
                            ptx::mma_m16n8k16_bf16(small, both, middle_high[n]);
#pragma unroll
                            for (int v = 0; v < 4; ++v) sums[0][m][n][v] += large[v];
#pragma unroll
                            for (int v = 0; v < 4; ++v) sums[0][m][n][v] += small[v];
                        }
                    }
                }
            }
            source += 8 * patch_channel;
            weight += step_weights;
        }
    }

    TCONV_DEVICE void add_products(const float* patch, const Unit& unit, int first_8, int count) {
        if constexpr (Layer::split) {
            multiply_split(patch, unit, first_8, count);
        } else {
            multiply(patch, unit, first_8, count);
        }
    }

    // --- outputs --------------------------------------------------------------------------------

    // The phases that have taps come first in every table, those without are listed apart.
    TCONV_DEVICE static int phase_y(int index) {
        int phase = 0;
#pragma unroll
        for (int k = 0; k < Layer::phases_y; ++k) {
            if (index == k) phase = Layer::phase_y[k];
        }
        return phase;
    }

    TCONV_DEVICE static int phase_x(int index) {
        int phase = 0;
#pragma unroll
        for (int k = 0; k < Layer::phases_x; ++k) {
            if (index == k) phase = Layer::phase_x[k];
        }
        return phase;
    }

    // Pieces of output rows, from `part` of the tile on. Element e of a piece lies in a vector of
    // the row with e - e%stored; the first and the last vector may belong to two tiles.
    struct Rows {
        float* destination;  // this lane's first vector, of output row 0 and the first channel
        int first, last;  // the elements of whole vectors
        int edge;  // the one element that this lane writes apart, or -1
        int y;  // output row of the tile's first row of pixels and phase 0
        int channel;

        TCONV_DEVICE Rows(const Arguments& arguments, const Position& at, int part, int columns) {
            int x = (at.tile_x * tile_columns + part * part_columns) * stride_x +
                    Layer::first_output_x - head;
            y = at.tile_y * (tile_rows * Layer::stride_y) + Layer::first_output_y;
            int lane = int(threadIdx.x) % 32;
            int begin = x < -head ? -x : head;
            int rest = arguments.destination_width - x;
            int end = rest < head + columns * stride_x ? rest : head + columns * stride_x;
            first = (begin + stored - 1) / stored * stored;
            last = end / stored * stored;
            edge = lane < stored ? first - stored + lane : last - stored + lane;
            if (lane >= 2 * stored || edge < begin || edge >= end) edge = -1;
            channel = at.first_channel();
            destination =
                static_cast<float*>(arguments.destination) +
                (at.image * arguments.destination_stride_n +
                 (at.group() * Layer::out_channels + channel) * arguments.destination_stride_c + x +
                 lane * stored);
        }

        // Writes the piece, of `count` elements or fewer, of the row where `row` is this lane's
        // place.
        template <int count, typename Values>
        TCONV_DEVICE void write(float* row, const Values& values) const {
            int lane = int(threadIdx.x) % 32 * stored;
            if constexpr (Layer::team && stored < 4) {
                constexpr int most = image_tiles::most_behind<stored>;
                int behind = image_tiles::behind_line<stored>(row - lane);
                row = ptx::opaque(row - behind);
                int own = lane - behind;
                int until = int(ptx::opaque(uint32_t(last - own)));
#pragma unroll
                for (int k = 0; k < count + most; k += 32 * stored) {
                    // NOTE: the first tile's first outputs are those of phases before the output.
                    bool begun = k >= most + head + stride_x + stored || own + k >= first;
                    if (begun && k < until) store(row + k, values.vector(own + k));
                }
                row += behind;
            } else {
#pragma unroll
                for (int k = 0; k < count; k += 32 * stored) {
                    if (k + lane >= first && k + lane < last) {
                        store(row + k, values.vector(k + lane));
                    }
                }
            }
            if constexpr (head > 0 && stored > 1) {
                if (edge >= 0) ptx::st_global_cs(row + (edge - lane), values.element(edge));
            }
        }
    };

    struct Gathered {
        const float* row;
        TCONV_DEVICE Stored vector(int e) const {
            return *reinterpret_cast<const Stored*>(row + e);
        }
        TCONV_DEVICE float element(int e) const { return row[e]; }
    };

    // Templates: a layer without empty phases has no use for them, and is not to be warned of it.
    struct Same {
        float value;
        template <typename Place>
        TCONV_DEVICE Stored vector(Place) const {
            Stored all;
#pragma unroll
            for (int v = 0; v < stored; ++v) all.values[v] = value;
            return all;
        }
        template <typename Place>
        TCONV_DEVICE float element(Place) const {
            return value;
        }
    };

    // Writes to shared memory what lanes hold of one phase in y and up to 8 channels, each from
    // `shift(channel of the 8)` on. Whether some of that is not finite.
    template <typename Shift>
    TCONV_DEVICE bool gather(float* outputs, const float* bias, int i, int phase, int half,
                             const Shift& shift) {
        constexpr int unit_channels = Layer::unit_channels;
        int lane = own_thread() % 32;
        typename Noting<Layer::split>::Of wrong;
#pragma unroll
        for (int m = 0; m < row_fragments; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int row = 16 * m + 8 * h;  // of lanes 0 to 3
                if (row >= unit_rows || (unit_channels == 16 && h != half)) continue;
                int own = row + lane / 4;
                int index = unit_channels % 8 == 0 ? row / unit_channels : own / unit_channels;
                int channel = unit_channels % 8 == 0 ? row % unit_channels + lane / 4
                                                     : own - index * unit_channels;
                bool used = unit_rows % 8 == 0 || own < unit_rows;
                if (Layer::unit_phases > 1) used = used && index / Layer::phases_x == phase;
                float added = Layer::bias && used ? bias[channel] : 0;
                int out = unit_channels % 8 == 0 ? lane / 4 : channel;
                float* to = outputs + out * output_pitch + shift(out) + head +
                            phase_x(index % Layer::phases_x) + lane % 4 * stride_x;
                if (!used) continue;
#pragma unroll
                for (int n = 0; n < fragments; ++n) {
                    const float* sum = &sums[i][m][n][2 * h];
                    float first = Layer::bias ? sum[0] + added : sum[0];
                    float second = Layer::bias ? sum[1] + added : sum[1];
                    to[8 * n * stride_x] = first;
                    to[(8 * n + 4) * stride_x] = second;
                    wrong.note(first, second);
                }
            }
        }
        // The phases in x that no tap reaches.
        if constexpr (Layer::phases_x < stride_x) {
            const float* row_bias = bias + 8 * half;
#pragma unroll
            for (int c = 0; c < pass_channels; ++c) {
                float value = row_bias[c];
#pragma unroll
                for (int k = 0; k < part_columns; k += 32) {
                    int pixel = k + lane;
                    if (k + 32 > part_columns && pixel >= part_columns) continue;
                    float* to = outputs + c * output_pitch + shift(c) + head + pixel * stride_x;
#pragma unroll
                    for (int e = 0; e < stride_x - Layer::phases_x; ++e) {
                        to[Layer::empty_x[e]] = value;
                    }
                }
            }
        }
        // Beside a tiny sum another lane's zero may be what is left of one.
        return Layer::split ? __any_sync(~0u, wrong.any()) : wrong.any();
    }

    // What the lane has gathered of output row y and is not finite.
    template <typename Shift>
    TCONV_DEVICE void repair(float* outputs, const Unit& unit, int phase, int half, int y,
                             const Shift& shift) const {
        constexpr int row_pixels = 2 * fragments;  // of a lane
        const Position& at = position();
        int lane = own_thread() % 32;
        int left = (at.tile_x * tile_columns + unit.part * part_columns) * stride_x +
                   Layer::first_output_x;
        int unit_channel = at.first_channel() + unit.channel_block * Layer::unit_channels;
#pragma unroll 1
        for (int e = 0; e < 2 * row_fragments * row_pixels; ++e) {
            int row = e / row_pixels * 8 + lane / 4;
            int index = row / Layer::unit_channels, channel = row % Layer::unit_channels;
            if (row >= unit_rows || index / Layer::phases_x != phase || channel / 8 != half)
                continue;
            int x = phase_x(index % Layer::phases_x) + (e % row_pixels * 4 + lane % 4) * stride_x;
            float* to = outputs + channel % 8 * output_pitch + shift(channel % 8) + head + x;
            bool inside = unit_channel + channel < Layer::out_channels &&
                          unsigned(left + x) < unsigned(arguments.destination_width);
            if (!inside || !is_wrong<Layer::split>(*to)) continue;
            *to = exact::output<!Layer::split>(arguments, at.image, at.group(),
                                               unit_channel + channel, y, left + x);
        }
    }

    TCONV_DEVICE static void team_barrier() {
        if constexpr (team_warps == 1) {
            __syncwarp();
        } else {
            ptx::bar_sync(1 + own_thread() / (32 * team_warps), 32 * team_warps);
        }
    }

    // The phase with taps, among these, in whose wake a phase in y without one is written: the last
    // before it, or the first.
    TCONV_DEVICE static constexpr int before(int empty) {
        int found = 0;
        for (int k = 1; k < Layer::phases_y; ++k) {
            if (Layer::phase_y[k] < Layer::empty_y[empty]) found = k;
        }
        return found;
    }

    // Where `row` is this lane's place in output row y, of a phase with taps: the rows beside it
    // that no tap reaches.
    // NOTE: at once. Rows that follow each other in memory share a sector, and written at other
    // times take a quarter longer.
    TCONV_DEVICE void store_empty(const Rows& rows, float* row, int y, int phase,
                                  float bias) const {
#pragma unroll
        for (int k = 0; k < Layer::stride_y - Layer::phases_y; ++k) {
            constexpr auto& phases = Layer::phase_y;
            if (before(k) != phase) continue;
            int down = Layer::empty_y[k] - phases[before(k)];
            if (unsigned(y + down) >= unsigned(arguments.destination_height)) continue;
            rows.template write<head + piece>(row + down * arguments.destination_stride_h,
                                              Same{bias});
        }
    }

    TCONV_DEVICE void store_sums(const Unit& unit) {
        constexpr bool whole = Layer::out_channels % tile_channels == 0;
        Rows rows(arguments, position(), Layer::team ? 0 : unit.part, team_columns);
        float* outputs = shared.outputs[0][own_thread() / (32 * team_warps)];
        float* own = outputs + (Layer::team ? unit.part * (part_columns * stride_x) : 0);
        int unit_channel = unit.channel_block * Layer::unit_channels;
        const float* bias = shared.weights.bias + unit_channel;
#pragma unroll
        for (int i = 0; i < warp_rows; ++i) {
            // NOTE: all phases of some channels before the next: their rows are neighbours in
            // memory.
#pragma unroll
            for (int pass = 0; pass < halves * Layer::unit_phases; ++pass) {
                int half = pass / Layer::unit_phases, phase = pass % Layer::unit_phases;
                int index = unit.phase_group * Layer::unit_phases + phase;
                int y = rows.y + (unit.row + i) * Layer::stride_y + phase_y(index);
                bool exists = unsigned(y) < unsigned(arguments.destination_height);
                if (Layer::phases_y == Layer::stride_y && !exists) continue;
                team_barrier();  // the last pass has been read
                auto shift = [](int) { return 0; };
                bool wrong = gather(own, bias, i, phase, half, shift);
                if (exists && wrong) repair(own, unit, phase, half, y, shift);
                team_barrier();
                int channel = unit_channel + 8 * half;
                float* row = rows.destination + (channel * arguments.destination_stride_c +
                                                 y * arguments.destination_stride_h);
                const float* from = outputs;
                int rest = Layer::out_channels - rows.channel - channel;
                if constexpr (Layer::team) {
#pragma unroll 1
                    for (int c = unit.part; c < pass_channels; c += team_warps) {
                        if (!whole && c >= rest) break;
                        float* to = row + c * arguments.destination_stride_c;
                        if (exists) rows.write<head + piece>(to, Gathered{from + c * output_pitch});
                        store_empty(rows, to, y, index, bias[8 * half + c]);
                    }
                } else {
                    constexpr int together = pass_channels < 4 ? pass_channels : 2;
#pragma unroll together
                    for (int c = 0; c < pass_channels; ++c) {
                        if (!whole && c >= rest) break;
                        if (exists) rows.write<head + piece>(row, Gathered{from});
                        store_empty(rows, row, y, index, bias[8 * half + c]);
                        row += arguments.destination_stride_c;
                        from += output_pitch;
                    }
                }
            }
        }
    }

    // Layer::bulk: the same by bulk copies. Rows of a plane ascend, from unit to unit and tile to
    // tile.
    TCONV_DEVICE void store_rows(const Unit& unit) {
        constexpr int begin = head - Layer::first_output_x;  // of a gathered row: column 0
        const Position& at = position();
        int height = arguments.destination_height, width = arguments.destination_width;
        int top = at.tile_y * (tile_rows * Layer::stride_y) + Layer::first_output_y;
        int below = top + tile_rows * Layer::stride_y;
        // The rows of the image that this block writes one after another around this tile.
        int first_row = at.tile == shared.walk.begin && top > 0 ? top : 0;
        int end_row = next_tile() >= shared.walk.end && below < height ? below : height;

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
                float* outputs = shared.outputs[buffer][0] + lead;
                buffer ^= Layer::buffers - 1;
                // What was last written from this buffer has been read.
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

    // The values of blank rows. Blocks stay with their channels.
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

    // Phases in y without a tap between this one and the next that has some.
    TCONV_DEVICE static int blank_behind(int index) {
        int count = 0;
#pragma unroll
        for (int k = 0; k < Layer::stride_y - Layer::phases_y; ++k) count += before(k) == index;
        return count;
    }

    // --- tiles ----------------------------------------------------------------------------------

    // Whether all of a unit lies beyond the output, or of the row that its warp writes with others.
    TCONV_DEVICE bool is_outside(const Unit& unit) const {
        const Position& at = position();
        int y = (at.tile_y * tile_rows + unit.row) * Layer::stride_y + Layer::first_output_y;
        int x = (at.tile_x * tile_columns + unit.part * part_columns) * stride_x +
                Layer::first_output_x;
        return y >= arguments.destination_height ||
               (team_warps == 1 && x >= arguments.destination_width);
    }

    TCONV_DEVICE void compute_units() {
        if constexpr (chunks == 1) {
            if constexpr (Layer::roll) {
                begin_rolled();
            } else {
                begin_step(true, 0);
            }
            // NOTE: where each warp has one unit at most, the next is not counted: the register is
            // wanted.
#pragma unroll 1
            for (int i = own_thread() / 32; i < units; i = (units > warps) ? i + warps : units) {
                Unit unit(i);
                if (is_outside(unit)) continue;
                clear_sums();
                add_products(shared.patch[Layer::roll ? 0 : stage ^ 1], unit, 0, steps_8);
                // NOTE: found again, what is known of it would not fit the registers beside split
                // operands.
                Unit found =
                    Layer::team || Layer::split ? Unit(int(ptx::opaque(uint32_t(i)))) : unit;
                if constexpr (Layer::bulk) {
                    store_rows(found);
                } else {
                    store_sums(found);
                }
            }
        } else {
            clear_sums();
#pragma unroll 1
            for (int first = 0; first < Layer::in_channels; first += depth) {
                bool last = first + depth >= Layer::in_channels;
                begin_step(last, first + depth);
                Unit unit(own_thread() / 32);
                if (unit.row >= tile_rows || is_outside(unit)) continue;
                int rest = steps_8 - first / 8;
                int count = rest < depth / 8 ? rest : depth / 8;
                add_products(shared.patch[stage ^ 1], unit, first / 8, count);
            }
            Unit unit(own_thread() / 32);
            if (unit.row < tile_rows && !is_outside(unit)) {
                if constexpr (Layer::bulk) {
                    store_rows(unit);
                } else {
                    store_sums(unit);
                }
            }
        }
    }

    TCONV_DEVICE void run() {
        Position first(begin_tiles(), arguments);
        publish(first, 0);
        load_first(first);
        clear_weights();
        load_weights(first);
        if constexpr (Layer::bulk && has_blank_rows) fill_blank(first);
        while (true) {
            compute_units();
            if (next_tile() >= end_tile()) {
                if constexpr (Layer::hands_out) {
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
        if constexpr (Layer::bulk) {
            ptx::cp_async_bulk_commit_group();  // of blank rows, which no pass waits for
            ptx::cp_async_bulk_wait_group_read<0>();
        }
    }
};

}  // namespace

TCONV_KERNEL(mma_forward, Layer::threads, Layer::blocks) {
    TCONV_DYNAMIC_SHARED(memory);
    Block(arguments, *reinterpret_cast<Shared*>(memory)).run();
}
