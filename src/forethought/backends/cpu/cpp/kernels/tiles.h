// Products of bf16 with bf16 in tiles, by AMX or by the dot products of AVX-512 (Zen 4, Cooper Lake).
//
// Inputs are float32, rounded to bf16 (to the nearest, ties to even) whatever the number of tokens,
// and every output is summed in one order: a token's outputs are the same to the last bit beside any
// others.

#pragma once

#include "../structures.h"
#include "amx.h"
#include "dot_products.h"
#include "panels.h"
#include "vectors.h"

#include <cstdint>

constexpr int PASS_TOKENS = 512; // that all steps of a panel are multiplied with at a time
constexpr int FEW_TOKENS =
    64; // up to which the sums of a pass stay in tiles of AMX over all inputs
constexpr int PASS_STEPS = 10;       // tiles of two panels that stay in the L1 cache: 20 KiB
constexpr int BLOCK_BYTES = 1 << 20; // of inputs that all panels pass by: half of an L2 cache

// How rounded inputs [T, in] lie in tiles: [tiles, in / 32, tokens of a tile, 32]. All tiles have
// the same rows, as many tokens as they need; of the last one some may be left over.
struct TileLayout {
    int per_tile, steps;

    TileLayout(int tokens, int64_t num_inputs)
        : steps(int(padded_inputs(num_inputs) / TILE_INPUTS)) {
        const int tiles = tokens > 0 ? (tokens + TILE_ROWS - 1) / TILE_ROWS : 1;
        per_tile = tokens > 0 ? (tokens + tiles - 1) / tiles : 1;
    }

    // Elements before input 32 * step of a token; 32 inputs follow each other.
    int64_t at(int64_t t, int64_t step = 0) const {
        return ((t / per_tile * steps + step) * per_tile + t % per_tile) * TILE_INPUTS;
    }
};

// Floats that rounded inputs take, and those of one tile for each thread: in bf16, in 8 bits, or
// twice in 8 bits.
static inline int64_t tiles_size(int64_t tokens, int64_t num_inputs, int threads) {
    const int64_t shared = tokens + TILE_ROWS, own = int64_t(threads) * TILE_ROWS;
    return (shared > own ? shared : own) * padded_inputs(num_inputs);
}

#if HAS_DOT_PRODUCTS

// Sums [row_tiles * rows, width] of one tile of x or two, `next_tile` elements apart, times 1, 2 or 4
// panels of w over some steps; they are added to where they do not `begin`. Two tiles have at most
// two panels.
static inline void multiply_tiles(
    int row_tiles, int panels, const uint16_t* x, int64_t next_tile, int rows, const uint16_t* w,
    int64_t next_panel, int steps, float* sums, int64_t width, bool begin) {
    const auto multiply = amx_allowed() ? multiply_by_amx : multiply_by_dots;
    multiply(row_tiles, panels, x, next_tile, rows, w, next_panel, steps, sums, width, begin);
}

// 32 inputs in bf16.
static inline __m512i rounded(__m512 low, __m512 high) {
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// A row of x, rounded, to rows [in / 32, 32] of its tile of `per_tile` tokens.
static inline void round_row(const float* x, int num_inputs, int per_tile, uint16_t* to) {
    for (int k = 0; k < num_inputs; k += TILE_INPUTS, to += per_tile * TILE_INPUTS) {
        const int left = num_inputs - k;
        const uint32_t present = left < TILE_INPUTS ? (1u << left) - 1 : ~0u;
        const __m512 a = _mm512_maskz_loadu_ps(__mmask16(present), x + k);
        const __m512 b = _mm512_maskz_loadu_ps(__mmask16(present >> 16), x + k + 16);
        _mm512_storeu_si512(to, rounded(a, b));
    }
}

// The same of PANEL inputs, half of a row of a tile.
static inline void round_panel(const float* x, uint16_t* to) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x)));
}

// The inputs of a product in tiles.
class TileInput {
  public:
    static bool is_possible() { return true; }

    static bool takes(const Linear& w) { return w.type == BF16 && !w.float32_input; }

