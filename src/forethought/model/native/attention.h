// Keys and values of new tokens, and attention of queries to them and to those in the pages.

#pragma once

#include "norms.h"
#include "products.h"
#include "scratch.h"
#include "structures.h"
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

template <class T> static inline float dot(const float* a, const T* b, int size) {
    Vec total = {};
    int i = 0;
    for (; i + LANES <= size; i += LANES) total += load(a + i) * load(b + i);
    float result = sum(total);
    for (; i < size; i++) result += a[i] * scalar(b + i);
    return result;
}

template <class T> static inline void add_scaled(float* y, const T* x, float factor, int size) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) store(y + i, load(y + i) + load(x + i) * factor);
    for (; i < size; i++) y[i] += scalar(x + i) * factor;
}

// scores [length] -> their softmax, not divided by the sum, which is returned.
static float exponentials(float* scores, int length) {
    float highest = -INFINITY;
    for (int i = 0; i < length; i++) highest = scores[i] > highest ? scores[i] : highest;
    Vec total = {};
    int i = 0;
    for (; i + LANES <= length; i += LANES) {
        const Vec e = exp(load(scores + i) - highest);
        store(scores + i, e);
        total += e;
    }
    float rest = 0;
    for (; i < length; i++) {
        const Vec e = exp(broadcast(scores[i] - highest));
        scores[i] = e[0];
        rest += e[0];
    }
    return sum(total) + rest;
}

static inline int64_t prefix_slot(const Row& row, int position, int page_size) {
    if (row.first_slot >= 0) return row.first_slot + position;
    return int64_t(row.pages[position / page_size]) * page_size + position % page_size;
}

// The tokens of the row that token `n` attends to: prefix [low, prefix), then recent ones.
struct Sight {
    const Row& row;
    int n, window;
    int64_t position;
    int low;

    Sight(const Row& row, int n, int window) : row(row), n(n), window(window) {
        position = row.positions[row.num_recent - row.num_tokens + n];
        low = row.seen_from;
        if (window && position - window + 1 > low) low = int(position - window + 1);
    }

    bool sees(int recent) const {
        if (window && position - row.positions[recent] >= window) return false;
        if (row.visible) return row.visible[int64_t(n) * row.num_recent + recent];
        return recent <= row.num_recent - row.num_tokens + n;
    }
};

// One token, one key head and the query heads that share it: exact over any set of tokens.
template <class T>
static void attend_token(
    const Model& model, const Layer& layer, const Call& call, const Row& row, int n, int kv_head,
    const float* q, const T* keys, const T* values, float* scores, float* out) {
    const int dim = model.head_dim, group = model.num_heads / model.num_kv_heads;
    const int64_t stride = int64_t(model.num_kv_heads) * dim;
    const Sight sight(row, n, layer.window);
    const int capacity = call.max_length;
    keys += kv_head * dim;
    values += kv_head * dim;
    int length = 0;
    const auto score = [&](int64_t slot) {
        for (int g = 0; g < group; g++) {
            float x = dot(q + g * dim, keys + slot * stride, dim) * layer.scale;
            if (model.score_cap > 0) x = model.score_cap * tanhf(x / model.score_cap);
            scores[g * capacity + length] = x;
        }
        length++;
    };
    for (int p = sight.low; p < row.prefix; p++) score(prefix_slot(row, p, call.page_size));
    for (int r = 0; r < row.num_recent; r++)
        if (sight.sees(r)) score(row.slots[r]);
    float totals[MAX_GROUP];
    for (int g = 0; g < group; g++) totals[g] = exponentials(scores + g * capacity, length);
    memset(out, 0, group * dim * 4);
    length = 0;
    const auto mix = [&](int64_t slot) {
        for (int g = 0; g < group; g++)
            add_scaled(out + g * dim, values + slot * stride, scores[g * capacity + length], dim);
        length++;
    };
    for (int p = sight.low; p < row.prefix; p++) mix(prefix_slot(row, p, call.page_size));
    for (int r = 0; r < row.num_recent; r++)
        if (sight.sees(r)) mix(row.slots[r]);
    for (int g = 0; g < group; g++)
        for (int d = 0; d < dim; d++) out[g * dim + d] /= totals[g];
}

