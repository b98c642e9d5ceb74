// out[n, co, oy, ox] on Hopper's tensor cores, for layers with many output channels and phases:
// TF32 operands rounded to nearest, float32 sums.
//
// Rows of the matrix product are pixels, columns are (phase in y, output channel, phase in x),
// depth is (32 input channels, slot, channel), where a slot is one shift of both axes.
//
// Pixels are the wgmma's A, from registers. They lie in shared memory as in the image, [channel]
// [position], where a thread finds its operands at any shift, and rounds them on the way. They are
// neither transposed nor packed. Weights are B, from shared memory with 128-byte swizzle, as
// sm90_tf32_wide_pack has laid them out. A thread's sums are all phases in x of its pixels, which
// are neighbouring outputs: it writes them itself.
//
//   warps 0 to 2:     pixels of 32 channels, zeros beyond the image
//   warp 3:           weights of a slot at a time
//   warpgroups 1, 2:  consumers, each with 64 * pixel_tiles pixels, on the same weights; the second
//                     starts `lead` slots after the first, or both would write at the same time
//
// A tile is 128 * pixel_tiles pixels by `parts` * part_columns columns. Its pixels are neighbours
// in the line of all positions, row after row with zeros between rows and between images (`flat`),
// or tile_rows x tile_columns pixels of one image.
#include <common/element.cuh>
#include <common/exact_output.cuh>
#include <common/ring.cuh>
#include <sm90_tf32_wide_forward/columns.cuh>
#include <ptx/bulk.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/griddepcontrol.cuh>
#include <ptx/mbarrier.cuh>
#include <ptx/memory.cuh>
#include <ptx/registers.cuh>
#include <ptx/setmaxnreg.cuh>
#include <ptx/wgmma.cuh>

namespace {

using Index = Layer::Index;
using wide::depth;
using wide::parts;

constexpr int warpgroup = 128;
constexpr int warpgroup_warps = warpgroup / 32;
constexpr int consumers = 2;
constexpr int pixel_warps = 3;
constexpr int wgmma_depth = 8;
constexpr int wgmma_rows = 64;
constexpr int chunks = (Layer::in_channels + depth - 1) / depth;
constexpr int pixel_tiles = Layer::pixel_tiles;  // of a consumer
constexpr int tile_pixels = consumers * pixel_tiles * wgmma_rows;

// A warp copies a channel's positions, each lane `copied` neighbours. Channels lie 8 banks apart,
// for the loads of four channels x eight positions.
constexpr int copied = Layer::copied;
constexpr int lane_copies = (Layer::patch_positions + 32 * copied - 1) / (32 * copied);
constexpr int plane = (Layer::patch_positions + 23) / 32 * 32 + 8;
static_assert(plane >= Layer::patch_positions && plane % 32 == 8, "channels 8 banks apart");
constexpr int weight_bytes = parts * wide::part_bytes;
constexpr int slots = sizeof(Layer::slot_y) / sizeof(int);
static_assert(Layer::lead < Layer::weight_stages,
              "the first consumer must not meet the ring's end");
static_assert(Layer::flat || Layer::tile_rows * Layer::tile_columns == tile_pixels,
              "whole rows of a tile");
static_assert(Layer::flat || Layer::tile_columns % 8 == 0, "eight neighbours in a row");

struct Shared {
    alignas(1024) unsigned char weights[Layer::weight_stages][weight_bytes];
    alignas(16) float pixels[Layer::pixel_stages][depth * plane];
    int shifts[slots];  // of each slot, in positions
    uint64_t pixels_full[Layer::pixel_stages];
    uint64_t pixels_empty[Layer::pixel_stages];
    uint64_t weights_full[Layer::weight_stages];
    uint64_t weights_empty[Layer::weight_stages];
    uint64_t leading;
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// Column tiles are innermost, as they share their pixels.
struct Position {
    int column_tile, group;
    int first;  // flat: of the line of positions
    int image, q_y, q_x;  // else: of the tile's first pixel

