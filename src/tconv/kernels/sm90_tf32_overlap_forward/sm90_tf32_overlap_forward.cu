// out[n, co, oy, ox] of layers with few output channels and many taps, on Hopper's tensor cores
// with TF32 operands rounded to nearest: every input pixel is multiplied by all taps at once, and
// outputs add up what overlaps, in registers.
//
//   row     one of 64 neighbouring pixels of an input row, 16 to a warp; from registers
//   column  (out channel, tap in y, tap in x); from shared memory, the same for all rows
//   depth   the input channels
//
// With g = lane / 4 and t = lane % 4, a thread has rows g and g + 8 of its warp's 16, which are the
// neighbours 2g and 2g + 1, and of every 8 columns 2t and 2t + 1. Columns are dealt so that a
// thread has all taps of a unit, which is an out channel and a phase in y: unit 4 * slot + t.
//
// Warps exchange nothing: their pixels overlap by `reach` pairs, and a warp writes no outputs of
// its first `reach` pairs. Pixel c has the outputs x = c * stride_x + r - offset_x, r < stride_x.
// Tap k of these is in pixel c - (k + lead) / stride_x, phase r = (k + lead) % stride_x. So sums
// pass from a pair to the next.
//
// A warpgroup walks down a strip of an image, one input row a step. Products with row y belong to
// the output rows q * stride_y + phase - padding_y, q = y + tap / stride_y. Row q = y is complete
// then. Sums of the other rows wait in registers. A thread keeps sums of its own outputs and of the
// next pairs' separately, and passes the latter on once, when a row is complete.
//
// All rows of all strips form one line, or `abreast` strips form a line each, and the warpgroups
// divide the lines evenly. A share, and each strip in it, begins with the input rows above it that
// reach into it. Each warpgroup copies its own rows by cp.async, `stages` - 1 stages of `depth`
// channels ahead, in whole sectors. It issues copies during the products. Warpgroups synchronise
// once, when the weights are in place.
#include <ptx/bulk.cuh>
#include <ptx/registers.cuh>
#include <ptx/wgmma.cuh>
#include <sm90_tf32_overlap_forward/bring.cuh>
#include <sm90_tf32_overlap_forward/outputs.cuh>
#include <sm90_tf32_overlap_forward/strips.cuh>

namespace {

// The products of one chunk. `pixels` is the thread's first pair in the first of its channels.
// `beside` runs during the products.
template <int count, typename Action>
TCONV_DEVICE void multiply(const float* pixels, uint64_t weights, int chunk, Products& products,
                           Action beside) {
    uint32_t a[count / wgmma_depth][4];
#pragma unroll
    for (int k = 0; k < count / wgmma_depth; ++k) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 pair =
                *reinterpret_cast<const float2*>(pixels + (k * wgmma_depth + half * 4) * pitch);
            a[k][2 * half] = __float_as_uint(pair.x);
            a[k][2 * half + 1] = __float_as_uint(pair.y);
        }
    }
#pragma unroll
    for (int k = 0; k < count / wgmma_depth; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[k][i] = tf32_bits(__uint_as_float(a[k][i]));
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < count / wgmma_depth; ++k) {
        int in = chunk * depth + k * wgmma_depth;
        ptx::wgmma_m64k8_tf32<columns>(products, a[k],
                                       ptx::advance(weights, in / 32 * block_bytes + in % 32 * 4),
                                       chunk > 0 || k > 0);
    }
    ptx::wgmma_commit_group();
    beside();
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(
        products);  // NOTE: here, before any branch, else ptxas waits for each by itself.
}

TCONV_DEVICE void run(const Arguments& arguments, Shared& shared) {
    // NOTE: the same in all lanes, and the compiler knows it.
    int own = __shfl_sync(0xffffffffu, threadIdx.x / warpgroup, 0);
    Index group = blockIdx.x % Layer::groups;
    Index block = blockIdx.x / Layer::groups;
    Index share = arguments.step == 1 ? block * warpgroups + own : block + own * arguments.step;
    int strip = int(share % arguments.abreast);
    Index begin = share / arguments.abreast * arguments.share;
    Index end =
        begin + arguments.share < arguments.lines ? begin + arguments.share : arguments.lines;

    Walk at(arguments, begin, end, strip);
    Copies copies(arguments, at, group, shared, own);
    copies.begin();
    load_weights(arguments, group, shared, [&] { copies.fill(); });
    ptx::fence_proxy_async_shared();
    __syncthreads();
    if (!at.exists()) return;

    int lane = threadIdx.x % 32;
    int first = Layer::skew + threadIdx.x % warpgroup / 32 * useful + lane / 4 * 2;
    // NOTE: of a narrow image not all of these pixels were copied. Those missing have no outputs,
    // so any others will do.
    if (first > Layer::columns - 2) first = Layer::columns - 2;
    first += lane % 4 * pitch;
    uint64_t weights =
        ptx::matrix_descriptor(shared.weights, 16, 8 * line_bytes, ptx::Swizzle::bytes_128);
    Outputs outputs(arguments, group);
    // NOTE: defined here, so that a row's first product overwrites those of the last row and
    // nothing clears them.
    Products products = {};
    do {
        outputs.enter(at, group);
        bool over;
        do {
#pragma unroll
            for (int chunk = 0; chunk < chunks; ++chunk) {
                copies.wait();
                copies.before_products();
                auto beside = [&] { copies.beside_products(); };
                const float* from = copies.staged() + first;
                if (chunk + 1 < chunks) {
                    multiply<depth>(from, weights, chunk, products, beside);
                } else {
                    multiply<last_depth>(from, weights, chunk, products, beside);
                }
                copies.after_products();
            }
            outputs.add(products, at, group);
            over = at.advance(arguments);
        } while (!over);
    } while (at.exists());
    copies.end();
}

}  // namespace

TCONV_KERNEL(sm90_tf32_overlap_forward, Layer::threads, 1) {
    TCONV_DYNAMIC_SHARED(memory);
    run(arguments, *reinterpret_cast<Shared*>(memory));
}
