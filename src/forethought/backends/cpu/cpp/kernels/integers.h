// Products of inputs in 8 bits with weights in 8 and 4 bits, summed as integers.
//
// A row of x is rounded in groups of GROUP inputs: q = round(x / s), with s the largest magnitude of
// the group over 127. Products of q with the integers of a group of weights are summed exactly; the
// sums of the groups are scaled and added in float32, in order, each operation rounded. So a token's
// outputs do not depend on the other tokens, and are those of model/quantization.py to the last bit.
//
// A panel holds, in 8 bits, [in / 4, PANEL, 4] weights; in 4 bits [in / 8, PANEL, 4] bytes, with
// inputs 0 to 3 of eight in the low halves and 4 to 7 in the high ones. Inputs are padded with zeros
// to a multiple of GROUP.

#pragma once

#include "../structures.h"
#include "panels.h"
#include "tiles.h"
#include "vectors.h"

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int GROUP = TILE_INPUTS; // inputs of a row that share a scale
constexpr int OUTPUTS = 8;         // of a vector
typedef float Eight __attribute__((vector_size(OUTPUTS * 4)));
typedef int32_t IntEight __attribute__((vector_size(OUTPUTS * 4)));
typedef int32_t IntFour __attribute__((vector_size(16)));

static inline Eight load8(const float* p) {
    Eight v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline Eight load8(const uint16_t* p) { // bf16
#if defined(__AVX2__)
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return (Eight)_mm256_slli_epi32(wide, 16);
#else
    return Eight{scalar(p),     scalar(p + 1), scalar(p + 2), scalar(p + 3),
                 scalar(p + 4), scalar(p + 5), scalar(p + 6), scalar(p + 7)};
#endif
}

static inline Eight load8(const uint8_t* p) {
#if defined(__AVX2__)
    return (Eight)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    return Eight{float(p[0]), float(p[1]), float(p[2]), float(p[3]),
                 float(p[4]), float(p[5]), float(p[6]), float(p[7])};
#endif
}

// A row of inputs in 8 bits.
struct RoundedRow {
    int8_t* values; // [padded inputs]
    float* scales;  // [groups]
    float* sums;    // [groups]: of the values

    RoundedRow(void* memory, int64_t num_inputs)
        : values((int8_t*)memory), scales((float*)(values + padded_inputs(num_inputs))),
          sums(scales + padded_inputs(num_inputs) / GROUP) {}

    // Bytes of a row.
    static int64_t size(int64_t num_inputs) {
        return padded_inputs(num_inputs) / GROUP * (GROUP + 2 * sizeof(float));
    }

    void round(const float* x, int num_inputs) {
        const int whole = num_inputs / GROUP, left = num_inputs % GROUP;
        for (int g = 0; g < whole; g++) round_group(x + g * GROUP, g);
        if (!left) return;
        float padded[GROUP] = {};
        memcpy(padded, x + whole * GROUP, left * 4);
        round_group(padded, whole);
    }

  private:
    // A group with a value that is not finite is 0, with NaN as its scale.
    void round_group(const float* x, int g) {
        constexpr float SHIFT = 3 << 22; // added to a number it has its integer in the last bits
        const float largest = largest_magnitude(x);
        const bool finite = largest <= FLT_MAX;
        const float scale = largest / 127 > FLT_MIN ? largest / 127 : FLT_MIN;
        IntEight sums = {};
        int32_t wide[GROUP];
        for (int i = 0; i < GROUP; i += OUTPUTS) {
            const IntEight value = (IntEight)(load8(x + i) / scale + SHIFT) - as_bits(SHIFT);
            memcpy(wide + i, &value, sizeof value);
            sums += value;
        }
        for (int i = 0; i < GROUP; i++) values[g * GROUP + i] = int8_t(finite ? wide[i] : 0);
        scales[g] = finite ? scale : NAN;
        this->sums[g] = float(reduced(sums, [](IntFour a, IntFour b) { return a + b; }));
    }

    // NaN if there is one: as integers, magnitudes are in the order of their values, NaN the last.
    static float largest_magnitude(const float* x) {
        IntEight highest = {};
        for (int i = 0; i < GROUP; i += OUTPUTS) {
            const IntEight magnitude = (IntEight)load8(x + i) & INT32_MAX;
            highest = magnitude > highest ? magnitude : highest;
        }
        const int32_t bits = reduced(highest, [](IntFour a, IntFour b) { return a > b ? a : b; });
        float largest;
        memcpy(&largest, &bits, 4);
        return largest;
    }

    template <class F> static int32_t reduced(IntEight v, F&& reduce) {
#if defined(__AVX2__)
        const auto low = (IntFour)_mm256_castsi256_si128((__m256i)v);
        IntFour four = reduce(low, (IntFour)_mm256_extracti128_si256((__m256i)v, 1));
        four = reduce(four, (IntFour)_mm_shuffle_epi32((__m128i)four, 0x4e));
        return reduce(four, (IntFour)_mm_shuffle_epi32((__m128i)four, 0xb1))[0];
#else
        IntFour parts[2];
        memcpy(parts, &v, sizeof v);
        const IntFour four = reduce(parts[0], parts[1]);
        const IntFour two = reduce(four, IntFour{four[2], four[3]});
        return reduce(two, IntFour{two[1]})[0];
#endif
    }

    static int32_t as_bits(float x) {
        int32_t bits;
        memcpy(&bits, &x, 4);
        return bits;
    }
};

#if defined(__AVX2__) && !defined(NO_BYTE_PRODUCTS)

// Sums of products of unsigned with signed bytes, four for each output: of GROUP of them at most,
// where they are SMALL of magnitudes up to 15 and 127, which 16 bits hold.
template <bool SMALL> struct ByteSums {
    __m256i sums = _mm256_setzero_si256();

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    void add(__m256i a, __m256i b) { sums = _mm256_dpbusd_epi32(sums, a, b); }

    IntEight total() const { return (IntEight)sums; }
#else
    void add(__m256i a, __m256i b) {
        const __m256i pairs = _mm256_maddubs_epi16(a, b);
        sums = SMALL ? _mm256_add_epi16(sums, pairs) : _mm256_add_epi32(sums, of_pairs(pairs));
    }

    IntEight total() const { return (IntEight)(SMALL ? of_pairs(sums) : sums); }

    static __m256i of_pairs(__m256i pairs) {
        return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
#endif
};

// Four inputs, for all outputs.
static inline __m256i four_inputs(const int8_t* x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}

// totals [ROWS, VECS] of a group of inputs, rows `stride` bytes apart, with weights in 8 bits.
template <int ROWS, int VECS>
static inline void multiply_group(
    const int8_t* w, const int8_t* x, int64_t stride, IntEight (&totals)[ROWS][VECS],
    std::false_type) {
    ByteSums<false> sums[ROWS][VECS];
    for (int k = 0; k < GROUP; k += 4, w += PANEL * 4)
        for (int v = 0; v < VECS; v++) {
            const __m256i weight = _mm256_loadu_si256((const __m256i*)w + v);
            const __m256i magnitude = _mm256_abs_epi8(weight);
            for (int m = 0; m < ROWS; m++)
                sums[m][v].add(
                    magnitude, _mm256_sign_epi8(four_inputs(x + m * stride + k), weight));
        }
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECS; v++) totals[m][v] = sums[m][v].total();
}

// The same in 4 bits.
template <int ROWS, int VECS>
static inline void multiply_group(
    const int8_t* w, const int8_t* x, int64_t stride, IntEight (&totals)[ROWS][VECS],
    std::true_type) {
    const __m256i low = _mm256_set1_epi8(15);
    ByteSums<true> sums[ROWS][VECS];
    for (int k = 0; k < GROUP; k += 8, w += PANEL * 4)
        for (int v = 0; v < VECS; v++) {
            const __m256i both = _mm256_loadu_si256((const __m256i*)w + v);
            const __m256i first = both & low, second = _mm256_srli_epi16(both, 4) & low;
            for (int m = 0; m < ROWS; m++) {
                sums[m][v].add(first, four_inputs(x + m * stride + k));
                sums[m][v].add(second, four_inputs(x + m * stride + k + 4));
            }
        }
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECS; v++) totals[m][v] = sums[m][v].total();
}

