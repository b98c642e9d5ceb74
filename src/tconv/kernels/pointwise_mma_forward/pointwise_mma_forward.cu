// out[n, co, oy, ox] of layers with a kernel of 1x1, or with small images and few output channels,
// on mma.sync with TF32 operands, in one launch:
//
//     product[n, co, tap, iy, ix] = sum over ci of x[n, ci, iy, ix] * weight[ci, co, tap]
//     out[n, co, oy, ox] = bias[co] + sum over the taps that reach it of their pixel's product
//
// A block has pixels of an image, and rows of products: all taps of some output channels. With a
// kernel of 1x1 the pixels are a run of them, else all of the image.
//
//   load      chunks of input channels, of the pixels and of the rows' weights, by cp.async to a
//             ring in shared memory. All at once, if it holds them. Who copied a pixel also rounds
//             it, if many warps read it
//   multiply  a warp has 32 rows, a part of the pixels and every `splits`-th 8 input channels
//   store     for each output channel the run of outputs of these pixels: whole rows of an image,
//             so vectors, with the outputs that no tap reaches. See common/plane_vectors.cuh. The
//             warps' sums come from shared memory, and are added in the order of the splits.
//             Vectors without a pixel are stored while the first chunks are under way
//
// Only products of a pixel and a weight that exist are added: what is not finite needs no care.
// Channels behind the last are zeros in both operands.
#include <common/element.cuh>
#include <common/plane_vectors.cuh>
#include <ptx/cp_async.cuh>
#include <ptx/mma.cuh>

namespace {

using Index = Layer::Index;

constexpr int threads = Layer::threads;
constexpr int pixels = Layer::pixels;
constexpr int warp_pixels = pixels / Layer::pixel_warps;
constexpr int fragments = warp_pixels / 8;
constexpr int row_warps = Layer::rows / 32;
constexpr int splits = Layer::splits;
constexpr int taps = Layer::kernel_y * Layer::kernel_x;
constexpr int tile_channels = Layer::rows / taps;
constexpr bool dense = Layer::pointwise && Layer::stride_y == 1 && Layer::stride_x == 1;
constexpr bool has_gaps = Layer::pointwise && !dense;  // outputs without a pixel
constexpr int steps = (Layer::in_channels + 7) / 8;
constexpr int chunk = Layer::chunk;  // input channels that arrive together
constexpr int chunks = (Layer::in_channels + chunk - 1) / chunk;
constexpr int slots = Layer::slots;  // of the ring, for a chunk each
constexpr int ahead = slots == chunks ? chunks : slots - 1;  // chunks under way at first
// Whether pixels are rounded before they are multiplied: it pays where several warps read them.
constexpr bool rounds_first = row_warps > 2;

// Lanes of 4 channels and 8 pixels then meet all banks, and those of 4 channels and 4 pairs.
constexpr int pitch = Layer::pitch;
// Weights as they lie have any pitch but a multiple of 4. Lanes of 4 channels and 8 rows then meet
// all banks if the rows are `unit` together and 4 * unit apart. A lane's four are `unit` apart.
constexpr bool lies = Layer::lies;
constexpr int weight_pitch = lies ? Layer::out_channels : Layer::rows + 8;
constexpr int weight_columns = lies ? Layer::out_channels : Layer::rows;
constexpr int unit = lies ? Layer::out_channels % 2 == 0 ? 2 : 1 : 8;
constexpr int slot_floats = chunk * (pitch + weight_pitch);
static_assert(pitch % 16 == 8 && pitch >= pixels, "channels are 8 banks apart");
static_assert(threads == 32 * row_warps * Layer::pixel_warps * splits, "a warp for each part");
static_assert(chunk % (8 * splits) == 0 && ahead > 0, "each warp has a part of a chunk");

// The block's pixels and output channels.
struct Tile {
    int image, group, first_channel, first_pixel, count;

