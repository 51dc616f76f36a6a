// The memory that a forward computes in.

#pragma once

#include "kernels/products.h"
#include "kernels/tiles.h"
#include "structures.h"

#include <cstdint>
#include <memory>

static inline int64_t round_up(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Floats of one call, aligned to 64 bytes; with any values.
struct Memory {
    int64_t size;
    std::unique_ptr<float[]> floats;
    float* begin;

    explicit Memory(int64_t size)
        : size(size), floats(new float[size + PANEL]),
          begin(floats.get() + (64 - uintptr_t(floats.get()) % 64) / 4) {}
};

constexpr int BLOCK_ROWS = 96; // queries of a Block, or one pass of each head that shares a key
constexpr int BLOCK_POSITIONS = 256; // whose scores it has at a time

// Tokens whose queries are attended together, those of `group` heads, which share keys: whole passes.
static inline int block_tokens(int group) {
    const int passes = BLOCK_ROWS / (group * MAX_ROWS);
    return MAX_ROWS * (passes > 1 ? passes : 1);
}

constexpr int TOGETHER_ROWS = 48; // queries of a Together, which share what they read
constexpr int CHUNK = 256;        // tokens of the context that a few queries attend to at a time
constexpr int SCORES_WIDTH = CHUNK + 2 * PANEL; // of a query, those of a chunk and what pads them
constexpr int MIN_SHARED = 32;                  // tokens of a chunk that rows attend to together
constexpr int64_t MAX_PARTS = int64_t(1) << 22; // floats of chunks that are kept

// Floats of a part: what a query attends to in a chunk.
static inline int64_t part_size(int64_t dim) { return round_up(dim + 2); }

// Floats that a Block computes in.
static inline int64_t block_size(int64_t dim, int group) {
    const int64_t rows = int64_t(group) * block_tokens(group), width = round_up(dim);
    const int64_t unpacked = BLOCK_POSITIONS * width; // keys or values
    const int64_t parts = (rows + 1) * part_size(dim);
    return rows * (BLOCK_POSITIONS + width + 2) + PANEL * width + unpacked + parts;
}

// Floats that Together computes in.
static inline int64_t together_size(int64_t dim, int64_t group) {
    return larger(TOGETHER_ROWS, group) * (SCORES_WIDTH + 2 * part_size(dim)) + 2 * SCORES_WIDTH;
}

constexpr int TILE_POSITIONS = 256; // whose keys and values a TileBlock packs together
constexpr int TILE_QUERIES = 512;   // that it attends for, of at most so many tokens:
constexpr int MAX_TILE_TOKENS = 128;

// Tokens of a TileBlock, whole tiles.
static inline int tile_tokens(int group) {
    const int tokens = TILE_QUERIES / group / TILE_ROWS * TILE_ROWS;
    return tokens < TILE_ROWS ? TILE_ROWS : tokens < MAX_TILE_TOKENS ? tokens : MAX_TILE_TOKENS;
}

// Floats that a TileBlock packs and computes in.
static inline int64_t tile_block_size(int64_t dim, int group) {
    if (!HAS_DOT_PRODUCTS) return 0;
    const int64_t width = padded_inputs(dim), queries = int64_t(group) * tile_tokens(group);
    const int64_t packed = (queries + 2 * TILE_POSITIONS) * width / 2; // with keys and values
    return packed + queries * (width + 1 + PANEL) + 2 * TILE_ROWS * 2 * TILE_POSITIONS;
}

constexpr int64_t MAX_ROUTED = int64_t(1) << 24; // floats of what experts compute at a time
constexpr int64_t MAX_GATHERED = 1 << 18;        // of inputs that a thread gathers at a time

// The buffers of a layer's experts. A row is a token in one of its experts.
struct ExpertScratch {
    int64_t per_token, num_tokens; // rows of a token; tokens that are routed together
    int64_t max_rows;              // of an expert that a thread multiplies at a time
    int64_t outputs_width, inputs_size, tiles_size, groups_size;
    float* logits;    // [num_tokens, outputs of the router]
    int32_t* chosen;  // [num_tokens, per_token]
    float* weights;   // [num_tokens, per_token]
    float* activated; // of all rows: see Activated
    float* outputs;   // [rows, outputs_width], whole panels
    float* inputs;    // [threads, inputs_size]: of rows that are gathered
    float* tiles;     // [threads, tiles_size]: the same, rounded
    int32_t* groups;  // [threads, groups_size]: see Groups
    int64_t size = 0; // floats of all of them

    // `memory`: null where only the size is wanted.
    ExpertScratch(
        const Experts& experts, int64_t hidden, int64_t tokens, int threads, float* memory)
        : per_token(experts.top_k + experts.num_shared), outputs_width(round_up(hidden)) {
        const int64_t inner = experts.down[0].num_inputs; // the last ones are shared, if any are
        const int64_t shared =
            experts.down[experts.num_experts + experts.num_shared - 1].num_inputs;
        const int64_t width =
            activated_width(inner) * experts.top_k + activated_width(shared) * experts.num_shared;
        const int64_t most = MAX_ROUTED / (width + per_token * outputs_width);
        num_tokens = tokens < most ? tokens : larger(most, 1);
        max_rows = larger(MAX_GATHERED / hidden / TILE_ROWS, 2) * TILE_ROWS;
        max_rows = max_rows < num_tokens ? max_rows : num_tokens;
        const int64_t rows = num_tokens * per_token;
        inputs_size = round_up(max_rows * hidden);
        tiles_size = round_up(::tiles_size(max_rows, larger(hidden, larger(inner, shared)), 1));
        groups_size = round_up(experts.num_experts + experts.num_shared + 2 + 2 * rows);
        const auto take = [&](int64_t count) {
            float* begin = memory ? memory + size : nullptr;
            size += round_up(count);
            return begin;
        };
        logits = take(experts.router ? num_tokens * experts.router->num_outputs : 0);
        chosen = (int32_t*)take(rows);
        weights = take(rows);
        activated = take(num_tokens * width);
        outputs = take(rows * outputs_width);
        inputs = take(threads * inputs_size);
        tiles = take(threads * tiles_size);
        groups = (int32_t*)take(threads * groups_size);
    }

    // Floats of a row of activations, whatever the rows and whether they are in tiles.
    static int64_t activated_width(int64_t inner) { return padded_inputs(inner); }
};

// The buffers of one forward of T tokens. Row t of a buffer of width w begins at t * w, without
// padding. Every buffer, and every thread's part of the scores, begins at a multiple of PANEL floats.
struct Scratch {
    float *x, *normed; // [T, hidden]
    float* qkv;        // [T, qkv_width]: queries, keys and values of all heads
    float* mixed;      // [T, mixed_width]: what attention returns
    float* wide;       // [T, wide_width]: activations of the MLP; see Activated
    float* routed;     // of the experts: see ExpertScratch
    float* joined;     // [T, 2 * hidden]: embeddings and states, in a draft module
    float* scores;     // [threads, scores_width]: of queries that attend together, and their sums
    float* parts;      // [T, max_chunks, heads, part_width]: of chunks, where they are kept
    int64_t* common;   // [rows]: tokens of a row's prefix in the slots of the row before it
    uint16_t* tiles;   // the inputs of a product, rounded: see TileInput
    int64_t qkv_width, mixed_width, wide_width, scores_width, part_width;
    int64_t max_chunks; // of a row
    bool keeps_parts;   // there is room
    int64_t size = 0;   // floats of all of them

    // `memory`: null where only the size is wanted.
    Scratch(const Model& model, int64_t tokens, int64_t max_length, int threads, float* memory) {
        const int64_t hidden = model.hidden, dim = model.head_dim;
        const int group = model.num_heads / model.num_kv_heads;
        qkv_width = (model.num_heads + 2 * model.num_kv_heads) * dim;
        mixed_width = larger(model.num_heads * dim, hidden);
        wide_width = hidden;
        int64_t routed_size = 0;
        const int64_t joined_width = model.join ? 2 * hidden : 0;
        for (int i = 0; i < model.num_layers; i++) {
            const Layer& layer = model.layers[i];
            const int64_t inner = layer.down.num_inputs; // 0 where there are experts
            wide_width = larger(wide_width, larger(inner, padded_inputs(inner) / 2));
            if (layer.experts) {
                const ExpertScratch part(*layer.experts, hidden, tokens, threads, nullptr);
                routed_size = larger(routed_size, part.size);
            }
        }
        part_width = part_size(dim), max_chunks = (max_length + CHUNK - 1) / CHUNK;
        const int64_t kept = tokens * max_chunks * model.num_heads * part_width;
        keeps_parts = kept <= MAX_PARTS;
        scores_width = larger(block_size(dim, group), tile_block_size(dim, group));
        scores_width = round_up(larger(scores_width, together_size(dim, group)));
        const auto take = [&](int64_t count) {
            float* begin = memory ? memory + size : nullptr;
            size += round_up(count);
            return begin;
        };
        x = take(tokens * hidden);
        normed = take(tokens * hidden);
        qkv = take(tokens * qkv_width);
        mixed = take(tokens * mixed_width);
        wide = take(larger(tokens * wide_width, tiles_size(tokens, wide_width, 1)));
        routed = take(routed_size);
        joined = take(tokens * joined_width);
        scores = take(threads * scores_width);
        parts = take(keeps_parts ? kept : MAX_PARTS);
        common = (int64_t*)take(2 * tokens);
        const int64_t widest = larger(larger(mixed_width, wide_width), joined_width);
        tiles = (uint16_t*)take(tiles_size(tokens, widest, threads));
    }
};