    // Round x [T, in] where that is not done. A tile is rounded by each thread for itself, more by
    // all of them together.
    TileInput(const Input& x, int tokens, int num_inputs, Thread thread)
        : layout(tokens, num_inputs), data(x.tiles) {
        if (!data) {
            uint16_t* to = thread.tiles;
            const bool own = tokens <= TILE_ROWS;
            if (own) to += int64_t(thread.index) * TILE_ROWS * layout.steps * TILE_INPUTS;
            const Share share = own ? Share{0, tokens} : thread.share(tokens);
            for (int64_t t = share.begin; t < share.end; t++)
                round_row(x.floats + t * x.stride, num_inputs, layout.per_tile, to + layout.at(t));
            data = to;
            if (!own) thread.wait();
        }
        finish_stores(data);
        if (amx_allowed()) configure_tiles(layout.per_tile);
    }

    // Tokens of a pass, whole pairs of tiles, which stay in the L2 cache while all panels pass by.
    int step() const {
        const int pair = 2 * layout.per_tile;
        const int bytes = BLOCK_BYTES / (layout.steps * TILE_INPUTS * 2);
        const int most = (bytes < PASS_TOKENS ? bytes : PASS_TOKENS) / pair;
        return pair * (most > 1 ? most : 1);
    }

    // Panels of a pass.
    int panels(int tokens, int left) const {
        const int few = amx_allowed() ? TILE_ROWS : DOT_SUMS / 4; // whose sums are in registers
        if (tokens <= few && left >= 4) return 4;
        return left >= 2 ? 2 : 1;
    }

    // sums [rows, count * PANEL] = tokens [t, t + rows) times panels [panel, panel + count) of w.
    // Rows may be written up to a multiple of the tokens of a tile.
    void multiply(const Linear& w, int panel, int count, int t, int rows, float* sums) const {
        const int64_t stride = panel_size(w);
        const uint16_t* from = (const uint16_t*)w.weight + panel * stride;
        const int few = amx_allowed() ? FEW_TOKENS : MAX_DOT_ROWS; // whose sums stay in registers
        const int parts = rows > few ? (layout.steps + PASS_STEPS - 1) / PASS_STEPS : 1;
        const int most = (layout.steps + parts - 1) / parts;
        for (int step = 0; step < layout.steps; step += most)
            multiply_part(
                from, stride, count, {step, least(step + most, layout.steps)}, t, rows, sums);
    }

  private:
    const TileLayout layout;
    const uint16_t* data;

    static int least(int a, int b) { return a < b ? a : b; }

    // Add what some steps of the inputs give, and fetch the weights of the next ones.
    void multiply_part(
        const uint16_t* w, int64_t stride, int count, Share steps, int t, int rows,
        float* sums) const {
        constexpr int TILE = TILE_ROWS * TILE_INPUTS;
        const int size = steps.end - steps.begin, per_tile = layout.per_tile, width = count * PANEL;
        const int64_t next_tile = layout.at(per_tile);
        const uint16_t* next = w + (steps.end < layout.steps ? steps.end * TILE : count * stride);
        const int passes = (rows + 2 * per_tile - 1) / (2 * per_tile);
        const int lines = (size * TILE_ROWS + passes - 1) / passes; // of a panel
        for (int m = 0; m < rows; m += 2 * per_tile) {
            if (rows > FEW_TOKENS)
                for (int p = 0; p < count; p++) fetch(next + p * stride, lines);
            multiply_tiles(
                rows - m > per_tile ? 2 : 1, count, data + layout.at(t + m, steps.begin), next_tile,
                per_tile, w + steps.begin * TILE, stride, size, sums + m * width, width,
                !steps.begin);
            next += lines * TILE_INPUTS;
        }
    }

    // A line of the cache has 32 weights.
    static void fetch(const uint16_t* from, int lines) {
        for (int i = 0; i < lines; i++)
            _mm_prefetch((const char*)(from + i * TILE_INPUTS), _MM_HINT_T1);
    }
};

#else

class TileInput { // never takes a weight
  public:
    static bool is_possible() { return false; }
    static bool takes(const Linear&) { return false; }
    TileInput(const Input&, int, int, Thread) {}
    int step() const { return 1; }
    int panels(int, int) const { return 1; }
    void multiply(const Linear&, int, int, int, int, float*) const {}
};

static inline void round_row(const float*, int, int, uint16_t*) {}
static inline void round_panel(const float*, uint16_t*) {}

#endif