    TCONV_DEVICE explicit Tile(const Arguments& a) {
        constexpr int channel_tiles = (Layer::out_channels + tile_channels - 1) / tile_channels;
        int rest = int(blockIdx.x);
        first_channel = rest % channel_tiles * tile_channels;
        rest /= channel_tiles;
        first_pixel = rest % a.tiles * a.tile_pixels;
        rest /= a.tiles;
        group = rest % Layer::groups;
        image = rest / Layer::groups;
        int left = a.source_height * a.source_width - first_pixel;
        count = left < a.tile_pixels ? left : a.tile_pixels;
    }
};

// Calls `of(channel, place)` for the vectors of [chunk][pitch], `columns` in a row, that are this
// thread's: all of one column.
template <int columns, int pitch, int vector, typename Of>
TCONV_DEVICE void each_vector(float* shared, Of of) {
    constexpr int rows = threads / columns;
    static_assert(rows > 0, "a thread has a column");
    int row = int(threadIdx.x) / columns;
    if (row >= rows) return;
    float* place = shared + row * pitch + int(threadIdx.x) % columns * vector;
#pragma unroll
    for (int i = 0; i < (chunk + rows - 1) / rows; ++i) {
        int k = row + i * rows;
        if (chunk % rows == 0 || k < chunk) of(k, place + i * rows * pitch);
    }
}

template <int vector>
TCONV_DEVICE void copy(float* to, const float* from, bool valid) {
    if constexpr (vector == 4) {
        ptx::cp_async_cg_16(to, from, valid);
    } else {
        ptx::cp_async_ca<4 * vector>(to, from, valid);
    }
}

// What a thread copies of a chunk: one column, so one place of every channel.
struct Column {
    const float* first;  // of the first channel
    Index stride;        // from channel to channel
    bool exists;