#else

template <int ROWS, int VECS, class HasHalves>
static inline void multiply_group(
    const int8_t* w, const int8_t* x, int64_t stride, IntEight (&totals)[ROWS][VECS],
    HasHalves has_halves) {
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECS; v++)
            for (int lane = 0; lane < OUTPUTS; lane++) {
                int32_t total = 0;
                for (int k = 0; k < GROUP; k++) {
                    const int quad = has_halves ? k / 8 : k / 4, shift = k / 4 % 2 * 4;
                    const int8_t byte = w[quad * PANEL * 4 + (v * OUTPUTS + lane) * 4 + k % 4];
                    total += x[m * stride + k] * (has_halves ? byte >> shift & 15 : byte);
                }
                totals[m][v][lane] = total;
            }
}

#endif

// The product, rounded before it is added to anything: compilers would fuse the two.
static inline Eight rounded(Eight a, Eight b) {
    Eight product = a * b;
#if defined(__AVX__)
    __asm__("" : "+x"(product));
#else
    __asm__("" : "+m"(product));
#endif
    return product;
}

// Rows of inputs, ready to be multiplied.
class IntegerInput {
  public:
    static bool takes(const Linear& w) { return w.type == W8A8 || w.type == W4A8; }

    // Few rows are rounded by each thread for itself, more by all of them together.
    IntegerInput(const Input& x, int tokens, int num_inputs, Thread thread)
        : num_inputs(num_inputs), size(RoundedRow::size(num_inputs)) {
        const bool alone = tokens <= TILE_ROWS;
        memory = (int8_t*)thread.tiles;
        if (alone) memory += thread.index * TILE_ROWS * size;
        const Share share = alone ? Share{0, tokens} : thread.share(tokens);
        for (int64_t t = share.begin; t < share.end; t++)
            row(t).round(x.floats + t * x.stride, num_inputs);
        if (!alone) thread.wait();
    }

