// The softmax of scores.

#pragma once

#include "vectors.h"

#include <cmath>

static inline float maximum(const float* x, int length) {
    Vec most = broadcast(-INFINITY), other = most;
    int i = 0;
    for (; i + 2 * LANES <= length; i += 2 * LANES) {
        most = larger(load(x + i), most);
        other = larger(load(x + i + LANES), other);
    }
    float result = largest(larger(other, most));
    for (; i < length; i++) result = x[i] > result ? x[i] : result;
    return result;
}

// scores [length] -> their exponentials less `highest`; returns the sum.
static float exponentials(float* scores, int length, float highest) {
    Vec total = {};
    int i = 0;
    for (; i + LANES <= length; i += LANES) {
        const Vec e = exp(load(scores + i) - highest);
        store(scores + i, e);
        total += e;
    }
    if (i == length) return sum(total);
    const Vec e = exp(load_first(scores + i, length - i) - highest);
    float rest = 0;
    for (int lane = 0; lane < length - i; lane++) rest += scores[i + lane] = e[lane];
    return sum(total) + rest;
}

// scores [length] -> their softmax, not divided by the sum, which is returned.
static float exponentials(float* scores, int length) {
    return exponentials(scores, length, maximum(scores, length));
}
