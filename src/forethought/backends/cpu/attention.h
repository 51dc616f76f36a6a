// Keys and values of new tokens, and attention of queries to them and to those in the pages.

#pragma once

#include "block.h"
#include "chunks.h"
#include "norms.h"
#include "scratch.h"
#include "structures.h"
#include "tile_block.h"
#include "vectors.h"

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
        thread.wait();
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
                    Block<T>(model, layer, call, b, row, n, count, kv_head, keys, values, scratch)
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
                if (item++ % thread.count == thread.index)
                    together(row, n, count, kv_head).attend();
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
        return Together<T>(model, layer, call, b, row, n, count, kv_head, keys, values, scratch);
    }
};
