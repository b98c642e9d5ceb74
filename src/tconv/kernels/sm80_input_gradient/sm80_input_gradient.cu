#include <sm80/gather.cuh>

TCONV_KERNEL(sm80_input_gradient, Layer::threads, Layer::blocks) {
    TCONV_DYNAMIC_SHARED(memory);
    Block(arguments, memory, blockIdx.x / column_blocks).run();
}
