// Attention of long rows in tiles, over keys and values in bf16.

#pragma once

#include "../scratch.h"
#include "../structures.h"
#include "products.h"
#include "sight.h"
#include "softmax.h"
#include "tiles.h"
#include "vectors.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#if HAS_DOT_PRODUCTS

// rows [16, 16] of 32 bits -> their transpose
static inline void transpose(__m512i* rows) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    __m512i quads[16]; // lane l of quads[4 a + c]: column 4 l + c of rows 4 a to 4 a + 3
    for (int i = 0; i < 16; i += 4) {
        quads[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        quads[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        quads[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int c = 0; c < 4; c++) {
        const __m512i even = _mm512_shuffle_i32x4(quads[c], quads[4 + c], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4(quads[c], quads[4 + c], 0xdd);
        const __m512i even2 = _mm512_shuffle_i32x4(quads[8 + c], quads[12 + c], 0x88);
        const __m512i odd2 = _mm512_shuffle_i32x4(quads[8 + c], quads[12 + c], 0xdd);
        rows[c] = _mm512_shuffle_i32x4(even, even2, 0x88);
        rows[4 + c] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
        rows[8 + c] = _mm512_shuffle_i32x4(even, even2, 0xdd);
        rows[12 + c] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
}

// Lanes [begin, end) of a vector.
static inline __mmask16 lanes(int begin, int end) {
    const auto below = [](int i) { return i <= 0 ? 0u : i >= 16 ? 0xffffu : (1u << i) - 1; };
    return __mmask16(below(end) & ~below(begin));
}

// 2^x within 4e-6 of itself, down to 0: the series of 2^r, |r| <= 1/2, to its fifth power.
static inline __m512 exp2_of(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, 0), r = x - whole;
    __m512 y = _mm512_set1_ps(1.3333558e-3f);
    y = y * r + _mm512_set1_ps(9.6181291e-3f);
    y = y * r + _mm512_set1_ps(5.5504109e-2f);
    y = y * r + _mm512_set1_ps(2.4022651e-1f);
    y = y * r + _mm512_set1_ps(6.9314718e-1f);
    y = y * r + _mm512_set1_ps(1.0f);
    return _mm512_scalef_ps(y, whole);
}

// Queries of `count` consecutive tokens of a causal row, at most tile_tokens(), of the heads that
// share a key head, with a softmax that is corrected as higher scores are found (FlashAttention,
// Dao et al. 2022, algorithm 1): keys and values of TILE_POSITIONS at a time are packed as weights
// are (panels.h), keys as outputs, positions as the inputs that values are summed over. Queries and
// the weights of positions are rounded to bf16.
//
// A block of positions begins at a multiple of TILE_POSITIONS, and those that a query does not see
// add zeros, so its sums do not depend on the queries beside it.
class TileBlock {
  public:
    static bool is_possible() { return true; }

    // scratch: tile_block_size() floats.
    TileBlock(
        const Model& model, const Layer& layer, const Call& call, const Scratch& b, const Row& row,
        int n, int count, int kv_head, const uint16_t* keys, const uint16_t* values, float* scratch)
        : model(model), layer(layer), call(call), b(b), row(row), n(n), count(count),
          group(model.num_heads / model.num_kv_heads), dim(model.head_dim),
          width(int(padded_inputs(dim))), num_tiles((count + TILE_ROWS - 1) / TILE_ROWS * group),
          stride(int64_t(model.num_kv_heads) * dim), keys(keys + kv_head * dim),
          values(values + kv_head * dim) {
        const int64_t token = row.start + n, head = int64_t(kv_head) * group;
        queries = b.qkv + token * b.qkv_width + head * dim;
        out = b.mixed + token * b.mixed_width + head * dim;
        scores = scratch;
        sums = scores + 2 * TILE_ROWS * TILE_POSITIONS;
        totals = sums + num_tiles * TILE_ROWS * width;
        highest = totals + num_tiles * TILE_ROWS * PANEL;
        weights = (uint16_t*)(highest + num_tiles * TILE_ROWS);
        packed_keys = weights + 2 * TILE_ROWS * TILE_POSITIONS;
        packed_values = packed_keys + TILE_POSITIONS * width;
        packed_queries = packed_values + TILE_POSITIONS * width;
    }

    void attend() const {
        if (amx_allowed()) configure_tiles(TILE_ROWS);
        pack_queries();
        memset(sums, 0, int64_t(num_tiles) * TILE_ROWS * (width + PANEL) * 4); // and totals
        for (int i = 0; i < num_tiles * TILE_ROWS; i++) highest[i] = -INFINITY;
        const int begin = seen_from(0), end = seen_to(count - 1);
        for (int p = begin / TILE_POSITIONS * TILE_POSITIONS; p < end; p += TILE_POSITIONS) {
            pack(p, begin, end);
            for (int tile = 0; tile < num_tiles; tile += 2) add(tile, p);
        }
        write();
    }

  private:
    const Model& model;
    const Layer& layer;
    const Call& call;
    const Scratch& b;
    const Row& row;
    const int n, count, group, dim, width;
    const int num_tiles; // of queries: of TILE_ROWS tokens and one head, heads beside each other
    const int64_t stride;
    const uint16_t *keys, *values;
    float *scores, *sums;     // [2, TILE_ROWS, TILE_POSITIONS], [num_tiles, TILE_ROWS, width]
    float* totals;            // [num_tiles, TILE_ROWS, PANEL]: of the exponentials, in parts
    float* highest;           // [num_tiles, TILE_ROWS]: of the scores
    uint16_t* weights;        // [2, TILE_POSITIONS / 32, TILE_ROWS, 32]
    uint16_t* packed_keys;    // [TILE_POSITIONS / PANEL, width / 2, PANEL, 2]
    uint16_t* packed_values;  // [width / PANEL, TILE_POSITIONS / 2, PANEL, 2]
    uint16_t* packed_queries; // [num_tiles, width / 32, TILE_ROWS, 32]
    const float* queries;
    float* out;

    int seen_from(int m) const {
        return layer.window ? Sight(row, n + m, layer.window).low : int(row.seen_from);
    }

    int seen_to(int m) const { return row.prefix + n + m + 1; } // recent tokens follow the prefix

    int token_of(int tile) const { return tile / group * TILE_ROWS; } // the first one

    int rows_of(int tile) const {
        const int left = count - token_of(tile);
        return left < TILE_ROWS ? left : TILE_ROWS;
    }

    int64_t slot(int p) const {
        return p < row.prefix ? prefix_slot(row, p, call.page_size) : row.slots[p - row.prefix];
    }

    void pack_queries() const {
        for (int tile = 0; tile < num_tiles; tile++) {
            const float* from = queries + token_of(tile) * b.qkv_width + tile % group * dim;
            uint16_t* to = packed_queries + tile * TILE_ROWS * width;
            for (int i = 0; i < rows_of(tile); i++)
                round_row(from + i * b.qkv_width, dim, TILE_ROWS, to + i * TILE_INPUTS);
        }
        finish_stores(packed_queries);
    }

    // 32 elements of a key or value from `d` on, without those of other heads.
    __m512i load_part(const uint16_t* from, int d) const {
        const uint32_t present = dim - d < TILE_INPUTS ? (1u << (dim - d)) - 1 : ~0u;
        return _mm512_maskz_loadu_epi16(present, from + d);
    }

    // Keys and values of positions from `first` on, those outside [begin, end) as zeros.
    void pack(int first, int begin, int end) const {
        int64_t slots[TILE_POSITIONS];
        const int last = first + TILE_POSITIONS < end ? first + TILE_POSITIONS : end;
        const int size = int(padded_inputs(last - first));
        for (int i = 0; i < size; i++) {
            const bool seen = first + i >= begin && first + i < last;
            slots[i] = seen ? slot(first + i) * stride : -1;
        }
        for (int i = 0; i < size; i += PANEL) pack_keys(slots + i, packed_keys + i * width);
        for (int i = 0; i < size; i += 2) pack_values(slots + i, packed_values + i * PANEL);
        finish_stores(packed_keys);
    }

    __m512i load_at(const uint16_t* from, int64_t slot, int d) const {
        return slot < 0 ? __m512i{} : load_part(from + slot, d);
    }

    // Pairs of dimensions beside each other, of PANEL keys.
    void pack_keys(const int64_t* slots, uint16_t* to) const {
        __m512i rows[PANEL];
        for (int d = 0; d < width; d += TILE_INPUTS) {
            for (int i = 0; i < PANEL; i++) rows[i] = load_at(keys, slots[i], d);
            transpose(rows);
            for (int i = 0; i < PANEL; i++, to += 2 * PANEL) _mm512_storeu_si512(to, rows[i]);
        }
    }

    // Pairs of positions beside each other, of two values.
    void pack_values(const int64_t* slots, uint16_t* to) const {
        const __m512i places = _mm512_set_epi16(
            47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
            4, 35, 3, 34, 2, 33, 1, 32, 0); // of the first half of both; the second is 16 further
        const __m512i further = _mm512_add_epi16(places, _mm512_set1_epi16(PANEL));
        constexpr int panel = TILE_POSITIONS * PANEL;
        for (int d = 0; d < width; d += TILE_INPUTS, to += 2 * panel) {
            const __m512i even = load_at(values, slots[0], d), odd = load_at(values, slots[1], d);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, places, odd));
            _mm512_storeu_si512(to + panel, _mm512_permutex2var_epi16(even, further, odd));
        }
    }

    // What one tile of queries, or two, see of the positions from `first` on.
    void add(int tile, int first) const {
        const int tiles = num_tiles - tile < 2 ? 1 : 2, last = tile + tiles - 1;
        int length = seen_to(token_of(last) + rows_of(last) - 1) - first;
        if (length <= 0) return;
        if (length > TILE_POSITIONS) length = TILE_POSITIONS;
        const int size = int(padded_inputs(length));
        score(tile, tiles, size);
        for (int i = 0; i < tiles; i++)
            for (int m = 0; m < rows_of(tile + i); m++) weigh(tile + i, i, m, first, size);
        finish_stores(weights);
        mix(tile, tiles, size);
    }

    // scores = the products of the queries with so many keys
    void score(int tile, int tiles, int size) const {
        for (int p = 0; p < size; p += 2 * PANEL)
            multiply_tiles(
                tiles, 2, packed_queries + tile * TILE_ROWS * width, TILE_ROWS * width, TILE_ROWS,
                packed_keys + p * width, PANEL * width, width / TILE_INPUTS, scores + p,
                TILE_POSITIONS, true);
    }

    // The weights of `size` positions from `first` on for a query, its row `m` of a tile.
    void weigh(int tile, int side, int m, int first, int size) const {
        const int from = seen_from(token_of(tile) + m) - first;
        const int to = seen_to(token_of(tile) + m) - first, at = tile * TILE_ROWS + m;
        float* own = scores + (side * TILE_ROWS + m) * TILE_POSITIONS;
        uint16_t* given = weights + (side * TILE_POSITIONS * TILE_ROWS + m * TILE_INPUTS);
        if (from >= size || to <= 0) return clear(given, size);
        if (model.score_cap > 0) cap(own, size);
        if (from > 0 || to < size) hide(own, from, to, size);
        const float rate = (model.score_cap > 0 ? 1 : layer.scale) * 1.44269504f; // to powers of 2
        const float before = highest[at], found = maximum(own, size);
        if (found > before) {
            correct(at, (before - found) * rate);
            highest[at] = found;
        }
        const __m512 scale = _mm512_set1_ps(rate), shift = _mm512_set1_ps(highest[at] * rate);
        __m512 total = _mm512_loadu_ps(totals + at * PANEL);
        for (int j = 0; j < size; j += TILE_INPUTS, given += TILE_ROWS * TILE_INPUTS) {
            const __m512 low = exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(own + j), scale, shift));
            const __m512 high =
                exp2_of(_mm512_fmsub_ps(_mm512_loadu_ps(own + j + 16), scale, shift));
            total += low + high;
            _mm512_storeu_si512(given, rounded(low, high));
        }
        _mm512_storeu_ps(totals + at * PANEL, total);
    }

    // Scores outside [from, to) that weigh nothing.
    static void hide(float* own, int from, int to, int size) {
        const __m512 lowest = _mm512_set1_ps(-1e30f); // of which 2^x can be computed
        for (int j = 0; j < size; j += 16)
            _mm512_mask_storeu_ps(own + j, __mmask16(~lanes(from - j, to - j)), lowest);
    }

    static void clear(uint16_t* given, int size) {
        for (int j = 0; j < size; j += TILE_INPUTS, given += TILE_ROWS * TILE_INPUTS)
            _mm512_storeu_si512(given, __m512i{});
    }

    void cap(float* own, int size) const {
        for (int j = 0; j < size; j++)
            own[j] = model.score_cap * tanhf(own[j] * layer.scale / model.score_cap);
    }

    // What was summed with a highest score that was lower, by so many powers of 2.
    void correct(int at, float lower) const {
        if (highest[at] == -INFINITY) return; // there is nothing yet
        const __m512 factor = exp2_of(_mm512_set1_ps(lower));
        float* own = sums + at * width;
        for (int d = 0; d < width; d += 16)
            _mm512_storeu_ps(own + d, _mm512_loadu_ps(own + d) * factor);
        float* total = totals + at * PANEL;
        _mm512_storeu_ps(total, _mm512_loadu_ps(total) * factor);
    }

    // sums += weights times the values
    void mix(int tile, int tiles, int size) const {
        for (int d = 0; d < width; d += 2 * PANEL)
            multiply_tiles(
                tiles, 2, weights, TILE_POSITIONS * TILE_ROWS, TILE_ROWS,
                packed_values + d * TILE_POSITIONS, PANEL * TILE_POSITIONS, size / TILE_INPUTS,
                sums + tile * TILE_ROWS * width + d, width, false);
    }

    void write() const {
        for (int tile = 0; tile < num_tiles; tile++)
            for (int i = 0; i < rows_of(tile); i++) {
                const int at = tile * TILE_ROWS + i;
                float* to = out + (token_of(tile) + i) * b.mixed_width + tile % group * dim;
                const __m512 parts = _mm512_loadu_ps(totals + at * PANEL);
                const __m512 total = _mm512_set1_ps(_mm512_reduce_add_ps(parts));
                for (int d = 0; d < dim; d += 16) {
                    const __m512 sum = _mm512_loadu_ps(sums + at * width + d);
                    _mm512_mask_storeu_ps(to + d, lanes(0, dim - d), sum / total);
                }
            }
    }
};

#else

class TileBlock { // never possible
  public:
    static bool is_possible() { return false; }
    TileBlock(
        const Model&, const Layer&, const Call&, const Scratch&, const Row&, int, int, int,
        const uint16_t*, const uint16_t*, float*) {}
    void attend() const {}
};

#endif
