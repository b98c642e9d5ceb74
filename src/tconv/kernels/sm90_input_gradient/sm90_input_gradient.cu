#include <engine/bring.cuh>
#include <engine/multiply_taps.cuh>
#include <engine/store.cuh>
#include <engine/kernel.cuh>

TCONV_KERNEL(sm90_input_gradient, Layer::threads, 1) {
    TCONV_DYNAMIC_SHARED(memory);
    run(arguments, memory);
}
