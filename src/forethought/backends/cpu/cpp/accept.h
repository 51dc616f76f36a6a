// Greedy acceptance, and the end of a generation; in Python: speculative/verify/accept.py.

#pragma once

#include "kernels/vectors.h"
#include "structures.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

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

struct Accepted {
    int32_t count; // tokens that a row gains; none: the logits after its root are not finite
    bool has_ended;
};

// Accept a chain as far as it is what the target's argmaxes are, and the argmax after that, up to
// the token that ends the row. Where that argmax is not finite, the last accepted token is the last.
// logits: [1 + drafted, vocab]; num_left: tokens that the row may have; tokens: written.
static inline Accepted accept(
    const std::vector<int64_t>& drafted, const float* logits, int32_t vocab, const ChainRow& row,
    int64_t num_left, int64_t* tokens) {
    const int64_t *ends = row.ends, *last = ends + row.num_ends;
    int32_t count = 0;
    while (count <= int64_t(drafted.size())) {
        const Largest best = largest(logits + count * int64_t(vocab), vocab);
        if (!best.is_finite()) break;
        tokens[count++] = best.index;
        if (std::find(ends, last, best.index) != last || count == num_left) return {count, true};
        if (count > int64_t(drafted.size()) || drafted[count - 1] != best.index) break;
    }
    return {count, count == 0};
}
