// Keys and values of new tokens, and attention of queries to them and to those in the pages.

#pragma once

#include "norms.h"
#include "products.h"
#include "scratch.h"
#include "sight.h"
#include "softmax.h"
#include "structures.h"
#include "tile_block.h"
#include "vectors.h"

#include <cmath>
#include <cstring>
#include <type_traits>

constexpr int BLOCK_QUERIES = 32; // new tokens of a row from which queries go in blocks

// Norm and rotate queries and keys, and store keys and values at the slots of their tokens.
template <class T>
static void rotate_and_store(
    const Model& model, const Layer& layer, const Call& call, const Scratch& b, T* keys, T* values,
    Share items) { // (token, head of queries, keys or values)
    const int dim = model.head_dim, rotated = model.rotary_dim, half = rotated / 2;
    const int heads = model.num_heads, kv_heads = model.num_kv_heads;
    const int per_token = heads + 2 * kv_heads;
    float turned[MAX_HEAD_DIM];
    for (int item = items.begin; item < items.end; item++) {
        const int t = item / per_token, head = item % per_token;
        float* x = b.qkv + t * b.qkv_width + int64_t(head) * dim;
        const int64_t slot = call.slots[t];
        if (head >= heads + kv_heads) {
            T* value = values + (slot * kv_heads + head - heads - kv_heads) * dim;
            for (int d = 0; d < dim; d++) put(value + d, x[d]);
            continue;
        }
        const float* weight = head < heads ? layer.q_norm : layer.k_norm;
        if (weight) norm(x, weight, dim, model.head_norm_eps, x);
        const float* cosines = layer.rotary + call.positions[t] * 2 * rotated;
        const float* sines = cosines + rotated;
        for (int d = 0; d < half; d++) turned[d] = x[d] * cosines[d] + x[d + half] * sines[d];
        for (int d = half; d < rotated; d++) turned[d] = x[d] * cosines[d] + x[d - half] * sines[d];
        memcpy(x, turned, rotated * 4);
        if (head >= heads) {
            T* key = keys + (slot * kv_heads + head - heads) * dim;
            for (int d = 0; d < dim; d++) put(key + d, x[d]);
        }
    }
}

// Queries that share the keys and values which they read, in registers; at most MAX_QUERIES.
constexpr int MAX_QUERIES = 4;

// out [N] = the products of N queries with one key
template <class T, int N>
static inline void dots(const float* const* q, const T* key, int size, float* out) {
    Vec total[N] = {};
    int i = 0;
    for (; i + LANES <= size; i += LANES) {
        const Vec k = load(key + i);
        for (int n = 0; n < N; n++) total[n] += load(q[n] + i) * k;
    }
    for (int n = 0; n < N; n++) out[n] = sum(total[n]);
    for (; i < size; i++)
        for (int n = 0; n < N; n++) out[n] += q[n][i] * scalar(key + i);
}

// scores [N][count] of N queries for the keys at some offsets.
template <class T, int N>
static void score_keys(
    const float* const* q, const T* keys, const int64_t* offsets, int count, int dim, float scale,
    float cap, float* const* scores) {
    float found[N];
    for (int p = 0; p < count; p++) {
        dots<T, N>(q, keys + offsets[p], dim, found);
        for (int n = 0; n < N; n++) {
            const float x = found[n] * scale;
            scores[n][p] = cap > 0 ? cap * tanhf(x / cap) : x;
        }
    }
}

