// The order of tiles: which one a consumer computes next.
//
// Neighbouring tiles should run at the same time. They read the same rows and write parts of the
// same sectors, which L2 keeps for some microseconds. With a fixed stride blocks drift apart: kb71
// without the rounding of pixels read 681 MB instead of 540, and took longer than with it. So tiles
// are handed out in order. Each consumer begins with a fixed tile; the first word of
// arguments.status counts the others.
//
// A block that repairs walks through its own chain of tiles. Producers that load through registers
// have no register to spare and walk in fixed steps. In both cases each thread finds its tiles
// itself.
#pragma once

#include <common/sm90_patch_repairs.cuh>
#include <common/sm90_patch_tiles.cuh>
#include <ptx/griddepcontrol.cuh>

namespace {

// The producers' first thread takes a ring's tiles and publishes them to the other threads.
// NOTE: this class and the next are templates: no kernel uses all of them, and the compiler would
// warn.
template <typename Fields>
class Finder {
public:
    TCONV_DEVICE Finder(const Fields& arguments, Shared& shared, int ring)
        : arguments(arguments), order(shared.order[ring]), tile(Index(blockIdx.x) * rings + ring) {}

    // Publishes the ring's first tile.
    TCONV_DEVICE void begin() {
        order.count = 0;
        publish();
    }

    // The tile that was published last.
    TCONV_DEVICE Index now() const { return tile; }

    // Publishes the next tile. Not called after a tile that does not exist, which ends the walk.
    TCONV_DEVICE void advance() {
        tile = ahead != none ? ahead : take();
        ahead = none;
        publish();
    }

    // Takes the next tile in advance, so that `advance` need not wait.
    // NOTE: a register waits for the atomic's result when it is used, shared memory when it is
    // stored: 3% of hd_k4s2.
    TCONV_DEVICE void look_ahead() {
        if (ahead == none) ahead = take();
    }

private:
    static constexpr Index none = -1;

    const Fields& arguments;
    Order& order;
    Index tile, ahead = none;

    TCONV_DEVICE void publish() const {
        uint32_t place = order.count++ % order_size;
        order.tiles[place] = tile;
        ptx::mbarrier_arrive(&order.full[place]);
    }

    TCONV_DEVICE Index take() const {
        ptx::griddepcontrol_wait();  // the packing clears the count
        return Index(gridDim.x) * rings + atomicAdd(static_cast<uint32_t*>(arguments.status), 1u);
    }
};

// Every thread receives the tiles of a ring, one after another.
// NOTE: the tile is read anew where it is needed: kept, it would take a register.
template <typename Fields>
class Receiver {
public:
    TCONV_DEVICE Receiver(const Fields&, Shared& shared, int ring) : order(shared.order[ring]) {}

    TCONV_DEVICE Index next() {
        ptx::mbarrier_wait_parity(&order.full[received % order_size], received / order_size % 2);
        ++received;
        return now();
    }

    TCONV_DEVICE Index now() const { return order.tiles[(received - 1) % order_size]; }

    // Sets `pixels` to the tile's first stage.
    // NOTE: computed anew: kept beside the sums that are written, it would spill.
    TCONV_DEVICE void enter(Turn<stages>& pixels) const {
        pixels = Turn<stages>((received - 1) * chunks);
    }

private:
    Order& order;
    uint32_t received = 0;
};

// Finder and receiver in one, for tiles in fixed steps or in the block's chain.
template <typename Fields>
class Steps {
public:
    TCONV_DEVICE Steps(const Fields& arguments, Shared& shared, int ring)
        : arguments(arguments), tile((Index(blockIdx.x) - Index(gridDim.x)) * rings + ring) {
        if constexpr (Layer::repair) {
            node = shared.repairs.unfit;
            for (int i = 0; i < ring; ++i) follow();
        }
    }

    TCONV_DEVICE void begin() { advance(); }
    TCONV_DEVICE void look_ahead() const {}

    TCONV_DEVICE void advance() {
        if constexpr (Layer::repair) {
            tile = node == 0 ? arguments.tiles : Index((node - 1) / tile_warps);
            for (int i = 0; i < rings; ++i) follow();
        } else {
            tile += Index(gridDim.x) * rings;
        }
    }

    TCONV_DEVICE Index next() {
        advance();
        return tile;
    }

    TCONV_DEVICE Index now() const { return tile; }
    TCONV_DEVICE void enter(Turn<stages>&) const {}  // there already

private:
    const Fields& arguments;
    Index tile;
    uint32_t node = 0;  // the next in the chain, from 1 on

    TCONV_DEVICE void follow() {
        if (node > 0) node = static_cast<const volatile uint32_t*>(chain(arguments))[node - 1];
    }
};

// How a ring's first producer finds its tiles, and how each other thread does.
template <bool dynamic_tail>
struct Walk {
    using OfFirstThread = Steps<Arguments>;
    using OfThread = Steps<Arguments>;
};

template <>
struct Walk<true> {
    using OfFirstThread = Finder<Arguments>;
    using OfThread = Receiver<Arguments>;
};

using TileFinder = Walk<!Layer::repair && Layer::tensor_map>::OfFirstThread;
using Tiles = Walk<!Layer::repair && Layer::tensor_map>::OfThread;

}  // namespace
