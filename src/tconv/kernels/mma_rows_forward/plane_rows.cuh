// Consecutive rows of an output plane, which one warp writes one after another.
//
// Rows begin anywhere in a sector of 32 bytes. They are written by bulk copies of whole sectors
// while the warps go on. A row's part of its last sector waits in shared memory for the next row.
// If the next row has one value, the sector takes that row's first elements along. L2 fetches the
// rest of a partial sector from device memory, and such reads between its writes cost more than
// their bytes.
#pragma once

#include <ptx/bulk.cuh>
#include <ptx/memory.cuh>

namespace plane_rows {

constexpr int sector = 8;  // floats

// The floats between a multiple of 32 bytes and `at`.
TCONV_DEVICE int place(const float* at) {
    return int(reinterpret_cast<uintptr_t>(at) / sizeof(float) % sector);
}

// What becomes of a row's last sector.
enum class End {
    written,  // as it is
    carried,  // left to the row below, which comes next
    filled    // written whole, with elements of the row below, a blank one
};

// Lanes that write a row together; the first of them commits and waits for its bulk groups.
constexpr int lanes = sector;

TCONV_DEVICE int lane() { return int(threadIdx.x) % lanes; }

// Copies elements `first` to before `last` of a piece to the same elements of a row.
// NOTE: for what other threads wrote before a barrier, this thread's fence is enough.
TCONV_DEVICE void copy(float* row, const float* piece, int first, int last) {
    ptx::fence_proxy_async_shared();
    ptx::cp_async_bulk_shared_to_global(row + first, piece + first,
                                        uint32_t(last - first) * sizeof(float));
}

// A plane whose rows the same lanes write. All lanes of a warp call, each `lanes` of them with
// the same arguments.
struct Plane {
    bool exists;
    int width;       // of a row: two sectors or more
    float* carried;  // the elements of a sector that are not yet written

    // Writes a row that lies at `piece`, as far behind a multiple of 32 bytes as `row`, with a
    // sector to spare on either side.
    //
    // follows: the row above left its last sector.
    // filling: the value of the row below, if that is blank.
    TCONV_DEVICE void write(float* row, float* piece, bool follows, End end, float filling) const {
        int head = place(row);  // elements of the first sector that are the row above's
        int tail = (head + width) % sector;
        int last = width - tail;
        if (exists) {
            if (lane() < head && follows) piece[lane() - head] = carried[lane()];
            if (lane() >= tail && tail > 0 && end == End::filled) piece[last + lane()] = filling;
            if (lane() >= head && head > 0 && !follows) {
                ptx::st_global_cs(row + (lane() - head), piece[lane() - head]);
            }
            if (lane() < tail && end == End::written) {
                ptx::st_global_cs(row + (last + lane()), piece[last + lane()]);
            }
        }
        __syncwarp();
        if (!exists) return;
        if (lane() < tail && end == End::carried) carried[lane()] = piece[last + lane()];
        if (lane() == 0) {
            int first = head == 0 ? 0 : follows ? -head : sector - head;
            copy(row, piece, first, end == End::filled && tail > 0 ? last + sector : last);
        }
    }

    // Writes a row of one value, which shared memory holds `count` times from `values` on, a
    // multiple of 16 bytes. Its copies are of no group yet.
    //
    // follows: the row above took this row's first elements along.
    template <int count>
    TCONV_DEVICE void write_blank(float* row, const float* values, float value, bool follows,
                                  End end) const {
        static_assert(count % sector == 0, "pieces end with a sector");
        if (!exists) return;
        int head = place(row);
        int tail = (head + width) % sector;
        int first = head == 0 ? 0 : sector - head, last = width - tail;
        if (lane() < first && !follows) ptx::st_global_cs(row + lane(), value);
        if (lane() < tail && end == End::written) ptx::st_global_cs(row + (last + lane()), value);
        if (lane() < tail && end == End::carried) carried[lane()] = value;
        if (end == End::filled && tail > 0) last += sector;
        for (int from = first + lane() * count; from < last; from += lanes * count) {
            copy(row, values - from, from, from + count < last ? from + count : last);
        }
    }
};

}  // namespace plane_rows
