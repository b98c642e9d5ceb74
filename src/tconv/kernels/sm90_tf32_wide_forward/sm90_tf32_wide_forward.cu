// out[n, co, oy, ox] on Hopper's tensor cores, for layers whose kernel is their stride. An output
// then has one pixel and one tap. TF32 operands rounded to nearest, float32 sums.
//
// Rows of the matrix product are pixels, columns are (phase in y, output channel, phase in x). Its
// depth is the input channels, 32 to a stage.
//
// Pixels are the wgmma's A, from registers. They lie in shared memory as in the image, [channel]
// [pixel], and a thread rounds its operands on the way. They are neither transposed nor packed.
// Weights are B, from shared memory with 128-byte swizzle, laid out by sm90_tf32_wide_pack.
// A thread's sums are all phases in x of its pixels, which are neighbouring outputs: it writes them
// itself.
//
//   warps 0 to 2:     pixels of 32 channels, zeros beyond the image
//   warp 3:           their weights
//   warpgroups 1, 2:  consumers, each with half of the tile's pixels, on the same weights
//
// A tile is 128 pixels by `parts` * part_columns columns. Its pixels are neighbours in the line of
// all pixels that have outputs, row after row and image after image.
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
using wide::weight_bytes;

constexpr int warpgroup = 128;
constexpr int warpgroup_warps = warpgroup / 32;
constexpr int consumers = 2;
constexpr int pixel_warps = 3;
constexpr int wgmma_depth = 8;
constexpr int wgmma_rows = 64;
constexpr int chunks = (Layer::in_channels + depth - 1) / depth;
constexpr int tile_pixels = consumers * wgmma_rows;

// A warp copies a channel's pixels, each lane `copied` neighbours. Channels lie 8 banks apart, for
// the loads of four channels x eight pixels.
constexpr int copied = Layer::copied;
constexpr int lane_copies = tile_pixels / (32 * copied);
constexpr int plane = tile_pixels + 8;

struct Shared {
    alignas(1024) unsigned char weights[Layer::weight_stages][weight_bytes];
    alignas(16) float pixels[Layer::pixel_stages][depth * plane];
    uint64_t pixels_full[Layer::pixel_stages];
    uint64_t pixels_empty[Layer::pixel_stages];
    uint64_t weights_full[Layer::weight_stages];
    uint64_t weights_empty[Layer::weight_stages];
};
static_assert(sizeof(Shared) <= Layer::shared_bytes, "the host allots enough");

// Column tiles are innermost, as they share their pixels.
struct Position {
    int column_tile, group;
    int first;  // of the line of pixels

    TCONV_DEVICE Position(int tile, const Arguments& arguments) {
        int rest = tile / wide::column_tiles;
        column_tile = tile - rest * wide::column_tiles;
        int next = rest / Layer::groups;
        group = rest - next * Layer::groups;
        first = next * tile_pixels;
    }
};

// Where a pixel lies in the images.
struct Pixel {
    int image, y, x;

    TCONV_DEVICE Pixel(const Arguments& arguments, int line) {
        image = line / arguments.image_pixels;
        int rest = line - image * arguments.image_pixels;
        int row = rest / arguments.row_pixels;
        y = Layer::first_q_y + row;
        x = Layer::first_q_x + rest - row * arguments.row_pixels;
    }
};

// Hands a stage back. Called by each warp that has read it.
TCONV_DEVICE void hand_back(uint64_t* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
}

// The offset of a pixel in an image's channel, or -1 beyond the image. Pixels that are copied
// together are neighbours in the image, or all beyond it.
TCONV_DEVICE Index source_offset(const Arguments& arguments, int line) {
    Pixel at(arguments, line);
    bool inside = at.image < arguments.batch && at.y < arguments.source_height &&
                  at.x < arguments.source_width;
    return inside ? at.image * arguments.source_stride_n + at.y * arguments.source_stride_h +
                        at.x * arguments.source_stride_w
                  : -1;
}

// The channels of a stage that a warp copies: every third, from its own number on.
constexpr int warp_channels = (depth + pixel_warps - 1) / pixel_warps;

