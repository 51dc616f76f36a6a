// Products with weights in bf16 by AMX, the matrix unit of Xeons since Sapphire Rapids.
//
// It multiplies bf16 and sums in float32. Inputs are float32: each is split in two bf16, high and
// low, which together keep 16 bits of its mantissa. The high parts of a token are one row of the
// product and the low parts the next; the sums of both rows are added at the end. So every output is
// summed in one order, however many tokens there are, and one token takes one pass over the weights.

#pragma once

#include "panels.h"
#include "structures.h"
#include "vectors.h"

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && \
    defined(__linux__) && !defined(NO_AMX)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_AMX 0
#endif

constexpr int TILE_ROWS = 16;
constexpr int TILE_TOKENS = TILE_ROWS / 2;
constexpr int SPLIT_TOKENS = 2 * TILE_TOKENS; // that one pass over panels multiplies
constexpr int BLOCK_BYTES = 1 << 20; // of inputs that all panels pass by: half of an L2 cache

// Floats that the inputs of a product take, split, and those of one tile for each thread.
static inline int64_t split_size(int64_t tokens, int64_t num_inputs, int threads) {
    if (!HAS_AMX) return 0;
    const int64_t shared = tokens + TILE_TOKENS, own = int64_t(threads) * TILE_TOKENS;
    return (shared > own ? shared : own) * padded_inputs(num_inputs);
}

#if HAS_AMX

#ifndef AMX_STATE // the part of a process's state that Linux is asked for
#define AMX_STATE 18
#endif

// Whether the system lets this process use AMX.
static bool amx_allowed() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023;
    static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, AMX_STATE) == 0;
    return allowed;
}

// Let stores to memory be done: GCC's intrinsics of tiles do not tell the compiler what they read.
static inline void finish_stores(const void* memory) {
    __asm__ volatile("" : : "r"(memory) : "memory");
}

// Tiles 0 to 3 hold sums, 4 and 5 inputs, 6 and 7 weights.
static inline void configure_tiles(int rows) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = uint8_t(i < 6 ? rows : TILE_ROWS);
    }
    finish_stores(&config);
    _tile_loadconfig(&config);
}