    TCONV_DEVICE Position(int tile, const Arguments& arguments) {
        int rest = tile / wide::column_tiles;
        column_tile = tile - rest * wide::column_tiles;
        int next = rest / Layer::groups;
        group = rest - next * Layer::groups;
        first = image = q_y = q_x = 0;
        if constexpr (Layer::flat) {
            first = next * tile_pixels;
        } else {
            rest = next / arguments.tiles_x;
            q_x = Layer::first_q_x + (next - rest * arguments.tiles_x) * Layer::tile_columns;
            image = rest / arguments.tiles_y;
            q_y = Layer::first_q_y + (rest - image * arguments.tiles_y) * Layer::tile_rows;
        }
    }
};

TCONV_DEVICE int row_pitch(const Arguments& arguments) {
    return Layer::flat ? arguments.pitch : Layer::patch_columns;
}

// Where a pixel of the tile lies in the patch at shift 0.
TCONV_DEVICE int patch_position(const Arguments& arguments, int pixel) {
    int reach = Layer::most_slot_y * row_pitch(arguments) + Layer::most_slot_x + Layer::skew;
    if constexpr (Layer::flat) {
        return reach + pixel;
    } else {
        int row = pixel / Layer::tile_columns;
        return reach + row * row_pitch(arguments) + pixel - row * Layer::tile_columns;
    }
}

// Hands a stage back. Called by each warp that has read it.
TCONV_DEVICE void hand_back(uint64_t* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
}

// The offset of a patch position in an image's channel, or -1 beyond the image. Positions that are
// copied together are neighbours in the image, or all beyond it.
TCONV_DEVICE Index source_offset(const Arguments& arguments, const Position& at, int position) {
    int image, y, x;
    if constexpr (Layer::flat) {
        int reach = Layer::most_slot_y * arguments.pitch + Layer::most_slot_x;
        int line = at.first + Layer::first_q_y * arguments.pitch + Layer::first_q_x - reach -
                   Layer::skew + position;
        if (line < 0) return -1;
        image = line / arguments.image_positions;
        int rest = line - image * arguments.image_positions;
        y = rest / arguments.pitch;
        x = rest - y * arguments.pitch;
    } else {
        image = at.image;
        int row = position / row_pitch(arguments);
        y = at.q_y - Layer::most_slot_y + row;
        x = at.q_x - Layer::most_slot_x - Layer::skew + position - row * row_pitch(arguments);
    }
    bool inside = image < arguments.batch && y >= 0 && y < arguments.source_height && x >= 0 &&
                  x < arguments.source_width;
    return inside ? image * arguments.source_stride_n + y * arguments.source_stride_h +
                        x * arguments.source_stride_w
                  : -1;
}

// The channels of a stage that a warp copies: every third, from its own number on.
constexpr int warp_channels = (depth + pixel_warps - 1) / pixel_warps;

TCONV_DEVICE void produce_pixels(const Arguments& arguments, Shared& shared, int warp) {
    int lane = threadIdx.x % 32;
    Turn<Layer::pixel_stages> turn;
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile, arguments);
        Index offsets[lane_copies];  // of the first of a copy's positions
#pragma unroll
        for (int i = 0; i < lane_copies; ++i) {
            offsets[i] = source_offset(arguments, at, (i * 32 + lane) * copied);
        }
        const float* from =
            static_cast<const float*>(arguments.source) +
            (Index(at.group) * Layer::in_channels + warp) * arguments.source_stride_c;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            ptx::mbarrier_wait_parity(&shared.pixels_empty[turn.stage], turn.parity ^ 1);
            float* stage = shared.pixels[turn.stage] + warp * plane + lane * copied;
            int left = Layer::in_channels - chunk * depth - warp;
            // NOTE: a copy frees its address register only when it has left. So there are many
            // addresses at once, and one instruction for each.
#pragma unroll
            for (int i = 0; i < lane_copies; ++i) {
                if ((i + 1) * 32 * copied > plane && (i * 32 + lane) * copied >= plane) continue;
                bool inside = offsets[i] >= 0;
                const float* position = from + (inside ? offsets[i] : 0);
#pragma unroll
                for (int c = 0; c < warp_channels; ++c) {
                    if (c * pixel_warps + warp >= depth) continue;
                    bool exists = Layer::in_channels % depth == 0 || c * pixel_warps < left;
                    ptx::cp_async_ca<copied * 4>(
                        stage + c * pixel_warps * plane + i * 32 * copied,
                        position + (exists ? c * pixel_warps * arguments.source_stride_c : 0),
                        inside && exists);
                }
            }
            ptx::cp_async_mbarrier_arrive_noinc(&shared.pixels_full[turn.stage]);
            from += depth * arguments.source_stride_c;
            turn.advance();
        }
    }
    ptx::cp_async_wait_all();
}

