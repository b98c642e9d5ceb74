#include <sm80/gather.cuh>

TCONV_KERNEL(sm80_forward, Layer::threads, Layer::blocks) {
    TCONV_DYNAMIC_SHARED(memory);
    Block(arguments, memory, blockIdx.x / column_blocks).run();
}
