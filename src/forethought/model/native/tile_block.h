// Attention of long rows by AMX, over keys and values in bf16.

#pragma once

#include "amx.h"
#include "products.h"
#include "scratch.h"
#include "sight.h"
#include "softmax.h"
#include "structures.h"
#include "vectors.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#if HAS_AMX

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

// Queries of `count` consecutive tokens of a causal row, at most block_tokens(), of the heads that
// share a key head. Keys and values are packed as weights are (panels.h): keys are outputs, and
// positions are the inputs that values are summed over. Queries, and the weights of positions, are
// split as the inputs of products are, in tiles of TILE_TOKENS tokens of one head.
class TileBlock {
  public:
    static bool is_possible() { return amx_allowed(); }

    // scratch: scores, and tile_block_size() floats.
    TileBlock(
        const Model& model, const Layer& layer, const Call& call, const Scratch& b, const Row& row,
        int n, int count, int kv_head, const uint16_t* keys, const uint16_t* values, float* scratch)
        : model(model), layer(layer), call(call), b(b), row(row), n(n), count(count),
          group(model.num_heads / model.num_kv_heads), dim(model.head_dim),
          width(int(padded_inputs(dim))), capacity(call.max_length),
          stride(int64_t(model.num_kv_heads) * dim), begin(Sight(row, n, layer.window).low),
          keys(keys + kv_head * dim), values(values + kv_head * dim), scores(scratch) {
        const int64_t token = row.start + n, head = int64_t(kv_head) * group;
        queries = b.qkv + token * b.qkv_width + head * dim;
        out = b.mixed + token * b.mixed_width + head * dim;
        weights = (uint16_t*)(scratch + round_up(int64_t(group) * count * capacity));
        packed_keys = weights + 2 * TILE_TOKENS * padded_inputs(capacity);
        packed_values = packed_keys + 2 * PANEL * width;
        packed_queries = packed_values + padded_inputs(capacity) * width;
    }

    void attend() const {
        configure_tiles(TILE_ROWS);
        split_queries();
        for (int p = begin; p < seen_to(count - 1); p += 2 * PANEL) score(p);
        pack_values();
        for (int g = 0; g < group; g++)
            for (int m = 0; m < count; m += TILE_TOKENS) mix(g, m);
    }

  private:
    const Model& model;
    const Layer& layer;
    const Call& call;
    const Scratch& b;
    const Row& row;
    const int n, count, group, dim, width, capacity;
    const int64_t stride;
    const int begin; // the first position that is read
    const uint16_t *keys, *values;
    float* scores;           // [group, count, capacity]
    uint16_t* weights;       // [capacity / 32, TILE_TOKENS, 2, 32], split
    uint16_t* packed_keys;   // [2, width / 2, PANEL, 2]
    uint16_t* packed_values; // [width / PANEL, capacity / 2, PANEL, 2]
    uint16_t* packed_queries; // [group, tiles, width / 32, TILE_TOKENS, 2, 32], split
    const float* queries;
    float* out;

    int seen_to(int m) const { return row.prefix + n + m + 1; } // recent tokens follow the prefix

    int rows_of(int m, int most) const { return count - m < most ? count - m : most; }

    float* scores_of(int g, int m) const { return scores + int64_t(g * count + m) * capacity; }

    // The tile of queries from token m on, a multiple of TILE_TOKENS.
    uint16_t* queries_of(int g, int m) const {
        const int tiles = (count + TILE_TOKENS - 1) / TILE_TOKENS;
        return packed_queries + int64_t(g * tiles + m / TILE_TOKENS) * TILE_TOKENS * 2 * width;
    }

    int64_t slot(int p) const {
        return p < row.prefix ? prefix_slot(row, p, call.page_size) : row.slots[p - row.prefix];
    }

    void split_queries() const {
        for (int g = 0; g < group; g++)
            for (int m = 0; m < count; m++)
                split(
                    queries + m * b.qkv_width + g * dim, dim, TILE_TOKENS,
                    queries_of(g, m) + m % TILE_TOKENS * 2 * TILE_INPUTS);
    }

    // 32 elements of a key or value from `d` on, without those of other heads.
    __m512i load_part(const uint16_t* from, int d) const {
        const uint32_t present = dim - d < TILE_INPUTS ? (1u << (dim - d)) - 1 : ~0u;
        return _mm512_maskz_loadu_epi16(present, from + d);
    }

