// The memory that a forward computes in.

#pragma once

#include "amx.h"
#include "products.h"
#include "structures.h"

static inline int64_t round_up(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Inputs of the last product of a layer's MLP or experts.
static inline int intermediate_size(const Layer& layer) {
    return layer.experts ? layer.experts->down[0].num_inputs : layer.down.num_inputs;
}

constexpr int BLOCK_ROWS = 48; // queries that attend together, for which keys are packed once

// Tokens whose queries are attended together, those of `group` heads, which share keys: a multiple
// of `pass`.
static inline int block_tokens(int group, int pass) {
    const int passes = BLOCK_ROWS / (group * pass);
    return pass * (passes > 1 ? passes : 1);
}

// Floats that a TileBlock packs beside the scores: queries, two panels of keys, the values, and the
// weights of a tile.
static inline int64_t tile_block_size(int64_t dim, int64_t rows, int64_t max_length) {
    if (!HAS_AMX) return 0;
    const int64_t width = padded_inputs(dim), length = padded_inputs(max_length);
    return (rows + PANEL) * width + length * width / 2 + TILE_TOKENS * length;
}

// The buffers of one forward of T tokens. Row t of a buffer of width w begins at t * w, without
// padding. Every buffer, and every thread's part of the scores, begins at a multiple of PANEL floats.
struct Scratch {
    float *x, *normed; // [T, hidden]
    float* qkv;        // [T, qkv_width]: queries, keys and values of all heads
    float* mixed;      // [T, mixed_width]: what attention returns
    float* wide;       // [T, wide_width]: activations of the MLP, or of the experts
    float* joined;     // [T, 2 * hidden]: embeddings and states, in a draft module
    float* scores;     // [threads, scores_width]
    float* split;      // the inputs of a product, split for AMX: see SplitInput
    int64_t qkv_width, mixed_width, wide_width, scores_width;
    int64_t size = 0; // floats of all of them

    // `memory`: null where only the size is wanted.
    Scratch(const Model& model, int64_t tokens, int64_t max_length, int threads, float* memory) {
        const int64_t hidden = model.hidden, dim = model.head_dim;
        const int group = model.num_heads / model.num_kv_heads;
        qkv_width = (model.num_heads + 2 * model.num_kv_heads) * dim;
        mixed_width = larger(model.num_heads * dim, hidden);
        wide_width = hidden;
        const int64_t joined_width = model.join ? 2 * hidden : 0;
        for (int i = 0; i < model.num_layers; i++) {
            const Layer& layer = model.layers[i];
            const int64_t logits = layer.experts ? round_up(layer.experts->num_experts) : 0;
            wide_width = larger(wide_width, logits + intermediate_size(layer));
        }
        // Scores of the queries that are attended together, and what is packed beside them.
        const int64_t rows = larger(BLOCK_ROWS, group * larger(MAX_ROWS, TILE_TOKENS));
        const int64_t packed = larger(PANEL * dim, 2 * max_length);
        scores_width =
            round_up(rows * max_length) + larger(packed, tile_block_size(dim, rows, max_length));
        scores_width = round_up(scores_width);
        const auto take = [&](int64_t count) {
            float* begin = memory ? memory + size : nullptr;
            size += round_up(count);
            return begin;
        };
        x = take(tokens * hidden);
        normed = take(tokens * hidden);
        qkv = take(tokens * qkv_width);
        mixed = take(tokens * mixed_width);
        wide = take(tokens * wide_width);
        joined = take(tokens * joined_width);
        scores = take(threads * scores_width);
        const int64_t widest = larger(larger(mixed_width, wide_width), joined_width);
        split = take(split_size(tokens, widest, threads));
    }
};