// Up to MAX_ROWS queries of one head, of consecutive tokens of a causal row: keys and values of a
// page at a time, as products of matrices.
template <class T, int ROWS>
static void attend_block(
    const Model& model, const Layer& layer, const Call& call, const Row& row, int n, int kv_head,
    const float* q, int64_t ldq, const T* keys, const T* values, float* scratch, float* out) {
    const int dim = model.head_dim, capacity = call.max_length;
    const int64_t stride = int64_t(model.num_kv_heads) * dim;
    const Sight first(row, n, layer.window);
    const int length = row.prefix + n + ROWS; // positions; recent ones follow the prefix
    const int low = first.low; // of all of them: no other slot is read
    float* scores = scratch;                            // [ROWS, capacity]
    float* packed = scratch + int64_t(ROWS) * capacity; // [dim, PANEL]
    alignas(64) float tile[ROWS * PANEL];
    keys += kv_head * dim;
    values += kv_head * dim;
    const auto slot = [&](int p) {
        return p < row.prefix ? prefix_slot(row, p, call.page_size) : row.slots[p - row.prefix];
    };
    for (int p = low; p < length; p += PANEL) {
        const int count = length - p < PANEL ? length - p : PANEL;
        for (int i = 0; i < PANEL; i++) {
            if (i < count) {
                const T* key = keys + slot(p + i) * stride;
                for (int d = 0; d < dim; d++) packed[d * PANEL + i] = scalar(key + d);
            } else {
                for (int d = 0; d < dim; d++) packed[d * PANEL + i] = 0;
            }
        }
        memset(tile, 0, sizeof tile);
        multiply<float, ROWS, 1>(packed, 0, PANEL, q, ldq, dim, tile);
        for (int m = 0; m < ROWS; m++)
            for (int i = 0; i < count; i++) {
                float x = tile[m * PANEL + i] * layer.scale;
                if (model.score_cap > 0) x = model.score_cap * tanhf(x / model.score_cap);
                scores[m * capacity + p + i] = x;
            }
    }
    float totals[ROWS];
    int begins[ROWS];
    for (int m = 0; m < ROWS; m++) {
        const Sight sight(row, n + m, layer.window);
        const int stop = row.prefix + n + m + 1;
        begins[m] = sight.low; // in a causal chain positions are indices
        totals[m] = exponentials(scores + m * capacity + begins[m], stop - begins[m]);
        for (int p = low; p < begins[m]; p++) scores[m * capacity + p] = 0;
        for (int p = stop; p < length; p++) scores[m * capacity + p] = 0;
    }
    for (int d = 0; d < dim; d += PANEL) {
        memset(tile, 0, sizeof tile);
        if (d + PANEL <= dim) {
            for (int p = low; p < length;) { // runs of tokens whose slots follow each other
                const int64_t begin = slot(p);
                int end = p + 1;
                while (end < length && slot(end) == begin + end - p) end++;
                multiply<T, ROWS, 1>(
                    values + begin * stride + d, 0, stride, scores + p, capacity, end - p, tile);
                p = end;
            }
        } else {
            for (int p = low; p < length; p++)
                for (int m = 0; m < ROWS; m++)
                    for (int i = 0; i < dim - d; i++)
                        tile[m * PANEL + i] +=
                            scores[m * capacity + p] * scalar(values + slot(p) * stride + d + i);
        }
        for (int m = 0; m < ROWS; m++)
            for (int i = 0; i < PANEL && d + i < dim; i++)
                out[m * ldq + d + i] = tile[m * PANEL + i] / totals[m];
    }
}

template <class T>
static void attend_queries(
    const Model& model, const Layer& layer, const Call& call, const Row& row, int n, int count,
    int kv_head, const float* q, int64_t ldq, const T* keys, const T* values, float* scratch,
    float* out) {
    const auto run = [&](auto rows) {
        attend_block<T, decltype(rows)::value>(
            model, layer, call, row, n, kv_head, q, ldq, keys, values, scratch, out);
    };
    switch (count) {
        case 1: return run(std::integral_constant<int, 1>{});
        case 2: return run(std::integral_constant<int, 2>{});
        case 3: return run(std::integral_constant<int, 3>{});
        case 4: return run(std::integral_constant<int, 4>{});
        case 5: return run(std::integral_constant<int, 5>{});
        default: return run(std::integral_constant<int, 6>{});
    }
}

// All new tokens of the batch; (token, head) pairs are dealt to the threads in turns, so that long and
// short rows go to all of them.
template <class T>
static void attend(
    const Model& model, const Layer& layer, const Call& call, const Scratch& b, const T* keys,
    const T* values, Thread thread) {
    const int dim = model.head_dim, group = model.num_heads / model.num_kv_heads;
    float* scores = b.scores + thread.index * b.scores_width;
    int item = 0;
    for (int r = 0; r < call.num_rows; r++) {
        const Row& row = call.rows[r];
        const bool blocks = !row.visible && row.num_tokens > BLOCK_QUERIES;
        const int step = blocks ? MAX_ROWS : 1;
        for (int n = 0; n < row.num_tokens; n += step) {
            const int64_t token = row.start + n;
            const int count = row.num_tokens - n < step ? row.num_tokens - n : step;
            for (int kv_head = 0; kv_head < model.num_kv_heads; kv_head++) {
                const float* q = b.qkv + token * b.qkv_width + int64_t(kv_head) * group * dim;
                float* out = b.mixed + token * b.mixed_width + int64_t(kv_head) * group * dim;
                if (!blocks) {
                    if (item++ % thread.count == thread.index)
                        attend_token(
                            model, layer, call, row, n, kv_head, q, keys, values, scores, out);
                    continue;
                }
                for (int g = 0; g < group; g++) {
                    if (item++ % thread.count != thread.index) continue;
                    // Outputs lie mixed_width apart, queries qkv_width: out is written apart.
                    alignas(64) float block[MAX_ROWS * MAX_HEAD_DIM];
                    alignas(64) float queries[MAX_ROWS * MAX_HEAD_DIM];
                    for (int m = 0; m < count; m++)
                        memcpy(queries + m * dim, q + m * b.qkv_width + g * dim, dim * 4);
                    attend_queries(
                        model, layer, call, row, n, count, kv_head, queries, int64_t(dim), keys,
                        values, scores, block);
                    for (int m = 0; m < count; m++)
                        memcpy(out + m * b.mixed_width + g * dim, block + m * dim, dim * 4);
                }
            }
        }
    }
}