// out [N][dim] += the values at some offsets, each times its weight [N][count].
template <class T, int N>
static void mix_values(
    const float* const* weights, const T* values, const int64_t* offsets, int count, int dim,
    float* const* out) {
    constexpr int V = LANES == 16 ? 4 : 2; // vectors of an output that stay in registers
    int d = 0;
    for (; d + V * LANES <= dim; d += V * LANES) {
        Vec acc[N][V];
        for (int n = 0; n < N; n++)
            for (int v = 0; v < V; v++) acc[n][v] = load(out[n] + d + v * LANES);
        for (int p = 0; p < count; p++)
            for (int v = 0; v < V; v++) {
                const Vec value = load(values + offsets[p] + d + v * LANES);
                for (int n = 0; n < N; n++) acc[n][v] += value * weights[n][p];
            }
        for (int n = 0; n < N; n++)
            for (int v = 0; v < V; v++) store(out[n] + d + v * LANES, acc[n][v]);
    }
    for (int p = 0; p < count; p++) {
        const T* value = values + offsets[p];
        for (int n = 0; n < N; n++) {
            int i = d;
            for (; i + LANES <= dim; i += LANES)
                store(out[n] + i, load(out[n] + i) + load(value + i) * weights[n][p]);
            for (; i < dim; i++) out[n][i] += scalar(value + i) * weights[n][p];
        }
    }
}