    // Copies in vectors, zeros for what does not exist.
    template <int columns, int pitch, int vector>
    TCONV_DEVICE void load(int first_channel, float* shared) const {
        const float* from = first + (first_channel + int(threadIdx.x) / columns) * stride;
        each_vector<columns, pitch, vector>(shared, [&](int k, float* to) {
            bool valid = exists && (Layer::in_channels % chunk == 0 ||
                                    first_channel + k < Layer::in_channels);
            copy<vector>(to, from, valid);
            from += threads / columns * stride;
        });
    }
};

// Rounds the pixels that this thread copied, which no other has read yet.
template <int vector>
TCONV_DEVICE void round_vectors(float* shared) {
    each_vector<pixels / vector, pitch, vector>(shared, [](int, float* place) {
        auto values = *reinterpret_cast<Vector<float, vector>*>(place);
#pragma unroll
        for (float& value : values.values) value = __uint_as_float(tf32_bits(value));
        *reinterpret_cast<Vector<float, vector>*>(place) = values;
    });
}

// Pixels of a copy: the widest vectors that planes without gaps begin and end with.
TCONV_DEVICE int longest_vector(const Arguments& a, const Tile& tile, const float* source) {
    bool whole = a.source_stride_w == 1 && a.source_stride_h == a.source_width;
    auto counts = uint64_t(a.source_height * a.source_width | a.tile_pixels | a.source_stride_c) |
                  reinterpret_cast<uint64_t>(source) / 4;
    if (!whole || counts % 2 != 0) return 1;
    return counts % 4 == 0 ? 4 : 2;
}

template <int length>
struct Length {
    static constexpr int value = length;
};

// Calls `with(Length)`.
template <typename With>
TCONV_DEVICE void with_vector(int vector, With with) {
    if (vector == 4) {
        with(Length<4>());
    } else if (vector == 2) {
        with(Length<2>());
    } else {
        with(Length<1>());
    }
}

// A thread's pixels.
template <int vector>
TCONV_DEVICE Column pixel_column(const Arguments& a, const Tile& tile, const float* source) {
    int place = int(threadIdx.x) % (pixels / vector) * vector;
    bool exists = place < tile.count;
    int pixel = tile.first_pixel + (exists ? place : 0);
    if (vector > 1) return {source + pixel, a.source_stride_c, exists};  // rows without gaps
    int y = pixel / a.source_width, x = pixel - y * a.source_width;
    return {source + y * a.source_stride_h + x * a.source_stride_w, a.source_stride_c, exists};
}

// Whether weights are copied in vectors: of four rows, or as they lie.
TCONV_DEVICE bool weights_in_vectors(const Arguments& a) {
    bool follow = lies ? a.weight_stride_in == Layer::out_channels
                       : Layer::out_channels % 4 == 0 && a.weight_stride_in % 4 == 0;
    return taps == 1 && follow && a.weight_stride_out == 1 &&
           reinterpret_cast<uint64_t>(a.weight) % 16 == 0;
}

// Copies a chunk's weights as they lie, zeros behind the last. Pointers move on by constants.
TCONV_DEVICE void load_lying(const float* first, int first_channel, float* shared) {
    constexpr int vectors = chunk * weight_pitch / 4;
    static_assert(!lies || Layer::in_channels % 4 == 0, "no vector is a part");
    int left = (Layer::in_channels - first_channel) * weight_pitch / 4;
    const float* from = first + first_channel * weight_pitch + 4 * int(threadIdx.x);
    float* to = shared + 4 * int(threadIdx.x);
#pragma unroll
    for (int i = 0; i < (vectors + threads - 1) / threads; ++i) {
        int v = int(threadIdx.x) + i * threads;
        bool valid = Layer::in_channels % chunk == 0 || v < left;
        if ((i + 1) * threads <= vectors || v < vectors) {
            ptx::cp_async_cg_16(to + 4 * threads * i, from + 4 * threads * i, valid);
        }
    }
}

// A thread's weights. Rows that do not exist are zeros: nobody reads their sums.
template <int vector>
TCONV_DEVICE Column weight_column(const Arguments& a, const Tile& tile) {
    int row = int(threadIdx.x) % (weight_columns / vector) * vector;
    int of_row = tile.first_channel + row / taps, tap = row % taps;
    bool exists = row < tile_channels * taps && of_row < Layer::out_channels;
    if (!exists) of_row = tile.first_channel, tap = 0;
    Index offset = Index(tile.group) * Layer::in_channels * a.weight_stride_in +
                   of_row * a.weight_stride_out + tap / Layer::kernel_x * a.weight_stride_h +
                   tap % Layer::kernel_x * a.weight_stride_w;
    return {static_cast<const float*>(a.weight) + offset, a.weight_stride_in, exists};
}

// Where the sums of a row are, which lanes g = lane / 4 have as their i-th: at 8 * i + g of 32.
TCONV_DEVICE int place_of_row(unsigned row) {
    unsigned i = row / unit % 4, g = row % 32 / (4 * unit) * unit + row % unit;
    return int(row / 32 * 32 + 8 * i + g);
}

// Adds a lane's products of 8 input channels: four rows, two of each fragment, for channels t and
// t + 4, where t = lane % 4.
TCONV_DEVICE void multiply(const float* of_pixels, const float* of_weights,
                           float (&sums)[2][fragments][4]) {
    uint32_t a[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        int row = (i / 4 * 2 + i % 2) * unit, channel = i % 4 / 2 * 4;
        a[i / 4][i % 4] = tf32_bits(of_weights[channel * weight_pitch + row]);
    }
#pragma unroll
    for (int j = 0; j < fragments; ++j) {
        float found[2] = {of_pixels[8 * j], of_pixels[8 * j + 4 * pitch]};
        uint32_t b[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            b[i] = rounds_first ? __float_as_uint(found[i]) : tf32_bits(found[i]);
        }
        ptx::mma_m16n8k8_tf32(sums[0][j], a[0], b);
        ptx::mma_m16n8k8_tf32(sums[1][j], a[1], b);
    }
}

// The sum of the splits' sums, [split][row][pitch].
template <int vector = 1>
TCONV_DEVICE Vector<float, vector> added(const float* of_first) {
    auto sum = *reinterpret_cast<const Vector<float, vector>*>(of_first);
#pragma unroll
    for (int s = 1; s < splits; ++s) {
        auto other =
            *reinterpret_cast<const Vector<float, vector>*>(of_first + s * Layer::rows * pitch);
#pragma unroll
        for (int v = 0; v < vector; ++v) sum.values[v] += other.values[v];
    }
    return sum;
}

// The sum of the products that reach an output, whose taps have a row each.
TCONV_DEVICE float gathered(const Arguments& a, const float* of_channel, Output at) {
    float sum = 0;
#pragma unroll 1
    for (int tap_y = 0; tap_y < Layer::kernel_y; ++tap_y) {
        int reach_y = int(at.y) + Layer::padding_y - tap_y * Layer::dilation_y;
        int y = reach_y / Layer::stride_y;
        if (reach_y < 0 || y * Layer::stride_y != reach_y || y >= a.source_height) continue;
#pragma unroll 1
        for (int tap_x = 0; tap_x < Layer::kernel_x; ++tap_x) {
            int reach_x = int(at.x) + Layer::padding_x - tap_x * Layer::dilation_x;
            int x = reach_x / Layer::stride_x;
            if (reach_x < 0 || x * Layer::stride_x != reach_x || x >= a.source_width) continue;
            int tap = tap_y * Layer::kernel_x + tap_x;
            sum += added(of_channel + tap * pitch + y * a.source_width + x).values[0];
        }
    }
    return sum;
}

// What vectors are stored: those of which no output has a pixel, those of which some have, or all.
enum class Stored { gaps, pixels, all };

template <Stored stored>
TCONV_DEVICE void store_outputs(const Arguments& a, const Tile& tile, const float* sums) {
    int first_row = tile.first_pixel / a.source_width;
    int rest = a.destination_height - first_row * Layer::stride_y;
    int rows = (tile.count + a.source_width - 1) / a.source_width * Layer::stride_y;
    if (!Layer::pointwise || rows > rest) rows = rest;
    int length = dense ? tile.count : rows * a.destination_width;
    Index begin =
        dense ? tile.first_pixel : Index(first_row) * Layer::stride_y * a.destination_width;
    // Threads side by side along the runs of each of `together` channels.
    constexpr int least = (dense && pixels <= 64) || threads < 128 ? 16 : 32;
    constexpr int most = threads / least, together = tile_channels < most ? tile_channels : most;
    constexpr int side_by_side = threads / together / least * least;
    int own = int(threadIdx.x) / side_by_side, place = int(threadIdx.x) % side_by_side * 4;
    if (own >= together) return;
    int channels = Layer::out_channels - tile.first_channel;
    if (channels > tile_channels) channels = tile_channels;
    // NOTE: planes four apart begin at the same place of a vector. So a thread's channels do.
    constexpr int apart = together % 4 == 0 ? together : 4 * together;
    for (int begun = own; begun < apart && begun < channels; begun += together) {
        int channel = tile.group * Layer::out_channels + tile.first_channel + begun;
        Index first =
            tile.image * a.destination_stride_n + channel * a.destination_stride_c + begin;
        int behind = behind_vector(first);
        for (int e = place - behind; e < length; e += 4 * side_by_side) {
            Output at(dense ? 0 : e, a);
            int pixel[4] = {};
            bool reached[4], any = false;
            Output next = at;
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                reached[v] = unsigned(e + v) < unsigned(length) && next.has_pixel();
                any = any || reached[v];
                if constexpr (dense) {
                    if (reached[v]) pixel[v] = e + v;
                } else {
                    if (reached[v]) {
                        pixel[v] = int(next.y) / Layer::stride_y * a.source_width +
                                   int(next.x) / Layer::stride_x;
                    }
                    next.advance(a.destination_width);
                }
            }
            if (stored != Stored::all && any != (stored == Stored::pixels)) continue;
            float* run = static_cast<float*>(a.destination) + first;
            const float* of_channel = sums + begun * (taps * pitch);
            auto bias_of = [&](int c) {
                const float* biases = static_cast<const float*>(a.bias) + channel - begun;
                return Layer::bias ? biases[c] : 0;
            };
            if (dense && behind == 0 && e + 4 <= length) {
#pragma unroll(lies ? 2 : 1)
                for (int c = begun; c < channels; c += apart) {
                    float bias = bias_of(c);
                    if (lies) of_channel = sums + place_of_row(c) * pitch;
                    auto of = added<4>(of_channel + e);
                    const float (&v)[4] = of.values;
                    ptx::st_global_cs_v4(
                        run + e, make_float4(v[0] + bias, v[1] + bias, v[2] + bias, v[3] + bias));
                    run += apart * a.destination_stride_c;
                    of_channel += apart * (taps * pitch);
                }
                continue;
            }
#pragma unroll 1
            for (int c = begun; c < channels; c += apart) {
                if (lies) of_channel = sums + place_of_row(c) * pitch;
                float bias = bias_of(c), values[4] = {};
                if constexpr (!Layer::pointwise) {
                    Output reader = at;
#pragma unroll
                    for (int v = 0; v < 4; ++v) {
                        bool exists = unsigned(e + v) < unsigned(length);
                        if (exists) values[v] = gathered(a, of_channel, reader);
                        reader.advance(a.destination_width);
                    }
                } else if constexpr (stored != Stored::gaps) {
#pragma unroll
                    for (int v = 0; v < 4; ++v) {
                        float found = added(of_channel + pixel[v]).values[0];
                        values[v] = reached[v] ? found : 0;
                    }
                }
#pragma unroll
                for (int v = 0; v < 4; ++v) values[v] += bias;
                store_vector(run, e, length, values);
                run += apart * a.destination_stride_c;
                of_channel += apart * (taps * pitch);
            }
        }
    }
}

}  // namespace