// The first slot of a column tile's slots with this mask. Slots are sorted by the parts that have
// taps there.
TCONV_DEVICE int slot_begin(int column_class, int mask) {
    return Layer::slot_begin[column_class * Layer::masks + mask];
}

TCONV_DEVICE constexpr int mask_parts(int mask) {
    int count = 0;
    for (int part = 0; part < parts; ++part) count += Layer::part_masks[mask] >> part & 1;
    return count;
}

TCONV_DEVICE void produce_weights(const Arguments& arguments, Shared& shared) {
    Turn<Layer::weight_stages> turn;
    ptx::griddepcontrol_wait();  // the packing may still run; pixels do not depend on it
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile, arguments);
        int column_class = Layer::column_class[at.column_tile];
        const unsigned char* from =
            static_cast<const unsigned char*>(arguments.packed) +
            (Index(at.group) * Layer::group_blocks + Layer::block_begin[at.column_tile]) * chunks *
                wide::part_bytes;
        for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll
            for (int mask = 0; mask < Layer::masks; ++mask) {
                int bytes = mask_parts(mask) * wide::part_bytes;
                int end = slot_begin(column_class, mask + 1);
#pragma unroll 1
                for (int slot = slot_begin(column_class, mask); slot < end; ++slot) {
                    uint64_t* full = &shared.weights_full[turn.stage];
                    ptx::mbarrier_wait_parity(&shared.weights_empty[turn.stage], turn.parity ^ 1);
                    ptx::mbarrier_arrive_expect_tx(full, bytes);
                    ptx::cp_async_bulk_global_to_shared(shared.weights[turn.stage], from, bytes,
                                                        full);
                    from += bytes;
                    turn.advance();
                }
            }
        }
    }
}

using Sums = float[pixel_tiles][parts][Layer::part_columns / 2];

// Outputs that a thread writes at a time: neighbours of one pixel.
constexpr int vector = Layer::vector;
static_assert(Layer::stride_x % vector == 0, "whole vectors");
static_assert(Layer::stride_y <= 32 && Layer::stride_x <= 32, "a word says which exist");

// Where a pixel has its outputs.
struct Place {
    float* to;  // of the first phase of both axes
    uint32_t rows;  // a bit for each phase in y whose output exists
    uint32_t columns;  // a bit for each phase in x, likewise
};

TCONV_DEVICE uint32_t existing(int first, int count, int end) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        bits |= static_cast<uint32_t>(first + i >= 0 && first + i < end) << i;
    }
    return bits;
}

TCONV_DEVICE Place place_of(const Arguments& arguments, const Position& at, int pixel) {
    int image, q_y, q_x;
    if constexpr (Layer::flat) {
        int line = at.first + pixel;
        image = line / arguments.image_positions;
        int rest = line - image * arguments.image_positions;
        int row = rest / arguments.pitch;
        q_y = Layer::first_q_y + row;
        q_x = Layer::first_q_x + rest - row * arguments.pitch;
    } else {
        image = at.image;
        int row = pixel / Layer::tile_columns;
        q_y = at.q_y + row;
        q_x = at.q_x + pixel - row * Layer::tile_columns;
    }
    int y = q_y * Layer::stride_y - Layer::padding_y, x = q_x * Layer::stride_x - Layer::padding_x;
    Place place;
    place.to = static_cast<float*>(arguments.destination) +
               (image * arguments.destination_stride_n +
                Index(at.group) * Layer::out_channels * arguments.destination_stride_c +
                y * arguments.destination_stride_h + x);
    place.rows = existing(y, Layer::stride_y, arguments.destination_height);
    place.columns = existing(x, Layer::stride_x, arguments.destination_width);
    if (image >= arguments.batch) place.rows = 0;
    return place;
}