// Queries of `count` consecutive tokens of a row that see the same of its prefix, of the heads that
// share a key head. A query's sums run over the tokens that it sees in order of position, whatever
// other queries are computed beside it.
template <class T> class Together {
  public:
    Together(
        const Model& model, const Layer& layer, const Call& call, const Scratch& b, const Row& row,
        int n, int count, int kv_head, const T* keys, const T* values, float* scratch)
        : layer(layer), b(b), row(row), n(n), count(count),
          group(model.num_heads / model.num_kv_heads), dim(model.head_dim),
          rotated(model.rotary_dim), capacity(call.max_length), page_size(call.page_size),
          stride(int64_t(model.num_kv_heads) * dim), cap(model.score_cap), keys(keys + kv_head * dim),
          values(values + kv_head * dim), scores(scratch), first_head(int64_t(kv_head) * group) {
        offsets = (int64_t*)(scratch + int64_t(group) * count * capacity);
    }

    // As many tokens as scratch memory and threads allow.
    static int tokens(const Model& model, const Layer& layer, const Row& row, Thread thread) {
        if (layer.window) return 1; // each sees another part of the prefix
        const int64_t most = BLOCK_ROWS / (model.num_heads / model.num_kv_heads);
        const int64_t shared = row.num_tokens * model.num_kv_heads / thread.count;
        return int(most < 1 || shared < 1 ? 1 : most < shared ? most : shared);
    }

    void attend() {
        if (row.num_segments) return attend_segments();
        const int low = Sight(row, n, layer.window).low;
        const int length = row.prefix > low ? int(row.prefix) - low : 0;
        const int queries = count * group;
        list_prefix(low);
        each_few(0, queries, [&](auto few, int first) { score<few()>(first, 0, length); });
        for (int m = 0; m < count; m++) {
            const int more = list_recent(m, length);
            const int begin = m * group, end = begin + group;
            each_few(begin, end, [&](auto few, int first) { score<few()>(first, length, more); });
            for (int i = begin; i < end; i++) {
                totals[i] = exponentials(scores_of(i), length + more);
                memset(out_of(i), 0, dim * 4);
            }
        }
        each_few(0, queries, [&](auto few, int first) { mix<few()>(first, 0, length); });
        for (int m = 0; m < count; m++) {
            const int more = list_recent(m, length);
            const int begin = m * group, end = begin + group;
            each_few(begin, end, [&](auto few, int first) { mix<few()>(first, length, more); });
            for (int i = begin; i < end; i++)
                for (int d = 0; d < dim; d++) out_of(i)[d] /= totals[i];
        }
    }

  private:
    const Layer& layer;
    const Scratch& b;
    const Row& row;
    const int n, count, group, dim, rotated, capacity, page_size;
    const int64_t stride;
    const float cap;
    const T *keys, *values;
    float* scores; // [count, group, capacity]
    const int64_t first_head;
    int64_t* offsets; // [capacity]: of keys and values, in elements
    float totals[BLOCK_ROWS > MAX_GROUP ? BLOCK_ROWS : MAX_GROUP];

    float* scores_of(int i) const { return scores + int64_t(i) * capacity; }

    const float* query_of(int i) const {
        return b.qkv + (row.start + n + i / group) * b.qkv_width + (first_head + i % group) * dim;
    }

    float* out_of(int i) const {
        return b.mixed + (row.start + n + i / group) * b.mixed_width +
               (first_head + i % group) * dim;
    }

    void list_prefix(int low) {
        for (int p = low; p < row.prefix; p++)
            offsets[p - low] = prefix_slot(row, p, page_size) * stride;
    }

    // Those of the recent tokens that token `m` sees, behind the prefix; returns how many.
    int list_recent(int m, int length) {
        const Sight sight(row, n + m, layer.window);
        int more = 0;
        for (int r = 0; r < row.num_recent; r++)
            if (sight.sees(r)) offsets[length + more++] = row.slots[r] * stride;
        return more;
    }

    // As attend(), where other sequences are seen: each query is rotated for each segment.
    void attend_segments() {
        const int prefix = int(row.prefix);
        list_prefix(0);
        for (int m = 0; m < count; m++) {
            const int length = prefix + list_recent(m, prefix);
            for (int i = m * group; i < (m + 1) * group; i++) {
                score_segments(i, length);
                const float total = exponentials(scores_of(i), length);
                memset(out_of(i), 0, dim * 4);
                mix<1>(i, 0, length);
                for (int d = 0; d < dim; d++) out_of(i)[d] /= total;
            }
        }
    }

    void score_segments(int i, int length) const {
        float turned[MAX_HEAD_DIM];
        const float* q = query_of(i);
        int begin = 0;
        for (int s = 0; s <= row.num_segments; s++) { // what follows the segments is its own
            const bool own = s == row.num_segments;
            const int size = own ? length - begin : int(row.segments[2 * s]);
            turn(q, own ? 0 : row.segments[2 * s + 1], turned);
            const float* turned_q = turned;
            float* to = scores_of(i) + begin;
            score_keys<T, 1>(&turned_q, keys, offsets + begin, size, dim, layer.scale, cap, &to);
            begin += size;
        }
    }

    // A rotated query, rotated by further positions. A factor of the table, its cosine at position
    // 0, is in the query already.
    void turn(const float* q, int64_t positions, float* turned) const {
        memcpy(turned, q, dim * 4);
        if (!positions) return;
        const float* cosines = layer.rotary + positions * 2 * rotated;
        const float* sines = cosines + rotated;
        const int half = rotated / 2;
        for (int d = 0; d < rotated; d++) {
            const float other = d < half ? q[d + half] : q[d - half];
            turned[d] = (q[d] * cosines[d] + other * sines[d]) / layer.rotary[0];
        }
    }

    // Queries [begin, end), up to MAX_QUERIES at a time.
    template <class F> static void each_few(int begin, int end, F&& compute) {
        for (int i = begin; i < end; i += MAX_QUERIES) switch (end - i) {
                case 1: compute(std::integral_constant<int, 1>(), i); break;
                case 2: compute(std::integral_constant<int, 2>(), i); break;
                case 3: compute(std::integral_constant<int, 3>(), i); break;
                default: compute(std::integral_constant<int, MAX_QUERIES>(), i);
            }
    }

    template <int N> void score(int first, int begin, int length) const {
        const float* q[N];
        float* to[N];
        for (int i = 0; i < N; i++) q[i] = query_of(first + i), to[i] = scores_of(first + i) + begin;
        score_keys<T, N>(q, keys, offsets + begin, length, dim, layer.scale, cap, to);
    }

    template <int N> void mix(int first, int begin, int length) const {
        const float* weights[N];
        float* out[N];
        for (int i = 0; i < N; i++) {
            weights[i] = scores_of(first + i) + begin;
            out[i] = out_of(first + i);
        }
        mix_values<T, N>(weights, values, offsets + begin, length, dim, out);
    }
};

