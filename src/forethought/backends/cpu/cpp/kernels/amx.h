// Tiles by AMX, the matrix unit of Xeons since Sapphire Rapids: it multiplies bf16 and sums in float32.

#pragma once

#include "panels.h"
#include "vectors.h"

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && \
    defined(__linux__) && !defined(NO_AMX) && !defined(NO_DOT_PRODUCTS)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_AMX 0
#endif

constexpr int TILE_ROWS = 16; // of a tile of inputs

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

// Sums [ROW_TILES * rows, width] of tiles of x, `next_tile` elements apart, times PANELS panels of w
// over some steps; they are added to where they do not `begin`.
template <int ROW_TILES, int PANELS>
static inline void multiply_steps(
    const uint16_t* x, int64_t next_tile, int rows, const uint16_t* w, int64_t next_panel,
    int steps, float* sums, int64_t width, bool begin) {
    static_assert(ROW_TILES * PANELS <= 4);
    constexpr int TILE = TILE_ROWS * TILE_INPUTS;
    const int64_t size = int64_t(rows) * TILE_INPUTS, bytes = width * 4;
    float* lower = sums + rows * width; // of the second tile of x
    if (begin) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, bytes);
        if (PANELS > 1) _tile_loadd(1, sums + PANEL, bytes);
        if (PANELS > 2) _tile_loadd(2, sums + 2 * PANEL, bytes);
        if (PANELS > 2) _tile_loadd(3, sums + 3 * PANEL, bytes);
        if (ROW_TILES > 1) _tile_loadd(2, lower, bytes);
        if (ROW_TILES > 1 && PANELS > 1) _tile_loadd(3, lower + PANEL, bytes);
    }
    for (int k = 0; k < steps; k++, x += size, w += TILE) {
        _tile_loadd(4, x, 64);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (PANELS > 1) {
            _tile_loadd(7, w + next_panel, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (ROW_TILES > 1) {
            _tile_loadd(5, x + next_tile, 64);
            _tile_dpbf16ps(2, 5, 6);
            if (PANELS > 1) _tile_dpbf16ps(3, 5, 7);
        }
        if (PANELS > 2) {
            _tile_loadd(6, w + 2 * next_panel, 64);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, w + 3 * next_panel, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums, bytes);
    if (PANELS > 1) _tile_stored(1, sums + PANEL, bytes);
    if (PANELS > 2) _tile_stored(2, sums + 2 * PANEL, bytes);
    if (PANELS > 2) _tile_stored(3, sums + 3 * PANEL, bytes);
    if (ROW_TILES > 1) _tile_stored(2, lower, bytes);
    if (ROW_TILES > 1 && PANELS > 1) _tile_stored(3, lower + PANEL, bytes);
}

// The same for one tile of x or two, and as many panels as four sums allow.
static inline void multiply_by_amx(
    int row_tiles, int panels, const uint16_t* x, int64_t next_tile, int rows, const uint16_t* w,
    int64_t next_panel, int steps, float* sums, int64_t width, bool begin) {
    if (row_tiles == 2 && panels == 2)
        multiply_steps<2, 2>(x, next_tile, rows, w, next_panel, steps, sums, width, begin);
    else if (row_tiles == 2)
        multiply_steps<2, 1>(x, next_tile, rows, w, next_panel, steps, sums, width, begin);
    else if (panels == 4)
        multiply_steps<1, 4>(x, next_tile, rows, w, next_panel, steps, sums, width, begin);
    else if (panels == 2)
        multiply_steps<1, 2>(x, next_tile, rows, w, next_panel, steps, sums, width, begin);
    else
        multiply_steps<1, 1>(x, next_tile, rows, w, next_panel, steps, sums, width, begin);
}

// Gives the tiles back at the end of a parallel region: other libraries configure their own.
struct TilesGuard {
    ~TilesGuard() {
        if (amx_allowed()) _tile_release();
    }
};

#else

static constexpr bool amx_allowed() { return false; }
static inline void finish_stores(const void*) {}
static inline void configure_tiles(int) {}
static inline void multiply_by_amx(
    int, int, const uint16_t*, int64_t, int, const uint16_t*, int64_t, int, float*, int64_t, bool) {
}

struct TilesGuard {};

#endif