    // sums [rows, count * PANEL] = tokens [t, t + rows), at most MAX_ROWS, times panels
    // [panel, panel + count) of w.
    void multiply(const Linear& w, int panel, int count, int t, int rows, float* sums) const {
        for (int p = 0; p < count; p++) {
            const Panel part{w, panel + p, t, sums + p * PANEL, count * PANEL};
            switch (rows) {
                case 1: multiply_rows<1>(part); break;
                case 2: multiply_rows<2>(part); break;
                case 3: multiply_rows<3>(part); break;
                case 4: multiply_rows<4>(part); break;
                case 5: multiply_rows<5>(part); break;
                default: multiply_rows<6>(part);
            }
        }
    }

  private:
    struct Panel { // what is multiplied, and where its sums go
        const Linear& w;
        int panel, t;
        float* sums;
        int width;
    };

    const int num_inputs;
    const int64_t size;
    int8_t* memory;

    RoundedRow row(int64_t t) const { return RoundedRow(memory + t * size, num_inputs); }

    template <int ROWS> void multiply_rows(const Panel& part) const {
        constexpr int VECS = ROWS <= 4 ? 2 : 1;
        for (int v = 0; v < PANEL / OUTPUTS; v += VECS)
            if (part.w.type == W4A8)
                multiply_outputs<ROWS, VECS>(part, v * OUTPUTS, std::true_type());
            else
                multiply_outputs<ROWS, VECS>(part, v * OUTPUTS, std::false_type());
    }

    // The sums of VECS * OUTPUTS outputs of a panel, from `first` on.
    template <int ROWS, int VECS, class HasHalves>
    void multiply_outputs(const Panel& part, int first, HasHalves has_halves) const {
        const Linear& w = part.w;
        const int groups = int(padded_inputs(num_inputs)) / GROUP;
        const int bytes = PANEL * GROUP / (has_halves ? 2 : 1); // of a group of the panel
        const int8_t* weight = (const int8_t*)w.weight + int64_t(part.panel) * groups * bytes;
        const RoundedRow x = row(part.t);
        const int64_t next = size / 4; // floats between the scales of two rows
        int64_t at = int64_t(part.panel) * (num_inputs / w.group_size) * PANEL + first;
        Eight sums[ROWS][VECS] = {};
        for (int g = 0; g < groups; g++, weight += bytes) {
            IntEight totals[ROWS][VECS];
            multiply_group(weight + first * 4, x.values + g * GROUP, size, totals, has_halves);
            for (int m = 0; m < ROWS; m++)
                for (int v = 0; v < VECS; v++) {
                    Eight total = __builtin_convertvector(totals[m][v], Eight);
                    Eight scale = x.scales[m * next + g] - Eight{};
                    if (has_halves) {
                        total -=
                            load8((const uint8_t*)w.zero + at + v * OUTPUTS) * x.sums[m * next + g];
                        scale *= load8((const uint16_t*)w.scale + at + v * OUTPUTS);
                    }
                    sums[m][v] += rounded(total, scale);
                }
            if (has_halves && (g + 1) * GROUP % w.group_size == 0) at += PANEL;
        }
        for (int m = 0; m < ROWS; m++)
            for (int v = 0; v < VECS; v++) {
                const int output = first + v * OUTPUTS;
                const Eight sum =
                    has_halves ? sums[m][v]
                               : rounded(sums[m][v], load8(w.scale + part.panel * PANEL + output));
                memcpy(part.sums + m * part.width + output, &sum, sizeof sum);
            }
    }
};
