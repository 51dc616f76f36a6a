// The largest of many values.

#pragma once

#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

struct Largest {
    int32_t index; // the first, of equal ones
    float value;
    bool has_nan;

    bool is_finite() const { return !has_nan && std::isfinite(value); }
};

// The largest of `count` values, NaN apart.
static inline Largest largest(const float* x, int32_t count) {
    constexpr int32_t SIZE = 16 * LANES; // of a block, of which the index is found in a second pass
    Largest found = {0, -INFINITY, false};
    int32_t block = 0;
    for (int32_t begin = 0; begin < count; begin += SIZE) {
        const int32_t end = std::min(begin + SIZE, count);
        Vec most = broadcast(-INFINITY);
        IntVec unknown = {};
        int32_t i = begin;
        for (; i + LANES <= end; i += LANES) {
            const Vec v = load(x + i);
            most = v > most ? v : most;
            unknown |= v != v;
        }
        float value = -INFINITY;
        for (; i < end; i++) {
            value = x[i] > value ? x[i] : value;
            found.has_nan |= x[i] != x[i];
        }
        for (int l = 0; l < LANES; l++) {
            value = most[l] > value ? most[l] : value;
            found.has_nan |= unknown[l] != 0;
        }
        if (value > found.value) found.value = value, block = begin;
    }
    for (int32_t i = block; i < count; i++)
        if (x[i] == found.value) return {i, found.value, found.has_nan};
    return found;
}
