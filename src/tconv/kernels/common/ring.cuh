// The place of a thread in a ring of stages that mbarriers guard.
#pragma once

#include <ptx/cuda.cuh>

#ifndef TCONV_INNER
#endif
