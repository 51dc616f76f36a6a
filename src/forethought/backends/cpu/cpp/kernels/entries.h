// Keys and values as the cache holds them: an entry per token and key head.
//
// In float32 and bf16 an entry is its numbers. In 8 bits it is `dim` integers q, symmetric, and their
// scale in float32, with x = scale * q: what copies slots copies both. An entry depends on its token
// and head alone.

#pragma once

#include "vectors.h"

#include <cmath>
#include <cstdint>
#include <cstring>

constexpr int SCALE_BYTES = 4;

// Elements from one entry to the next.
template <class T> static constexpr int entry_size(int dim) {
    return sizeof(T) == 1 ? dim + SCALE_BYTES : dim;
}

template <class T> static inline void store_entry(T* to, const float* x, int dim) {
    for (int d = 0; d < dim; d++) put(to + d, x[d]);
}

static inline void store_entry(int8_t* to, const float* x, int dim) {
    float largest = 0; // not finite if a number is not
    for (int d = 0; d < dim; d++) {
        const float size = fabsf(x[d]);
        largest = size > largest || size != size ? size : largest;
    }
    const float scale = largest / 127;
    const bool has_values = scale > 0 && std::isfinite(scale);
    for (int d = 0; d < dim; d++) {
        const float q = has_values ? nearbyintf(x[d] / scale) : 0;
        to[d] = int8_t(q > 127 ? 127 : q < -127 ? -127 : q);
    }
    memcpy(to + dim, &scale, SCALE_BYTES);
}

static inline float scale_of(const int8_t* entry, int dim) {
    float scale;
    memcpy(&scale, entry + dim, SCALE_BYTES);
    return scale;
}

// to [dim] = the numbers of an entry.
static inline void load_entry(const int8_t* entry, int dim, float* to) {
    const float scale = scale_of(entry, dim);
    int d = 0;
    for (; d + LANES <= dim; d += LANES) store(to + d, load(entry + d) * scale);
    for (; d < dim; d++) to[d] = scalar(entry + d) * scale;
}

// Of LANES entries at some offsets.
static inline Vec scales_of(const int8_t* entries, const int64_t* offsets, int dim) {
    float scales[LANES];
    for (int i = 0; i < LANES; i++) scales[i] = scale_of(entries + offsets[i], dim);
    return load(scales);
}