// sums [2, 2, TILE_ROWS, PANEL], or [1, 4, ...] = ROW_TILES tiles of x times PANELS panels of w.
template <int ROW_TILES, int PANELS>
static inline void multiply_split(
    const uint16_t* x, int rows, const uint16_t* w, int64_t panel_stride, int steps, float* sums) {
    static_assert(ROW_TILES * PANELS <= 4);
    constexpr int TILE = TILE_ROWS * TILE_INPUTS;
    const int64_t size = int64_t(rows) * TILE_INPUTS;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; k++, w += TILE) {
        _tile_loadd(4, x + k * size, 64);
        if (ROW_TILES > 1) _tile_loadd(5, x + (steps + k) * size, 64);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (ROW_TILES > 1) _tile_dpbf16ps(2, 5, 6);
        if (PANELS > 1) {
            _tile_loadd(7, w + panel_stride, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (ROW_TILES > 1) _tile_dpbf16ps(3, 5, 7);
        }
        if (PANELS > 2) {
            _tile_loadd(6, w + 2 * panel_stride, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, w + 3 * panel_stride, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    constexpr int SUMS = TILE_ROWS * PANEL;
    _tile_stored(0, sums, 64);
    if (PANELS > 1) _tile_stored(1, sums + SUMS, 64);
    if (PANELS > 2 || ROW_TILES > 1) _tile_stored(2, sums + 2 * SUMS, 64);
    if (PANELS > 2 || ROW_TILES * PANELS > 2) _tile_stored(3, sums + 3 * SUMS, 64);
}

// tile [rows, count * PANEL] = one tile of `per_tile` tokens, or two for more rows, times `count`
// panels of w: at most 4 for one tile, 2 for two. x: [tiles, steps, per_tile, 2, 32].
static inline void multiply_tiles(
    const uint16_t* x, int per_tile, int rows, const uint16_t* w, int64_t panel_stride, int count,
    int steps, float* tile) {
    alignas(64) float sums[4 * TILE_ROWS * PANEL];
    const bool both = rows > per_tile;
    const int all = 2 * per_tile;
    if (both && count == 2)
        multiply_split<2, 2>(x, all, w, panel_stride, steps, sums);
    else if (both)
        multiply_split<2, 1>(x, all, w, panel_stride, steps, sums);
    else if (count == 4)
        multiply_split<1, 4>(x, all, w, panel_stride, steps, sums);
    else if (count == 2)
        multiply_split<1, 2>(x, all, w, panel_stride, steps, sums);
    else
        multiply_split<1, 1>(x, all, w, panel_stride, steps, sums);
    for (int m = 0; m < rows; m++)
        for (int p = 0; p < count; p++) {
            const int index = m < per_tile ? p : 2 + p, row = m < per_tile ? m : m - per_tile;
            const float* high = sums + (index * TILE_ROWS + 2 * row) * PANEL;
            for (int i = 0; i < PANEL; i += LANES)
                store(
                    tile + (m * count + p) * PANEL + i,
                    load(high + i) + load(high + PANEL + i));
        }
}

static inline __m512 widened(__m256i bf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

// A row of x to rows [in / 32, 2, 32] of its tile of `per_tile` tokens.
static inline void split(const float* x, int num_inputs, int per_tile, uint16_t* to) {
    for (int k = 0; k < num_inputs; k += TILE_INPUTS, to += per_tile * 2 * TILE_INPUTS) {
        const int left = num_inputs - k;
        const uint32_t present = left < TILE_INPUTS ? (1u << left) - 1 : ~0u;
        const __m512 a = _mm512_maskz_loadu_ps(__mmask16(present), x + k);
        const __m512 b = _mm512_maskz_loadu_ps(__mmask16(present >> 16), x + k + 16);
        const __m512i high = (__m512i)_mm512_cvtne2ps_pbh(b, a);
        const __m512i low = (__m512i)_mm512_cvtne2ps_pbh(
            b - widened(_mm512_extracti64x4_epi64(high, 1)),
            a - widened(_mm512_castsi512_si256(high)));
        _mm512_storeu_si512(to, high);
        _mm512_storeu_si512(to + TILE_INPUTS, low);
    }
}

// The inputs of a product in tiles of up to TILE_TOKENS tokens: [tiles, in / 32, tokens, 2, 32].
// All tiles have the same rows; of the last one some may be left over.
class SplitInput {
  public:
    static bool is_possible() { return amx_allowed(); }

    static bool takes(const Linear& w) {
        return w.type == BF16 && !w.float32_input && amx_allowed();
    }

    // Split x [T, in]. A tile is split by each thread for itself, more by all of them together.
    SplitInput(const float* x, int64_t ldx, int tokens, int num_inputs, Thread thread)
        : steps(int(padded_inputs(num_inputs) / TILE_INPUTS)) {
        const int tiles = tokens > 0 ? (tokens + TILE_TOKENS - 1) / TILE_TOKENS : 1;
        per_tile = tokens > 0 ? (tokens + tiles - 1) / tiles : 1;
        const bool own = tiles == 1;
        uint16_t* to = (uint16_t*)thread.split;
        if (own) to += int64_t(thread.index) * 2 * TILE_TOKENS * steps * TILE_INPUTS;
        const Share share = own ? Share{0, tokens} : thread.share(tokens);
        for (int64_t t = share.begin; t < share.end; t++)
            split(
                x + t * ldx, num_inputs, per_tile,
                to + tile_of(t) + t % per_tile * 2 * TILE_INPUTS);
        data = to;
        if (!own) {
#pragma omp barrier
        }
        finish_stores(data);
        configure_tiles(2 * per_tile);
    }

    // Tokens of a pass, which is one tile or two.
    int step() const { return 2 * per_tile; }

    // Tokens whose split inputs stay in the cache while all panels pass by, a multiple of step().
    int block() const {
        const int passes = BLOCK_BYTES / (step() * steps * 4 * TILE_INPUTS);
        return step() * (passes > 1 ? passes : 1);
    }

    // Panels of a pass.
    int panels(int tokens, int left) const {
        if (tokens <= per_tile && left >= 4) return 4;
        return left >= 2 ? 2 : 1;
    }

    // tile [rows, count * PANEL] = tokens [t, t + rows) times panels [panel, panel + count) of w.
    void multiply(const Linear& w, int panel, int count, int t, int rows, float* tile) const {
        const int64_t stride = panel_size(w);
        const uint16_t* from = (const uint16_t*)w.weight + panel * stride;
        multiply_tiles(data + tile_of(t), per_tile, rows, from, stride, count, steps, tile);
    }

  private:
    const int steps;
    int per_tile; // tokens
    const uint16_t* data;

    int64_t tile_of(int64_t t) const {
        return t / per_tile * steps * per_tile * 2 * TILE_INPUTS;
    }
};

// Gives the tiles back at the end of a parallel region: other libraries configure their own.
struct TilesGuard {
    ~TilesGuard() {
        if (amx_allowed()) _tile_release();
    }
};

#else

class SplitInput { // never takes a weight
  public:
    static bool is_possible() { return false; }
    static bool takes(const Linear&) { return false; }
    SplitInput(const float*, int64_t, int, int, Thread) {}
    int step() const { return 1; }
    int block() const { return 1; }
    int panels(int, int) const { return 1; }
    void multiply(const Linear&, int, int, int, int, float*) const {}
};

struct TilesGuard {};

#endif
