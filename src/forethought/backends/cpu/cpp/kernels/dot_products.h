// Tiles by the dot products of bf16 in AVX-512 (AMD since Zen 4, Intel's Cooper Lake): of pairs, summed
// in float32.

#pragma once

#include "panels.h"
#include "vectors.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(NO_DOT_PRODUCTS)
#define HAS_DOT_PRODUCTS 1
#else
#define HAS_DOT_PRODUCTS 0
#endif

#if HAS_DOT_PRODUCTS

constexpr int DOT_SUMS = 24; // vectors that stay in registers beside those of weights and an input
constexpr int MAX_DOT_ROWS = 8; // of a tile that one pass multiplies

// Sums [ROWS, PANELS * PANEL] of rows of a tile of `rows` times panels of w over some steps, by the
// dot products of pairs that vectors have.
template <int ROWS, int PANELS>
static inline void dot_steps(
    const uint16_t* x, int rows, const uint16_t* w, int64_t next_panel, int steps, float* sums,
    int64_t width, bool begin) {
    __m512 acc[ROWS][PANELS];
    for (int i = 0; i < ROWS; i++)
        for (int p = 0; p < PANELS; p++)
            acc[i][p] = begin ? __m512{} : _mm512_loadu_ps(sums + i * width + p * PANEL);
    for (int k = 0; k < steps; k++, x += rows * TILE_INPUTS)
        for (int pair = 0; pair < TILE_INPUTS / 2; pair++, w += 2 * PANEL) {
            __m512bh weight[PANELS];
            for (int p = 0; p < PANELS; p++)
                weight[p] = (__m512bh)_mm512_loadu_si512(w + p * next_panel);
            for (int i = 0; i < ROWS; i++) {
                int32_t both;
                memcpy(&both, x + i * TILE_INPUTS + 2 * pair, 4);
                const __m512bh inputs = (__m512bh)_mm512_set1_epi32(both);
                for (int p = 0; p < PANELS; p++)
                    acc[i][p] = _mm512_dpbf16_ps(acc[i][p], inputs, weight[p]);
            }
        }
    for (int i = 0; i < ROWS; i++)
        for (int p = 0; p < PANELS; p++) _mm512_storeu_ps(sums + i * width + p * PANEL, acc[i][p]);
}

// The same of `count` rows, at most so many as have registers for their sums.
template <int PANELS>
static void dot_rows(
    int count, const uint16_t* x, int rows, const uint16_t* w, int64_t next_panel, int steps,
    float* sums, int64_t width, bool begin) {
    const auto dot = [&](auto size) {
        if constexpr (decltype(size)::value * PANELS <= DOT_SUMS)
            dot_steps<decltype(size)::value, PANELS>(
                x, rows, w, next_panel, steps, sums, width, begin);
    };
    switch (count) {
        case 1: return dot(std::integral_constant<int, 1>());
        case 2: return dot(std::integral_constant<int, 2>());
        case 3: return dot(std::integral_constant<int, 3>());
        case 4: return dot(std::integral_constant<int, 4>());
        case 5: return dot(std::integral_constant<int, 5>());
        case 6: return dot(std::integral_constant<int, 6>());
        case 7: return dot(std::integral_constant<int, 7>());
        default: return dot(std::integral_constant<int, 8>());
    }
}

// The same of a tile, in passes of nearly as many rows.
template <int PANELS>
static void dot_tile(
    const uint16_t* x, int rows, const uint16_t* w, int64_t next_panel, int steps, float* sums,
    int64_t width, bool begin) {
    constexpr int MOST = DOT_SUMS / PANELS < MAX_DOT_ROWS ? DOT_SUMS / PANELS : MAX_DOT_ROWS;
    const int passes = (rows + MOST - 1) / MOST;
    for (int pass = 0; pass < passes; pass++) {
        const int begins = rows * pass / passes, count = rows * (pass + 1) / passes - begins;
        dot_rows<PANELS>(
            count, x + begins * TILE_INPUTS, rows, w, next_panel, steps, sums + begins * width,
            width, begin);
    }
}

static inline void multiply_by_dots(
    int row_tiles, int panels, const uint16_t* x, int64_t next_tile, int rows, const uint16_t* w,
    int64_t next_panel, int steps, float* sums, int64_t width, bool begin) {
    for (int tile = 0; tile < row_tiles; tile++, x += next_tile, sums += rows * width)
        if (panels == 4)
            dot_tile<4>(x, rows, w, next_panel, steps, sums, width, begin);
        else if (panels == 2)
            dot_tile<2>(x, rows, w, next_panel, steps, sums, width, begin);
        else
            dot_tile<1>(x, rows, w, next_panel, steps, sums, width, begin);
}

#endif