// Writes the phases in x of one pixel and channel whose bit in `live` is set.
TCONV_DEVICE void write(float* to, uint32_t live, const float (&values)[Layer::stride_x]) {
#pragma unroll
    for (int phase = 0; phase < Layer::stride_x; phase += vector) {
        if (!(live >> phase & 1)) continue;  // the bits of a vector are alike
        if constexpr (vector == 4) {
            *reinterpret_cast<float4*>(to + phase) =
                make_float4(values[phase], values[phase + 1], values[phase + 2], values[phase + 3]);
        } else if constexpr (vector == 2) {
            *reinterpret_cast<float2*>(to + phase) = make_float2(values[phase], values[phase + 1]);
        } else {
            to[phase] = values[phase];
        }
    }
}

constexpr int channels = 2 / wide::low_phases;  // of a thread's two columns

// Recomputes the outputs of a tile that this thread has stored and that are not finite.
TCONV_DEVICE void repair(const Arguments& arguments, const Position& at, int first_pixel) {
    int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = 0; i < pixel_tiles * 2 * wide::part_units * channels * Layer::stride_x; ++i) {
        int phase = i % Layer::stride_x, rest = i / Layer::stride_x;
        int e = rest % channels, j = rest / channels % wide::part_units;
        int half = rest / (channels * wide::part_units);  // of all pixel tiles
        int unit = at.column_tile * wide::part_units + j;
        int phase_y = unit / wide::phase_units;
        int channel = unit % wide::phase_units * wide::unit_channels + lane % 4 * channels + e;
        Place place =
            place_of(arguments, at, first_pixel + half / 2 * wgmma_rows + lane / 4 + half % 2 * 8);
        if (phase_y < Layer::stride_y && channel < Layer::out_channels &&
            (place.rows >> phase_y & 1) && (place.columns >> phase & 1)) {
            exact::repair<true>(arguments,
                                place.to + (channel * arguments.destination_stride_c +
                                            phase_y * arguments.destination_stride_h + phase));
        }
    }
}

TCONV_DEVICE void store(const Arguments& arguments, const Position& at, int first_pixel,
                        const Sums& sums) {
    NotFinite<float> not_finite;
    int lane = threadIdx.x % 32;
    Place places[pixel_tiles][2];
#pragma unroll
    for (int m = 0; m < pixel_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            places[m][half] =
                place_of(arguments, at, first_pixel + m * wgmma_rows + lane / 4 + half * 8);
        }
    }
#pragma unroll
    for (int j = 0; j < wide::part_units; ++j) {
        int unit = at.column_tile * wide::part_units + j;
        int phase_y = unit / wide::phase_units;
        int first_channel = (unit - phase_y * wide::phase_units) * wide::unit_channels;
        if (phase_y >= Layer::stride_y) break;
#pragma unroll
        for (int e = 0; e < channels; ++e) {
            int channel = first_channel + lane % 4 * channels + e;
            bool exists =
                Layer::out_channels % wide::unit_channels == 0 || channel < Layer::out_channels;
            float bias = 0.0f;
            if constexpr (Layer::bias) {
                if (exists) {
                    bias = static_cast<const float*>(
                        arguments.bias)[at.group * Layer::out_channels + channel];
                }
            }
            Index offset =
                channel * arguments.destination_stride_c + phase_y * arguments.destination_stride_h;
#pragma unroll
            for (int m = 0; m < pixel_tiles; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Place& place = places[m][half];
                    float values[Layer::stride_x];
#pragma unroll
                    for (int phase = 0; phase < Layer::stride_x; ++phase) {
                        values[phase] = sums[m][phase / wide::low_phases]
                                            [4 * j + 2 * half + e + phase % wide::low_phases];
                        if constexpr (Layer::bias) values[phase] += bias;
                        not_finite.note(values[phase]);
                    }
                    bool row = exists && (place.rows >> phase_y & 1);
                    write(place.to + offset, row ? place.columns : 0, values);
                }
            }
        }
    }
    if (not_finite.any()) repair(arguments, at, first_pixel);
}

using Fragments = uint32_t[pixel_tiles][4];

