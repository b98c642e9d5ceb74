// out[n, co, oy, ox] of layers that are bound by what they move, on mma.sync with TF32 operands.
//
// Units, products and weights are those of <mma_forward/tiles.cuh>. Blocks are persistent: each
// computes the tiles from its own on in steps of the grid. A warp, or the warps of a row together
// (Layer::team), gather outputs in shared memory in the order of the rows, at most 8 rows at a
// time, and write them with vector stores.
#include <mma_forward/outputs.cuh>

namespace {

using namespace mma_tiles;
using image_tiles::store;

struct Shared {
    alignas(16) float patch[2][depth * patch_channel];
    alignas(32) float outputs[teams][pass_channels * output_pitch];
    Weights weights;
    Position positions[2];  // of this tile and the next: here they cost no registers
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// The widest store that output rows are aligned for.
using Stored = Vector<float, Layer::store_vector>;
constexpr int stored = Layer::store_vector;

struct Block : Outputs<Block, Shared> {
    using Outputs<Block, Shared>::Outputs;

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
        float* outputs = shared.outputs[own_thread() / (32 * team_warps)];
        float* own = outputs + (Layer::team ? unit.part * (part_columns * stride_x) : 0);
        int unit_channel = unit.channel_block * Layer::unit_channels;
        const float* bias = shared.weights.bias + unit_channel;
        // NOTE: all phases of some channels before the next: their rows are neighbours in
        // memory.
#pragma unroll
        for (int pass = 0; pass < halves * Layer::unit_phases; ++pass) {
            int half = pass / Layer::unit_phases, phase = pass % Layer::unit_phases;
            int index = unit.phase_group * Layer::unit_phases + phase;
            int y = rows.y + unit.row * Layer::stride_y + phase_y(index);
            bool exists = unsigned(y) < unsigned(arguments.destination_height);
            if (Layer::phases_y == Layer::stride_y && !exists) continue;
            team_barrier();  // the last pass has been read
            bool wrong = gather(own, bias, phase, half);
            if (exists && wrong) repair(own, unit, phase, half, y);
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

    TCONV_DEVICE void run() {
        Position first(Index(blockIdx.x), arguments);
        publish(first, 0);
        load_patch(shared.patch[stage], first, 0);
        clear_weights();
        load_weights(first);
        while (true) {
            compute_tile();
            if (next_tile() >= arguments.tiles) break;
            if (new_weights) {
                __syncthreads();  // no thread still reads the last tile's weights
                turn ^= 1;
                load_weights(position());
            } else {
                turn ^= 1;
            }
        }
    }
};

}  // namespace

TCONV_KERNEL(mma_forward, Layer::threads, Layer::blocks) {
    TCONV_DYNAMIC_SHARED(memory);
    Block(arguments, *reinterpret_cast<Shared*>(memory)).run();
}