    // Pairs of dimensions beside each other, of the keys at positions [p, p + valid).
    void pack_keys(int p, int valid) const {
        __m512i rows[PANEL];
        for (int first = 0; first < 2 * PANEL; first += PANEL)
            for (int d = 0; d < width; d += TILE_INPUTS) {
                for (int i = 0; i < PANEL; i++)
                    rows[i] = first + i < valid
                                  ? load_part(keys + slot(p + first + i) * stride, d)
                                  : __m512i{};
                transpose(rows);
                uint16_t* to = packed_keys + (first * width + d * PANEL);
                for (int i = 0; i < PANEL; i++) _mm512_storeu_si512(to + i * 2 * PANEL, rows[i]);
            }
        finish_stores(packed_keys);
    }

    // Scores of all queries for positions [p, p + 2 * PANEL), as far as they are seen.
    void score(int p) const {
        const int left = seen_to(count - 1) - p, valid = left < 2 * PANEL ? left : 2 * PANEL;
        alignas(64) float tile[2 * TILE_TOKENS * 2 * PANEL];
        pack_keys(p, valid);
        for (int g = 0; g < group; g++)
            for (int m = 0; m < count; m += 2 * TILE_TOKENS) {
                const int rows = rows_of(m, 2 * TILE_TOKENS);
                if (p >= seen_to(m + rows - 1)) continue;
                multiply_tiles(
                    queries_of(g, m), TILE_TOKENS, rows, packed_keys, PANEL * width, 2,
                    width / TILE_INPUTS, tile);
                for (int i = 0; i < rows; i++)
                    write_scores(tile + i * 2 * PANEL, valid, scores_of(g, m + i) + p);
            }
    }

    void write_scores(float* found, int valid, float* to) const {
        for (int j = 0; j < 2 * PANEL; j += LANES) store(found + j, load(found + j) * layer.scale);
        if (model.score_cap > 0)
            for (int j = 0; j < valid; j++)
                found[j] = model.score_cap * tanhf(found[j] / model.score_cap);
        copy_row(found, valid, to);
    }

    // Pairs of positions beside each other, from `begin` on; those behind the last are zeros.
    void pack_values() const {
        const __m512i places = _mm512_set_epi16(
            47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
            4, 35, 3, 34, 2, 33, 1, 32, 0); // of the first half of both; the second is 16 further
        const __m512i further = _mm512_add_epi16(places, _mm512_set1_epi16(PANEL));
        const int end = seen_to(count - 1), padded = begin + int(padded_inputs(end - begin));
        const int64_t panel = panel_stride();
        for (int p = begin; p < padded; p += 2)
            for (int d = 0; d < width; d += TILE_INPUTS) {
                const auto of = [&](int p) {
                    return p < end ? load_part(values + slot(p) * stride, d) : __m512i{};
                };
                const __m512i even = of(p), odd = of(p + 1);
                uint16_t* to = packed_values + d / PANEL * panel + (p - begin) * PANEL;
                _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, places, odd));
                _mm512_storeu_si512(to + panel, _mm512_permutex2var_epi16(even, further, odd));
            }
        finish_stores(packed_values);
    }

    int64_t panel_stride() const { return padded_inputs(capacity) * PANEL; }

    // The outputs of a tile of queries, from their scores.
    void mix(int g, int m) const {
        const int rows = rows_of(m, TILE_TOKENS), length = seen_to(m + rows - 1) - begin;
        float totals[TILE_TOKENS];
        for (int i = 0; i < rows; i++) {
            float* own = scores_of(g, m + i);
            const int from = Sight(row, n + m + i, layer.window).low, to = seen_to(m + i);
            totals[i] = exponentials(own + from, to - from);
            for (int p = begin; p < from; p++) own[p] = 0;
            for (int p = to; p < begin + length; p++) own[p] = 0;
            split(own + begin, length, TILE_TOKENS, weights + i * 2 * TILE_INPUTS);
        }
        finish_stores(weights);
        const int steps = int(padded_inputs(length) / TILE_INPUTS);
        alignas(64) float tile[TILE_TOKENS * 4 * PANEL];
        for (int d = 0, panels; d < width; d += panels * PANEL) {
            panels = width - d < 4 * PANEL ? 2 : 4;
            multiply_tiles(
                weights, TILE_TOKENS, rows, packed_values + d / PANEL * panel_stride(),
                panel_stride(), panels, steps, tile);
            for (int i = 0; i < rows; i++) {
                float* found = tile + i * panels * PANEL;
                for (int j = 0; j < panels * PANEL; j += LANES)
                    store(found + j, load(found + j) / totals[i]);
                const int valid = dim - d < panels * PANEL ? dim - d : panels * PANEL;
                memcpy(out + (m + i) * b.mixed_width + g * dim + d, found, valid * 4);
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