TCONV_DEVICE void produce_pixels(const Arguments& arguments, Shared& shared, int warp) {
    int lane = threadIdx.x % 32;
    Turn<Layer::pixel_stages> turn;
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile, arguments);
        Index offsets[lane_copies];  // of the first of a copy's pixels
#pragma unroll
        for (int i = 0; i < lane_copies; ++i) {
            offsets[i] = source_offset(arguments, at.first + (i * 32 + lane) * copied);
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
                bool inside = offsets[i] >= 0;
                const float* pixel = from + (inside ? offsets[i] : 0);
#pragma unroll
                for (int c = 0; c < warp_channels; ++c) {
                    if (c * pixel_warps + warp >= depth) continue;
                    bool exists = Layer::in_channels % depth == 0 || c * pixel_warps < left;
                    ptx::cp_async_ca<copied * 4>(
                        stage + c * pixel_warps * plane + i * 32 * copied,
                        pixel + (exists ? c * pixel_warps * arguments.source_stride_c : 0),
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

TCONV_DEVICE void produce_weights(const Arguments& arguments, Shared& shared) {
    Turn<Layer::weight_stages> turn;
    ptx::griddepcontrol_wait();  // the packing may still run; pixels do not depend on it
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile, arguments);
        const unsigned char* from =
            static_cast<const unsigned char*>(arguments.packed) +
            (Index(at.group) * wide::column_tiles + at.column_tile) * chunks * weight_bytes;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            uint64_t* full = &shared.weights_full[turn.stage];
            ptx::mbarrier_wait_parity(&shared.weights_empty[turn.stage], turn.parity ^ 1);
            ptx::mbarrier_arrive_expect_tx(full, weight_bytes);
            ptx::cp_async_bulk_global_to_shared(shared.weights[turn.stage], from, weight_bytes,
                                                full);
            from += weight_bytes;
            turn.advance();
        }
    }
}

using Sums = float[parts][Layer::part_columns / 2];

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
    Pixel of(arguments, at.first + pixel);
    int y = of.y * Layer::stride_y - Layer::padding_y;
    int x = of.x * Layer::stride_x - Layer::padding_x;
    Place place;
    place.to = static_cast<float*>(arguments.destination) +
               (of.image * arguments.destination_stride_n +
                Index(at.group) * Layer::out_channels * arguments.destination_stride_c +
                y * arguments.destination_stride_h + x);
    place.rows = existing(y, Layer::stride_y, arguments.destination_height);
    place.columns = existing(x, Layer::stride_x, arguments.destination_width);
    if (of.image >= arguments.batch) place.rows = 0;
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
    for (int i = 0; i < 2 * wide::part_units * channels * Layer::stride_x; ++i) {
        int phase = i % Layer::stride_x, rest = i / Layer::stride_x;
        int e = rest % channels, j = rest / channels % wide::part_units;
        int half = rest / (channels * wide::part_units);
        int unit = at.column_tile * wide::part_units + j;
        int phase_y = unit / wide::phase_units;
        int channel = unit % wide::phase_units * wide::unit_channels + lane % 4 * channels + e;
        Place place = place_of(arguments, at, first_pixel + lane / 4 + half * 8);
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
    const Place places[2] = {place_of(arguments, at, first_pixel + lane / 4),
                             place_of(arguments, at, first_pixel + lane / 4 + 8)};
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
            for (int half = 0; half < 2; ++half) {
                float values[Layer::stride_x];
#pragma unroll
                for (int phase = 0; phase < Layer::stride_x; ++phase) {
                    values[phase] = sums[phase / wide::low_phases]
                                        [4 * j + 2 * half + e + phase % wide::low_phases];
                    if constexpr (Layer::bias) values[phase] += bias;
                    not_finite.note(values[phase]);
                }
                const Place& place = places[half];
                bool row = exists && (place.rows >> phase_y & 1);
                write(place.to + offset, row ? place.columns : 0, values);
            }
        }
    }
    if (not_finite.any()) repair(arguments, at, first_pixel);
}

using Fragments = uint32_t[4];

