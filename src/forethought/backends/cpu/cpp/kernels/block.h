// Attention of long rows in float32.

#pragma once

#include "../scratch.h"
#include "../structures.h"
#include "chunks.h"
#include "entries.h"
#include "products.h"
#include "sight.h"
#include "softmax.h"
#include "vectors.h"

#include <cmath>
#include <cstring>

// tile [rows, PANEL] += x [rows, num_inputs] times one panel; rows: at most MAX_ROWS.
template <class T>
static inline void multiply_some(
    int rows, const T* w, int64_t stride, const float* x, int64_t ldx, int num_inputs,
    float* tile) {
    switch (rows) {
        case 1: return multiply<T, 1, 1>(w, 0, stride, num_inputs, {x, ldx, tile});
        case 2: return multiply<T, 2, 1>(w, 0, stride, num_inputs, {x, ldx, tile});
        case 3: return multiply<T, 3, 1>(w, 0, stride, num_inputs, {x, ldx, tile});
        case 4: return multiply<T, 4, 1>(w, 0, stride, num_inputs, {x, ldx, tile});
        case 5: return multiply<T, 5, 1>(w, 0, stride, num_inputs, {x, ldx, tile});
        default: return multiply<T, 6, 1>(w, 0, stride, num_inputs, {x, ldx, tile});
    }
}

// tile [ROWS, PANEL] = x [ROWS, num_inputs] times one panel, each sum in the order of dots() in
// chunks.h: lane by lane, then those of the lanes.
template <int ROWS>
static __attribute__((noinline)) void multiply_by_lane(
    const float* w, const float* x, int64_t ldx, int num_inputs, float* tile) {
    Vec parts[ROWS * VECS][LANES];
    for (int lane = 0; lane < LANES; lane++) {
        Vec acc[ROWS][VECS] = {};
        for (int k = lane; k < num_inputs; k += LANES) {
            Vec weight[VECS];
            for (int v = 0; v < VECS; v++) weight[v] = load(w + k * PANEL + v * LANES);
            for (int m = 0; m < ROWS; m++) {
                const Vec value = broadcast(x[m * ldx + k]);
                for (int v = 0; v < VECS; v++) acc[m][v] += value * weight[v];
            }
        }
        for (int m = 0; m < ROWS; m++)
            for (int v = 0; v < VECS; v++) parts[m * VECS + v][lane] = acc[m][v];
    }
    for (int i = 0; i < ROWS * VECS; i++) store(tile + i * LANES, sum_by_lane(parts[i]));
}

// rows: at most MAX_ROWS.
static inline void multiply_some_by_lane(
    int rows, const float* w, const float* x, int64_t ldx, int num_inputs, float* tile) {
    switch (rows) {
        case 1: return multiply_by_lane<1>(w, x, ldx, num_inputs, tile);
        case 2: return multiply_by_lane<2>(w, x, ldx, num_inputs, tile);
        case 3: return multiply_by_lane<3>(w, x, ldx, num_inputs, tile);
        case 4: return multiply_by_lane<4>(w, x, ldx, num_inputs, tile);
        case 5: return multiply_by_lane<5>(w, x, ldx, num_inputs, tile);
        default: return multiply_by_lane<6>(w, x, ldx, num_inputs, tile);
    }
}

#if LANES == 8 && defined(__AVX__)

// v [8] of 8 lanes -> their transpose
static inline void transpose(Vec* v) {
    __m256 pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m256d a = (__m256d)pairs[i + j], b = (__m256d)pairs[i + 2 + j];
            quads[i + 2 * j] = (__m256)_mm256_unpacklo_pd(a, b);
            quads[i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd(a, b);
        }
    for (int i = 0; i < 4; i++) {
        v[i] = (Vec)_mm256_permute2f128_ps(quads[i], quads[4 + i], 0x20);
        v[4 + i] = (Vec)_mm256_permute2f128_ps(quads[i], quads[4 + i], 0x31);
    }
}

#endif

