// Keys and values of new tokens, and attention of queries to them and to those in the pages.

#pragma once

#include "../scratch.h"
#include "../structures.h"
#include "block.h"
#include "chunks.h"
#include "entries.h"
#include "norms.h"
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
    const int per_token = heads + 2 * kv_heads, size = entry_size<T>(dim);
    float turned[MAX_HEAD_DIM];
    for (int item = items.begin; item < items.end; item++) {
        const int t = item / per_token, head = item % per_token;
        float* x = b.qkv + t * b.qkv_width + int64_t(head) * dim;
        const int64_t slot = call.slots[t];
        if (head >= heads + kv_heads) {
            store_entry(values + (slot * kv_heads + head - heads - kv_heads) * size, x, dim);
            continue;
        }
        const float* weight = head < heads ? layer.q_norm : layer.k_norm;
        if (weight) norm(x, weight, dim, model.head_norm_eps, x);
        const float* cosines = layer.rotary + call.positions[t] * 2 * rotated;
        const float* sines = cosines + rotated;
        for (int d = 0; d < half; d++) turned[d] = x[d] * cosines[d] + x[d + half] * sines[d];
        for (int d = half; d < rotated; d++) turned[d] = x[d] * cosines[d] + x[d - half] * sines[d];
        memcpy(x, turned, rotated * 4);
        if (head >= heads) store_entry(keys + (slot * kv_heads + head - heads) * size, x, dim);
    }
}

// b.common; without a barrier.
static void find_common(const Call& call, const Scratch& b) {
    for (int r = 0; r < call.num_rows; r++)
        b.common[r] = r ? num_common(call.rows[r], call.rows[r - 1], call.page_size) : 0;
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

    int group() const { return model.num_heads / model.num_kv_heads; }

    static bool takes_blocks(const Row& row) {
        return !row.visible && !row.num_segments && row.num_tokens > BLOCK_QUERIES;
    }

    void attend_blocks() const {
        const bool tiles = std::is_same_v<T, uint16_t> && TileBlock::is_possible();
        const int tokens = tiles ? tile_tokens(group()) : block_tokens(group());
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

    // Whether a row has many chunks, or rows share some, and there is room to keep those of all rows.
    // It decides who computes a chunk, and no bit of what is found.
    bool keeps_chunks() const {
        bool pays = false;
        each_unit(
            [&](const Unit& unit) { pays |= unit.num_rows > 1 || unit.chunk + 1 >= SPLIT_CHUNKS; });
        return pays && b.keeps_parts;
    }

    // A chunk of what tokens [begin, begin + count) of a row see, or all tokens of rows that read
    // its first `shared` tokens in the same slots.
    struct Unit {
        const Row& row;
        int num_rows, begin, count, chunk, shared;
    };

    // Each thread reads what follows each other in the cache: all heads of some chunks.
    void attend_chunks() const {
        int64_t total = 0, cost = 0;
        each_unit([&](const Unit& unit) { total += cost_of(unit) * model.num_kv_heads; });
        each_unit([&](const Unit& unit) {
            for (int kv_head = 0; kv_head < model.num_kv_heads; kv_head++, cost += cost_of(unit))
                if (cost * thread.count / total == thread.index)
                    together(unit.row, unit.begin, unit.count, kv_head)
                        .attend_kept(unit.chunk, unit.shared);
        });
    }

    // How often its keys are read.
    int64_t cost_of(const Unit& unit) const {
        return (unit.count * group() + MAX_QUERIES - 1) / MAX_QUERIES;
    }

    // Call `visit` with the units of all rows that blocks do not take, chunk by chunk.
    template <class F> void each_unit(F&& visit) const {
        bool goes_on = true;
        for (int chunk = 0; goes_on; chunk++) {
            goes_on = false;
            for (int r = 0, num_rows; r < call.num_rows; r += num_rows) {
                const Unit together = together_with(r, chunk);
                num_rows = together.num_rows;
                if (num_rows > 1) {
                    goes_on = true;
                    visit(together);
                } else if (!takes_blocks(call.rows[r])) {
                    each_run_of(call.rows[r], [&](const Row& row, int n, int count) {
                        const auto run = this->together(row, n, count, 0);
                        if (chunk >= run.num_chunks()) return;
                        goes_on = true;
                        visit(Unit{row, 1, n, count, chunk, run.prefix_in(row, chunk)});
                    });
                }
            }
        }
    }

    // The rows from `r` on that share tokens of a chunk.
    Unit together_with(int r, int chunk) const {
        const Row& row = call.rows[r];
        Unit unit{row, 1, 0, int(row.num_tokens), chunk, CHUNK};
        for (; r + unit.num_rows < call.num_rows; unit.num_rows++) {
            const int next = r + unit.num_rows, shared = num_shared(next, chunk);
            const int count = unit.count + int(call.rows[next].num_tokens);
            if (shared < MIN_SHARED || count * group() > TOGETHER_ROWS) break;
            unit.count = count;
            unit.shared = shared < unit.shared ? shared : unit.shared;
        }
        return unit;
    }

    // Tokens at the beginning of a chunk that a row reads in the same slots as the row before it.
    int num_shared(int r, int chunk) const {
        const Row &row = call.rows[r], &before = call.rows[r - 1];
        const bool alike = row.seen_from == before.seen_from && !layer.window;
        if (!alike || row.num_segments || before.num_segments) return 0;
        if (takes_blocks(row) || takes_blocks(before)) return 0;
        const int64_t count = b.common[r] - row.seen_from - int64_t(chunk) * CHUNK;
        return count < 0 ? 0 : count < CHUNK ? int(count) : CHUNK;
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
            if (!takes_blocks(call.rows[r])) each_run_of(call.rows[r], visit);
    }

    template <class F> void each_run_of(const Row& row, F&& visit) const {
        each_run(row, Together<T>::tokens(model, layer, row, thread), visit);
    }

    template <class F> static void each_run(const Row& row, int most, F&& visit) {
        for (int n = 0; n < row.num_tokens; n += most)
            visit(row, n, row.num_tokens - n < most ? int(row.num_tokens) - n : most);
    }

    Together<T> together(const Row& row, int n, int count, int kv_head) const {
        return Together<T>(model, layer, call, b, row, n, count, kv_head, keys, values, scratch);
    }
};
