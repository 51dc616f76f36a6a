// Rows of inputs in 8 bits.
//
// A row is rounded in groups of GROUP inputs: q = round(x / s), with s the largest magnitude of the
// group over 127. A group with a value that is not finite is 0, with NaN as its scale.

#pragma once

#include "byte_sums.h"
#include "panels.h"

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

constexpr int GROUP = TILE_INPUTS; // inputs of a row that share a scale

// One line of the cache.
struct alignas(64) RoundedGroup {
    int8_t values[GROUP];
    float scale, scaled_sum;            // the sum of the values times the scale
    int32_t minus_sum, minus_halves[2]; // of the values, of each half of them

    // x [GROUP]
    void round(const float* x) {
        constexpr float SHIFT = 3 << 22; // added to a number it has its integer in the last bits
        constexpr int PARTS = GROUP / 2 / OUTPUTS;
        const float largest = largest_magnitude(x);
        const bool finite = largest <= FLT_MAX;
        const float exact = largest / 127 > FLT_MIN ? largest / 127 : FLT_MIN;
        for (int half = 0; half < 2; half++) {
            Ints sum = {};
            for (int part = 0; part < PARTS; part++) {
                const int at = (half * PARTS + part) * OUTPUTS;
                const Floats shifted = load_floats(x + at) / exact + SHIFT;
                const Ints value = finite ? (Ints)shifted - as_bits(SHIFT) : Ints{};
                store_bytes(value, values + at);
                sum += value;
            }
            minus_halves[half] = -total(sum);
        }
        minus_sum = minus_halves[0] + minus_halves[1];
        scale = finite ? exact : NAN;
        scaled_sum = scale * float(-minus_sum);
    }

  private:
    // NaN if there is one: as integers, magnitudes are in the order of their values, NaN the last.
    static float largest_magnitude(const float* x) {
        Ints highest = {};
        for (int i = 0; i < GROUP; i += OUTPUTS) {
            const Ints magnitude = load_ints(x + i) & INT32_MAX;
            highest = magnitude > highest ? magnitude : highest;
        }
        const int32_t bits = highest_of(highest);
        float largest;
        memcpy(&largest, &bits, 4);
        return largest;
    }

    static void store_bytes(Ints v, int8_t* to) {
#if BYTE_PRODUCTS == 512
        _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v));
#else
        for (int i = 0; i < OUTPUTS; i++) to[i] = int8_t(v[i]);
#endif
    }

#if BYTE_PRODUCTS == 512
    static int32_t total(Ints v) { return _mm512_reduce_add_epi32((__m512i)v); }
    static int32_t highest_of(Ints v) { return _mm512_reduce_max_epi32((__m512i)v); }
#else
    typedef int32_t IntFour __attribute__((vector_size(16)));

    static int32_t total(Ints v) {
        return reduced(v, [](IntFour a, IntFour b) { return a + b; });
    }

    static int32_t highest_of(Ints v) {
        return reduced(v, [](IntFour a, IntFour b) { return a > b ? a : b; });
    }

    template <class F> static int32_t reduced(Ints v, F&& reduce) {
        IntFour parts[2];
        memcpy(parts, &v, sizeof v);
        const IntFour four = reduce(parts[0], parts[1]);
        const IntFour two = reduce(four, IntFour{four[2], four[3], four[0], four[1]});
        return reduce(two, IntFour{two[1], two[0], two[3], two[2]})[0];
    }
#endif

    static int32_t as_bits(float x) {
        int32_t bits;
        memcpy(&bits, &x, 4);
        return bits;
    }
};

// To [padded inputs / GROUP] = x [num_inputs].
static inline void round_to_bytes(const float* x, int num_inputs, RoundedGroup* to) {
    const int left = num_inputs % GROUP;
    for (int k = 0; k + GROUP <= num_inputs; k += GROUP) (to++)->round(x + k);
    if (!left) return;
    float padded[GROUP] = {};
    memcpy(padded, x + num_inputs - left, left * 4);
    to->round(padded);
}