// Queries of `count` consecutive tokens of a causal row, at most block_tokens(), of the heads that
// share a key head, over BLOCK_POSITIONS at a time, whose sums are merged in order of position
// (FlashAttention, Dao et al. 2022, algorithm 1). Passes take up to MAX_ROWS tokens of one head.
//
// The positions of a block are those of a chunk of Together, with a window they begin at a multiple
// of BLOCK_POSITIONS. Those that a query does not see add zeros, as long as their values are finite,
// so its sums do not depend on the queries beside it. Without a window, and with keys and values in
// float32, they are those of Together to the last bit.
template <class T> class Block {
  public:
    // scratch: block_size() floats.
    Block(
        const Model& model, const Layer& layer, const Call& call, const Scratch& b, const Row& row,
        int n, int count, int kv_head, const T* keys, const T* values, float* scratch)
        : model(model), layer(layer), call(call), b(b), row(row), n(n), count(count),
          group(model.num_heads / model.num_kv_heads), dim(model.head_dim),
          width(int(round_up(dim))), stride(int64_t(model.num_kv_heads) * entry_size<T>(dim)),
          keys(keys + kv_head * entry_size<T>(dim)), values(values + kv_head * entry_size<T>(dim)) {
        const int64_t token = row.start + n, head = int64_t(kv_head) * group, rows = group * count;
        queries = b.qkv + token * b.qkv_width + head * dim;
        out = b.mixed + token * b.mixed_width + head * dim;
        scores = scratch;
        sums = scores + rows * BLOCK_POSITIONS;
        packed = sums + rows * width;
        unpacked = packed + PANEL * width;
        totals = unpacked + BLOCK_POSITIONS * width;
        highest = totals + rows;
        wholes = highest + rows;
    }

    void attend() const {
        const int rows = group * count, begin = seen_from(0), end = seen_to(count - 1);
        const int first = layer.window ? begin / BLOCK_POSITIONS * BLOCK_POSITIONS : begin;
        for (int i = 0; i < rows; i++) *whole(i).total = 0;
        for (int p = first; p < end; p += BLOCK_POSITIONS) {
            memset(sums, 0, int64_t(rows) * width * 4);
            memset(totals, 0, rows * 4);
            add(p, p < begin ? begin : p, p + BLOCK_POSITIONS < end ? p + BLOCK_POSITIONS : end);
            for (int i = 0; i < rows; i++) keep(i);
        }
        for (int i = 0; i < rows; i++) write(i);
    }

  private:
    const Model& model;
    const Layer& layer;
    const Call& call;
    const Scratch& b;
    const Row& row;
    const int n, count, group, dim, width;
    const int64_t stride;
    const T *keys, *values;
    float* scores;           // [group * count, BLOCK_POSITIONS]
    float* sums;             // of each pass [width / PANEL, its rows, PANEL]
    float* packed;           // [dim, PANEL]: keys
    float* unpacked;         // [BLOCK_POSITIONS, width]: keys or values in 8 bits, as floats
    float *totals, *highest; // [group * count]: of the exponentials, of the scores
    float* wholes;           // [group * count + 1, part_size()]: of all positions so far
    const float* queries;
    float* out;

    int rows_of(int m) const { return count - m < MAX_ROWS ? count - m : MAX_ROWS; }

    int seen_from(int m) const { return Sight(row, n + m, layer.window).low; }

    int seen_to(int m) const { return row.prefix + n + m + 1; } // recent tokens follow the prefix

    float* sums_of(int i) const { // PANEL of them; the next are rows_of() * PANEL further
        const int pass = i % count / MAX_ROWS * MAX_ROWS;
        return sums + int64_t(i - i % count + pass) * width + (i % count - pass) * PANEL;
    }

    // Call `visit` with each pass: the head and the first token.
    template <class F> void each_pass(F&& visit) const {
        for (int g = 0; g < group; g++)
            for (int m = 0; m < count; m += MAX_ROWS) visit(g, m);
    }

    // What the queries see of positions [begin, end), of those from `first` on.
    void add(int first, int begin, int end) const {
        int64_t offsets[BLOCK_POSITIONS]; // of keys and values, in elements
        for (int p = begin; p < end; p++) offsets[p - first] = slot(p) * stride;
        const auto seen_keys = read(keys, offsets, begin - first, end - first);
        for (int p = begin; p < end; p += PANEL) { // no other slot is read
            const int valid = end - p < PANEL ? end - p : PANEL;
            pack(seen_keys, p - first, valid);
            each_pass([&](int g, int m) {
                if (p < seen_to(m + rows_of(m) - 1)) score(p - first, valid, g, m);
            });
        }
        const auto seen_values = read(values, offsets, begin - first, end - first);
        each_pass([&](int g, int m) {
            const int low = seen_from(m), high = seen_to(m + rows_of(m) - 1);
            const int from = (low > begin ? low : begin) - first;
            const int to = (high < end ? high : end) - first;
            if (from >= to) return;
            for (int i = 0; i < rows_of(m); i++) weigh(g * count + m + i, first, from, to);
            mix(g, m, seen_values, from, to);
        });
    }

    int64_t slot(int p) const {
        return p < row.prefix ? prefix_slot(row, p, call.page_size) : row.slots[p - row.prefix];
    }

    // Keys or values of the positions of a block, as they are multiplied.
    template <class E> struct Entries {
        const E* entries;
        const int64_t* offsets; // null: they follow each other
        int64_t stride;

        const E* at(int i) const { return entries + (offsets ? offsets[i] : i * stride); }
    };

    // Of positions [begin, end) of the block; integers are converted once for all queries.
    auto read(const T* entries, const int64_t* offsets, int begin, int end) const {
        if constexpr (sizeof(T) == 1) {
            for (int i = begin; i < end; i++)
                load_entry(entries + offsets[i], dim, unpacked + i * width);
            return Entries<float>{unpacked, nullptr, width};
        } else {
            return Entries<T>{entries, offsets, stride};
        }
    }

    // packed = `valid` keys from `first` on, and zeros
    template <class E> void pack(const Entries<E>& keys, int first, int valid) const {
        int d = 0;
#if LANES == 8 && defined(__AVX__)
        for (; d + LANES <= dim; d += LANES)
            for (int i = 0; i < PANEL; i += LANES) {
                Vec part[LANES];
                for (int j = 0; j < LANES; j++)
                    part[j] = i + j < valid ? load(keys.at(first + i + j) + d) : Vec{};
                transpose(part);
                for (int j = 0; j < LANES; j++) store(packed + (d + j) * PANEL + i, part[j]);
            }
#endif
        for (int i = 0; i < PANEL; i++)
            for (int k = d; k < dim; k++)
                packed[k * PANEL + i] = i < valid ? scalar(keys.at(first + i) + k) : 0;
    }

    // The scores of one pass and so many of PANEL positions, the first of which is `at`.
    void score(int at, int valid, int g, int m) const {
        alignas(64) float tile[MAX_ROWS * PANEL];
        const float* q = queries + m * b.qkv_width + g * dim;
        multiply_some_by_lane(rows_of(m), packed, q, b.qkv_width, dim, tile);
        for (int i = 0; i < rows_of(m); i++) {
            float *x = tile + i * PANEL, *to = scores + (g * count + m + i) * BLOCK_POSITIONS + at;
            for (int j = 0; j < PANEL; j += LANES) store(x + j, load(x + j) * layer.scale);
            if (model.score_cap > 0)
                for (int j = 0; j < valid; j++)
                    x[j] = model.score_cap * tanhf(x[j] / model.score_cap);
            copy_row(x, valid, to);
        }
    }

    // The weights of a query for positions [begin, end) from `first` on, in place of its scores.
    void weigh(int i, int first, int begin, int end) const {
        float* own = scores + int64_t(i) * BLOCK_POSITIONS;
        const int low = seen_from(i % count) - first, high = seen_to(i % count) - first;
        const int from = low > begin ? low : begin, to = high < end ? high : end;
        if (from >= to) return (void)memset(own + begin, 0, (end - begin) * 4);
        highest[i] = maximum(own + from, to - from);
        totals[i] = exponentials(own + from, to - from, highest[i]);
        for (int p = begin; p < from; p++) own[p] = 0;
        for (int p = to; p < end; p++) own[p] = 0;
    }

    Part whole(int i) const { return Part(wholes + i * part_size(dim), dim); }

    // Merge what a query attends to in a block into its whole.
    void keep(int i) const {
        if (totals[i] == 0) return; // it sees none of the positions
        const Part into = whole(i);
        const bool is_first = *into.total == 0;
        const Part part = is_first ? into : whole(group * count);
        const int next = rows_of(i % count / MAX_ROWS * MAX_ROWS) * PANEL;
        const float* own = sums_of(i);
        for (int d = 0; d < dim; d += PANEL, own += next)
            copy_row(own, dim - d < PANEL ? dim - d : PANEL, part.sums + d);
        *part.total = totals[i], *part.highest = highest[i];
        if (!is_first) merge(part, dim, into);
    }

    // sums += weights times the values of positions [begin, end), of one pass
    template <class E> void mix(int g, int m, const Entries<E>& values, int begin, int end) const {
        const int rows = rows_of(m);
        const float* weights = scores + int64_t(g * count + m) * BLOCK_POSITIONS;
        float* own = sums_of(g * count + m);
        const int64_t next = values.stride;
        for (int p = begin, last; p < end; p = last) { // runs of tokens that follow each other
            for (last = p + 1; last < end && values.at(last) == values.at(p) + (last - p) * next;)
                last++;
            const E* from = values.at(p);
            int d = 0;
            for (; d + PANEL <= dim; d += PANEL)
                multiply_some<E>(
                    rows, from + d, next, weights + p, BLOCK_POSITIONS, last - p, own + d * rows);
            if (d < dim)
                mix_rest(rows, from + d, next, dim - d, weights + p, last - p, own + d * rows);
        }
    }

    // The same of the dimensions that are no whole panel.
    template <class E>
    void mix_rest(
        int rows, const E* from, int64_t next, int size, const float* weights, int num_tokens,
        float* own) const {
        for (int p = 0; p < num_tokens; p++)
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < size; j++)
                    own[i * PANEL + j] +=
                        weights[i * BLOCK_POSITIONS + p] * scalar(from + p * next + j);
    }

    void write(int i) const {
        const Part all = whole(i);
        float* y = out + i % count * b.mixed_width + i / count * dim;
        for (int d = 0; d < dim; d++) y[d] = all.sums[d] / *all.total;
    }
};
