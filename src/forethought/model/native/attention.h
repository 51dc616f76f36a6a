// Keys and values of new tokens, and attention of queries to them and to those in the pages.

#pragma once

#include "chunks.h"
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
constexpr int SPLIT_CHUNKS = 4;   // of a row from which its chunks are dealt to the threads

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

// The attention of the new tokens of a batch.
template <class T> class Attention {
  public:
    Attention(
        const Model& model, const Layer& layer, const Call& call, const Scratch& b, const T* keys,
        const T* values, Thread thread)
        : model(model), layer(layer), call(call), b(b), keys(keys), values(values), thread(thread),
          scratch(b.scores + thread.index * b.scores_width) {}

    // (Runs of new tokens, key head) pairs are dealt to the threads in turns, so that long and
    // short rows go to all of them; chunks of long rows instead where all can be kept.
    void attend() const {
        attend_blocks();
        if (!keeps_chunks()) return attend_whole();
        attend_chunks();
#pragma omp barrier
        merge_chunks();
    }

  private:
    const Model& model;
    const Layer& layer;
    const Call& call;
    const Scratch& b;
    const T *keys, *values;
    const Thread thread;
    float* scratch;

    static bool takes_blocks(const Row& row) {
        return !row.visible && !row.num_segments && row.num_tokens > BLOCK_QUERIES;
    }

    void attend_blocks() const {
        const bool tiles = std::is_same_v<T, uint16_t> && TileBlock::is_possible();
        const int group = model.num_heads / model.num_kv_heads;
        const int tokens = tiles ? tile_tokens(group) : block_tokens(group);
        int item = 0;
        const auto visit = [&](const Row& row, int n, int count) {
            for (int kv_head = 0; kv_head < model.num_kv_heads; kv_head++) {
                if (item++ % thread.count != thread.index) continue;
                if (tiles)
                    TileBlock(
                        model, layer, call, b, row, n, count, kv_head, (const uint16_t*)keys,
                        (const uint16_t*)values, scratch)
                        .attend();
                else
                    Block<T>(
                        model, layer, call, b, row, n, count, kv_head, keys, values, scratch)
                        .attend();
            }
        };
        for (int r = 0; r < call.num_rows; r++)
            if (takes_blocks(call.rows[r])) each_run(call.rows[r], tokens, visit);
    }

    void attend_whole() const {
        int item = 0;
        each_together([&](const Row& row, int n, int count) {
            for (int kv_head = 0; kv_head < model.num_kv_heads; kv_head++)
                if (item++ % thread.count == thread.index) together(row, n, count, kv_head).attend();
        });
    }

    // Whether a row has many chunks, and there is room to keep those of all rows. It decides who
    // computes a chunk, and no bit of what is found.
    bool keeps_chunks() const {
        int most = 0;
        each_together([&](const Row& row, int n, int count) {
            const int chunks = together(row, n, count, 0).num_chunks();
            most = chunks > most ? chunks : most;
        });
        return most >= SPLIT_CHUNKS && b.keeps_parts;
    }

    // Each thread reads what follows each other in the cache: all heads of some chunks.
    void attend_chunks() const {
        int total = 0, unit = 0;
        each_together([&](const Row& row, int n, int count) {
            total += together(row, n, count, 0).num_chunks() * model.num_kv_heads;
        });
        const Share share = thread.share(total);
        each_together([&](const Row& row, int n, int count) {
            const int chunks = together(row, n, count, 0).num_chunks();
            for (int item = 0; item < chunks * model.num_kv_heads; item++, unit++)
                if (unit >= share.begin && unit < share.end)
                    together(row, n, count, item % model.num_kv_heads)
                        .attend_kept(item / model.num_kv_heads);
        });
    }

    void merge_chunks() const {
        int item = 0;
        each_together([&](const Row& row, int n, int count) {
            for (int kv_head = 0; kv_head < model.num_kv_heads; kv_head++)
                if (item++ % thread.count == thread.index)
                    together(row, n, count, kv_head).merge_kept();
        });
    }

    // Call `visit` with runs of tokens of the rows that blocks do not take.
    template <class F> void each_together(F&& visit) const {
        for (int r = 0; r < call.num_rows; r++)
            if (!takes_blocks(call.rows[r]))
                each_run(
                    call.rows[r], Together<T>::tokens(model, layer, call.rows[r], thread), visit);
    }

    template <class F> static void each_run(const Row& row, int most, F&& visit) {
        for (int n = 0; n < row.num_tokens; n += most)
            visit(row, n, row.num_tokens - n < most ? int(row.num_tokens) - n : most);
    }

    Together<T> together(const Row& row, int n, int count, int kv_head) const {
        return Together<T>(
            model, layer, call, b, row, n, count, kv_head, keys, values, scratch);
    }
};
