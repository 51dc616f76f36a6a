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

// scores [length] -> their softmax, not divided by the sum, which is returned.
static float exponentials(float* scores, int length) {
    const float highest = maximum(scores, length);
    Vec total = {};
    int i = 0;
    for (; i + LANES <= length; i += LANES) {
        const Vec e = exp(load(scores + i) - highest);
        store(scores + i, e);
        total += e;
    }
    float rest = 0;
    for (; i < length; i++) {
        const Vec e = exp(broadcast(scores[i] - highest));
        scores[i] = e[0];
        rest += e[0];
    }
    return sum(total) + rest;
}