// A consumer's walk through the slots of all chunks of its tiles and through the stages of pixels.
struct Walk {
    const Arguments& arguments;
    Shared& shared;
    int own[pixel_tiles][2];  // where the thread's pixels lie, in the first of its channels
    Turn<Layer::pixel_stages> pixels;
    const float* origin;  // of the slot whose fragments are loaded
    int slot, begin, end, chunk;

    TCONV_DEVICE Walk(const Arguments& arguments, Shared& shared, int first_pixel)
        : arguments(arguments), shared(shared) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int m = 0; m < pixel_tiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int pixel = first_pixel + m * wgmma_rows + half * 8;
                own[m][half] = lane % 4 * plane + lane / 4 + patch_position(arguments, pixel);
            }
        }
    }

    // Goes to the first slot of a tile, if it has any.
    TCONV_DEVICE void start(int column_class) {
        begin = slot = slot_begin(column_class, 0);
        end = slot_begin(column_class, Layer::masks);
        chunk = 0;
        if (begin != end) enter(shared.shifts[slot]);
    }

    // Goes to the next slot, whose shift the caller knows; behind the last there is none.
    TCONV_DEVICE void advance(int shift) {
        if (++slot == end) {
            slot = begin;
            pixels.advance();
            if (++chunk == chunks) return;
            ptx::mbarrier_wait_parity(&shared.pixels_full[pixels.stage], pixels.parity);
        }
        origin = shared.pixels[pixels.stage] - shift;
    }

    TCONV_DEVICE int next_shift() const {
        return shared.shifts[slot + 1 == end ? begin : slot + 1];
    }

    TCONV_DEVICE void load(Fragments& a, int k) const {
#pragma unroll
        for (int m = 0; m < pixel_tiles; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[m][i] =
                    __float_as_uint(origin[own[m][i % 2] + (k * wgmma_depth + i / 2 * 4) * plane]);
            }
        }
    }

private:
    TCONV_DEVICE void enter(int shift) {
        ptx::mbarrier_wait_parity(&shared.pixels_full[pixels.stage], pixels.parity);
        origin = shared.pixels[pixels.stage] - shift;
    }
};

// The products of one tile.
TCONV_DEVICE void multiply(Shared& shared, int column_class, Walk& walk,
                           Turn<Layer::weight_stages>& weights, int consumer, int& until_lead,
                           Sums& sums) {
    auto step = [&] {
        if (consumer == 0 && until_lead-- == 0) hand_back(&shared.leading);
    };
    uint64_t weight_matrix = ptx::matrix_descriptor(shared.weights[0], 16, 8 * wide::line_bytes,
                                                    ptx::Swizzle::bytes_128);
    walk.start(column_class);
    if (walk.begin == walk.end) {  // no phase has a tap
        for (int chunk = 0; chunk < chunks; ++chunk) {
            ptx::mbarrier_wait_parity(&shared.pixels_full[walk.pixels.stage], walk.pixels.parity);
            step();
            hand_back(&shared.pixels_empty[walk.pixels.stage]);
            walk.pixels.advance();
        }
        return;
    }
    uint64_t* used = nullptr;  // the weights of the newest products, to be handed back
    Fragments a[depth / wgmma_depth];
    walk.load(a[0], 0);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        uint64_t* pixels_empty = &shared.pixels_empty[walk.pixels.stage];
#pragma unroll
        for (int mask = 0; mask < Layer::masks; ++mask) {
            int count = slot_begin(column_class, mask + 1) - slot_begin(column_class, mask);
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                step();
                int shift = walk.next_shift();
                uint64_t b = ptx::advance(weight_matrix, weights.stage * weight_bytes);
                ptx::mbarrier_wait_parity(&shared.weights_full[weights.stage], weights.parity);
#pragma unroll
                for (int k = 0; k < depth / wgmma_depth; ++k) {
                    // The next step's operands are loaded while this step's are rounded and
                    // multiplied. They replace operands that the products of three steps ago have
                    // read.
                    if (k + 1 < depth / wgmma_depth) {
                        walk.load(a[k + 1], k + 1);
                    } else {
                        walk.advance(shift);
                        if (walk.chunk < chunks) walk.load(a[0], 0);
                    }
#pragma unroll
                    for (int m = 0; m < pixel_tiles; ++m) {
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            a[k][m][j] = tf32_bits(__uint_as_float(a[k][m][j]));
                        }
                    }
                    ptx::wgmma_fence();
#pragma unroll
                    for (int m = 0; m < pixel_tiles; ++m) {
                        int block = 0;
#pragma unroll
                        for (int part = 0; part < parts; ++part) {
                            if (Layer::part_masks[mask] >> part & 1) {
                                ptx::wgmma_m64k8_tf32<Layer::part_columns>(
                                    sums[m][part], a[k][m],
                                    ptx::advance(b, block * wide::part_bytes + k * wgmma_depth * 4),
                                    true);
                                ++block;
                            }
                        }
                    }
                    ptx::wgmma_commit_group();
                    // The products before are over: their registers and weights are free.
                    // NOTE: with one more under way ptxas serialises them (warning C7513).
                    ptx::wgmma_wait_group<1>();
                    if (k == 0 && used != nullptr) hand_back(used);
                }
                used = &shared.weights_empty[weights.stage];
                weights.advance();
            }
        }
        hand_back(pixels_empty);  // all in registers
    }
    ptx::wgmma_wait_group<0>();
    hand_back(used);
}