TCONV_KERNEL(pointwise_mma_forward, Layer::threads, Layer::blocks) {
    TCONV_DYNAMIC_SHARED(memory);
    auto shared = reinterpret_cast<float*>(memory);
    Tile tile(arguments);
    const float* source = static_cast<const float*>(arguments.source) +
                          tile.image * arguments.source_stride_n +
                          Index(tile.group) * Layer::in_channels * arguments.source_stride_c;
    int vector = longest_vector(arguments, tile, source);
    bool weight_vectors = weights_in_vectors(arguments);
    Column of_pixels;
    with_vector(vector, [&](auto length) {
        of_pixels = pixel_column<length.value>(arguments, tile, source);
    });
    Column of_weights = weight_vectors && !lies ? weight_column<4>(arguments, tile)
                                                : weight_column<1>(arguments, tile);
    const float* lying = static_cast<const float*>(arguments.weight) +
                         tile.group * (Layer::in_channels * Layer::out_channels);

    int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    int split = warp / (row_warps * Layer::pixel_warps);
    int first_row = warp % row_warps * 32;
    int first_pixel = warp / row_warps % Layer::pixel_warps * warp_pixels;
    // A slot has weights, then pixels, which rows behind the last weight read: no sum that counts.
    int of_lane = chunk * weight_pitch + lane % 4 * pitch + first_pixel + lane / 4;
    int row_of_lane = lane / 4 % unit + lane / 4 / unit * (4 * unit);
    int weights_of_lane = lane % 4 * weight_pitch + first_row + row_of_lane;
    auto bring = [&](int c) {
        if (c < chunks) {
            float* slot = shared + c % slots * slot_floats;
            with_vector(vector, [&](auto length) {
                constexpr int columns = pixels / length.value;
                float* to = slot + chunk * weight_pitch;
                of_pixels.load<columns, pitch, length.value>(c * chunk, to);
            });
            if (!weight_vectors) {
                of_weights.load<weight_columns, weight_pitch, 1>(c * chunk, slot);
            } else if constexpr (lies) {
                load_lying(lying, c * chunk, slot);
            } else {
                of_weights.load<Layer::rows / 4, weight_pitch, 4>(c * chunk, slot);
            }
        }
        ptx::cp_async_commit_group();
    };
#pragma unroll 1
    for (int c = 0; c < ahead; ++c) bring(c);
    if constexpr (has_gaps) store_outputs<Stored::gaps>(arguments, tile, nullptr);

    float sums[2][fragments][4] = {};
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
        float* now = shared + c % slots * slot_floats;
        ptx::cp_async_wait_group<ahead - 1>();
        if constexpr (rounds_first) {
            with_vector(vector, [&](auto length) {
                round_vectors<length.value>(now + chunk * weight_pitch);
            });
        }
        __syncthreads();  // the chunk is there, and the one before it has been read
        bring(c + ahead);
#pragma unroll
        for (int s = 0; s < chunk / 8; s += splits) {
            int step = s + split;
            if (chunks * (chunk / 8) > steps && c * (chunk / 8) + step >= steps) break;
            multiply(now + of_lane + step * (8 * pitch),
                     now + weights_of_lane + step * (8 * weight_pitch), sums);
        }
    }

    __syncthreads();  // the last chunk has been read
    float* of_warp = shared + (split * Layer::rows + first_row) * pitch + first_pixel;
#pragma unroll
    for (int j = 0; j < fragments; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float* to = of_warp + (8 * i + lane / 4) * pitch + 8 * j + lane % 4 * 2;
            *reinterpret_cast<Vector<float, 2>*>(to) = {
                {sums[i / 2][j][i % 2 * 2], sums[i / 2][j][i % 2 * 2 + 1]}};
        }
    }
    __syncthreads();
    store_outputs<has_gaps ? Stored::pixels : Stored::all>(arguments, tile, shared);
}