// tile [rows, PANEL] += x [rows, num_inputs] times one panel; rows: at most MAX_ROWS.
template <class T>
static void multiply_some(
    int rows, const T* w, int64_t stride, const float* x, int64_t ldx, int num_inputs,
    float* tile) {
    switch (rows) {
        case 1: return multiply<T, 1, 1>(w, 0, stride, x, ldx, num_inputs, tile);
        case 2: return multiply<T, 2, 1>(w, 0, stride, x, ldx, num_inputs, tile);
        case 3: return multiply<T, 3, 1>(w, 0, stride, x, ldx, num_inputs, tile);
        case 4: return multiply<T, 4, 1>(w, 0, stride, x, ldx, num_inputs, tile);
        case 5: return multiply<T, 5, 1>(w, 0, stride, x, ldx, num_inputs, tile);
        default: return multiply<T, 6, 1>(w, 0, stride, x, ldx, num_inputs, tile);
    }
}

// Queries of `count` consecutive tokens of a causal row, at most block_tokens(), of the heads that
// share a key head: keys and values of PANEL positions at a time, as products of matrices. Passes
// take up to MAX_ROWS tokens of one head; each multiplies the positions that it sees.
template <class T> class Block {
  public:
    Block(
        const Model& model, const Layer& layer, const Call& call, const Scratch& b, const Row& row,
        int n, int count, int kv_head, const T* keys, const T* values, float* scratch)
        : model(model), layer(layer), call(call), b(b), row(row), n(n), count(count),
          group(model.num_heads / model.num_kv_heads), dim(model.head_dim),
          capacity(call.max_length), stride(int64_t(model.num_kv_heads) * dim),
          keys(keys + kv_head * dim), values(values + kv_head * dim), scores(scratch),
          packed(scratch + int64_t(group) * count * capacity) {
        const int64_t token = row.start + n, head = int64_t(kv_head) * group;
        queries = b.qkv + token * b.qkv_width + head * dim;
        out = b.mixed + token * b.mixed_width + head * dim;
    }

    void attend() const {
        score();
        for (int g = 0; g < group; g++)
            for (int m = 0; m < count; m += MAX_ROWS) mix(g, m);
    }

  private:
    const Model& model;
    const Layer& layer;
    const Call& call;
    const Scratch& b;
    const Row& row;
    const int n, count, group, dim, capacity;
    const int64_t stride;
    const T *keys, *values;
    float *scores, *packed; // [group, count, capacity], [dim, PANEL]
    const float* queries;
    float* out;

    int rows_of(int m) const { return count - m < MAX_ROWS ? count - m : MAX_ROWS; }

    int seen_from(int m) const { return Sight(row, n + m, layer.window).low; }

    int seen_to(int m) const { return row.prefix + n + m + 1; } // recent tokens follow the prefix

    float* scores_of(int g, int m) const { return scores + int64_t(g * count + m) * capacity; }

    int64_t slot(int p) const {
        return p < row.prefix ? prefix_slot(row, p, call.page_size) : row.slots[p - row.prefix];
    }

    void score() const {
        const int length = seen_to(count - 1);
        for (int p = seen_from(0); p < length; p += PANEL) { // no other slot is read
            const int valid = length - p < PANEL ? length - p : PANEL;
            pack(p, valid);
            for (int m = 0; m < count; m += MAX_ROWS)
                if (p < seen_to(m + rows_of(m) - 1))
                    for (int g = 0; g < group; g++) score_pass(p, valid, g, m);
        }
    }

    void pack(int p, int valid) const {
        for (int i = 0; i < PANEL; i++) {
            if (i < valid) {
                const T* key = keys + slot(p + i) * stride;
                for (int d = 0; d < dim; d++) packed[d * PANEL + i] = scalar(key + d);
            } else {
                for (int d = 0; d < dim; d++) packed[d * PANEL + i] = 0;
            }
        }
    }

    void score_pass(int p, int valid, int g, int m) const {
        alignas(64) float tile[MAX_ROWS * PANEL] = {};
        const float* q = queries + m * b.qkv_width + g * dim;
        multiply_some<float>(rows_of(m), packed, PANEL, q, b.qkv_width, dim, tile);
        for (int i = 0; i < rows_of(m); i++) {
            float* x = tile + i * PANEL;
            for (int j = 0; j < PANEL; j += LANES) store(x + j, load(x + j) * layer.scale);
            if (model.score_cap > 0)
                for (int j = 0; j < valid; j++)
                    x[j] = model.score_cap * tanhf(x[j] / model.score_cap);
            memcpy(scores_of(g, m + i) + p, x, valid * 4);
        }
    }

    // The outputs of one pass, from its scores.
    void mix(int g, int m) const {
        const int rows = rows_of(m), low = seen_from(m), length = seen_to(m + rows - 1);
        float totals[MAX_ROWS];
        for (int i = 0; i < rows; i++) {
            float* own = scores_of(g, m + i);
            const int begin = seen_from(m + i), stop = seen_to(m + i);
            totals[i] = exponentials(own + begin, stop - begin);
            for (int p = low; p < begin; p++) own[p] = 0;
            for (int p = stop; p < length; p++) own[p] = 0;
        }
        for (int d = 0; d < dim; d += PANEL) {
            alignas(64) float tile[MAX_ROWS * PANEL] = {};
            mix_panel(scores_of(g, m), rows, low, length, d, tile);
            for (int i = 0; i < rows; i++) {
                float* y = out + (m + i) * b.mixed_width + g * dim + d;
                for (int j = 0; j < PANEL && d + j < dim; j++)
                    y[j] = tile[i * PANEL + j] / totals[i];
            }
        }
    }

    // tile [rows, PANEL] += scores of positions [low, length) times their values from `d` on
    void mix_panel(const float* own, int rows, int low, int length, int d, float* tile) const {
        if (d + PANEL <= dim) {
            for (int p = low; p < length;) { // runs of tokens whose slots follow each other
                const int64_t begin = slot(p);
                int end = p + 1;
                while (end < length && slot(end) == begin + end - p) end++;
                multiply_some<T>(
                    rows, values + begin * stride + d, stride, own + p, capacity, end - p, tile);
                p = end;
            }
        } else {
            for (int p = low; p < length; p++)
                for (int i = 0; i < rows; i++)
                    for (int j = 0; j < dim - d; j++)
                        tile[i * PANEL + j] +=
                            own[i * capacity + p] * scalar(values + slot(p) * stride + d + j);
        }
    }
};