// A consumer's way through the stages of pixels of all its tiles.
struct Pixels {
    Shared& shared;
    int own;  // where the thread's pixels lie, in the first of its channels
    Turn<Layer::pixel_stages> turn;

    TCONV_DEVICE Pixels(Shared& shared, int first_pixel)
        : shared(shared), own(threadIdx.x % 4 * plane + threadIdx.x % 32 / 4 + first_pixel) {}

    TCONV_DEVICE void wait() const {
        ptx::mbarrier_wait_parity(&shared.pixels_full[turn.stage], turn.parity);
    }

    TCONV_DEVICE void load(Fragments& a, int k) const {
        const float* origin = shared.pixels[turn.stage] + own + k * wgmma_depth * plane;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = __float_as_uint(origin[i % 2 * 8 + i / 2 * 4 * plane]);
        }
    }
};

// The products of one tile.
TCONV_DEVICE void multiply(Shared& shared, Pixels& pixels, Turn<Layer::weight_stages>& weights,
                           Sums& sums) {
    uint64_t weight_matrix = ptx::matrix_descriptor(shared.weights[0], 16, 8 * wide::line_bytes,
                                                    ptx::Swizzle::bytes_128);
    uint64_t* used = nullptr;  // the weights of the newest products, to be handed back
    Fragments a[depth / wgmma_depth];
    pixels.wait();
    pixels.load(a[0], 0);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        uint64_t* pixels_empty = &shared.pixels_empty[pixels.turn.stage];
        uint64_t b = ptx::advance(weight_matrix, weights.stage * weight_bytes);
        ptx::mbarrier_wait_parity(&shared.weights_full[weights.stage], weights.parity);
#pragma unroll
        for (int k = 0; k < depth / wgmma_depth; ++k) {
            // The next step's operands are loaded while this step's are rounded and multiplied.
            // They replace operands that the products of three steps ago have read.
            if (k + 1 < depth / wgmma_depth) {
                pixels.load(a[k + 1], k + 1);
            } else {
                pixels.turn.advance();
                if (chunk + 1 < chunks) {
                    pixels.wait();
                    pixels.load(a[0], 0);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) a[k][i] = tf32_bits(__uint_as_float(a[k][i]));
            ptx::wgmma_fence();
#pragma unroll
            for (int part = 0; part < parts; ++part) {
                ptx::wgmma_m64k8_tf32<Layer::part_columns>(
                    sums[part], a[k],
                    ptx::advance(b, part * wide::part_bytes + k * wgmma_depth * 4), true);
            }
            ptx::wgmma_commit_group();
            // The products before are over: their registers and weights are free.
            // NOTE: with one more under way ptxas serialises them (warning C7513).
            ptx::wgmma_wait_group<1>();
            if (k == 0 && used != nullptr) hand_back(used);
        }
        used = &shared.weights_empty[weights.stage];
        weights.advance();
        hand_back(pixels_empty);  // all in registers
    }
    ptx::wgmma_wait_group<0>();
    hand_back(used);
}

TCONV_DEVICE void consume(const Arguments& arguments, Shared& shared, int warp) {
    int consumer = warp / warpgroup_warps - 1;
    int first_pixel = consumer * wgmma_rows + warp % warpgroup_warps * 16;
    Pixels pixels(shared, first_pixel);
    Turn<Layer::weight_stages> weights;
    for (int tile = blockIdx.x; tile < arguments.tiles; tile += gridDim.x) {
        Position at(tile, arguments);
        Sums sums;
#pragma unroll
        for (int part = 0; part < parts; ++part) {
#pragma unroll
            for (int i = 0; i < Layer::part_columns / 2; ++i) sums[part][i] = 0.0f;
            // NOTE: else ptxas zeroes some between the products of a single stage (C7517).
            ptx::fence_registers(sums[part]);
        }
        multiply(shared, pixels, weights, sums);
#pragma unroll
        for (int part = 0; part < parts; ++part) ptx::fence_registers(sums[part]);
        store(arguments, at, first_pixel, sums);
    }
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
        ptx::fence_mbarrier_init();
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
