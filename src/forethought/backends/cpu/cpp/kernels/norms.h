// RMS norms.

#pragma once

#include "vectors.h"

#include <cmath>

// y [size] = x / rms(x) * weight; y may be x.
static void norm(const float* x, const float* weight, int size, float eps, float* y) {
    Vec squares = {};
    int i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    const float factor = 1.0f / sqrtf(total / size + eps);
    for (i = 0; i + LANES <= size; i += LANES)
        store(y + i, load(x + i) * factor * load(weight + i));
    for (; i < size; i++) y[i] = x[i] * factor * weight[i];
}