// All new tokens of the batch; (tokens, key head) pairs are dealt to the threads in turns, so that
// long and short rows go to all of them.
template <class T>
static void attend(
    const Model& model, const Layer& layer, const Call& call, const Scratch& b, const T* keys,
    const T* values, Thread thread) {
    const int group = model.num_heads / model.num_kv_heads;
    const bool tiles = std::is_same_v<T, uint16_t> && TileBlock::is_possible();
    const int tokens = tiles ? tile_tokens(group) : block_tokens(group);
    float* scores = b.scores + thread.index * b.scores_width;
    int item = 0;
    for (int r = 0; r < call.num_rows; r++) {
        const Row& row = call.rows[r];
        const bool blocks = !row.visible && !row.num_segments && row.num_tokens > BLOCK_QUERIES;
        const int step = blocks ? tokens : Together<T>::tokens(model, layer, row, thread);
        for (int n = 0; n < row.num_tokens; n += step) {
            const int count = row.num_tokens - n < step ? row.num_tokens - n : step;
            for (int kv_head = 0; kv_head < model.num_kv_heads; kv_head++) {
                if (item++ % thread.count != thread.index) continue;
                if (blocks && tiles)
                    TileBlock(
                        model, layer, call, b, row, n, count, kv_head, (const uint16_t*)keys,
                        (const uint16_t*)values, scores)
                        .attend();
                else if (blocks)
                    Block<T>(
                        model, layer, call, b, row, n, count, kv_head, keys, values, scores)
                        .attend();
                else
                    Together<T>(
                        model, layer, call, b, row, n, count, kv_head, keys, values, scores)
                        .attend();
            }
        }
    }
}