TCONV_DEVICE void consume(const Arguments& arguments, Shared& shared, int warp) {
    int consumer = warp / warpgroup_warps - 1;
    int first_pixel = consumer * pixel_tiles * wgmma_rows + warp % warpgroup_warps * 16;
    Walk walk(arguments, shared, first_pixel);
    Turn<Layer::weight_stages> weights;
    int until_lead = Layer::lead;
    if (consumer == 1) ptx::mbarrier_wait_parity(&shared.leading, 0);
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile, arguments);
        Sums sums;
#pragma unroll
        for (int m = 0; m < pixel_tiles; ++m) {
#pragma unroll
            for (int part = 0; part < parts; ++part) {
#pragma unroll
                for (int i = 0; i < Layer::part_columns / 2; ++i) sums[m][part][i] = 0.0f;
            }
        }
        multiply(shared, Layer::column_class[at.column_tile], walk, weights, consumer, until_lead,
                 sums);
#pragma unroll
        for (int m = 0; m < pixel_tiles; ++m) {
#pragma unroll
            for (int part = 0; part < parts; ++part) ptx::fence_registers(sums[m][part]);
        }
        store(arguments, at, first_pixel, sums);
    }
    if (consumer == 0 && until_lead >= 0) hand_back(&shared.leading);
}

}  // namespace

TCONV_KERNEL(sm90_tf32_wide_forward, Layer::threads, 1) {
    TCONV_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Layer::pixel_stages; ++stage) {
            ptx::mbarrier_init(&shared.pixels_full[stage], pixel_warps * 32);
            ptx::mbarrier_init(&shared.pixels_empty[stage], consumers * warpgroup_warps);
        }
        for (int stage = 0; stage < Layer::weight_stages; ++stage) {
            ptx::mbarrier_init(&shared.weights_full[stage], 1);
            ptx::mbarrier_init(&shared.weights_empty[stage], consumers * warpgroup_warps);
        }
        ptx::mbarrier_init(&shared.leading, warpgroup_warps);
        ptx::fence_mbarrier_init();
    }
    for (int slot = threadIdx.x; slot < slots; slot += Layer::threads) {
        shared.shifts[slot] = Layer::slot_y[slot] * row_pitch(arguments) + Layer::slot_x[slot];
    }
    __syncthreads();
    // NOTE: the compiler must know, before the roles branch, that the value is the same in all
    // lanes. Values derived from it then stay in uniform registers, from which wgmma takes its
    // descriptors.
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp < warpgroup_warps) {
        ptx::setmaxnreg_dec<Layer::producer_registers>();
        if (warp < pixel_warps) {
            produce_pixels(arguments, shared, warp);
        } else if (threadIdx.x % 32 == 0) {
            produce_weights(arguments, shared);
        }
    } else {
        // NOTE: in the branch that never joins the other, as ptxas ignores it elsewhere. Without
        // it, more than 128 sums and the second pixel tile's operands make ptxas serialise the
        // products.
        ptx::setmaxnreg_inc<Layer::consumer_registers>();
        consume(arguments, shared, warp);
    }
}
