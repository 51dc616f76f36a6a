// Products of tokens with packed weights.

#pragma once

#include "../structures.h"
#include "blocks.h"
#include "integers.h"
#include "panels.h"
#include "tiles.h"
#include "vectors.h"

#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

constexpr int VECS = PANEL / LANES;              // vectors of a panel
constexpr int REGISTERS = LANES == 16 ? 32 : 16; // for vectors
constexpr int MAX_ROWS = 6;                      // tokens that one pass over a panel multiplies
constexpr int AHEAD = 1024;                      // bytes of a panel that are fetched in advance
constexpr int BLOCK_FLOATS = 1 << 19;            // of inputs that all panels pass by: 2 MiB of L3
constexpr int ROWS_AHEAD = 16;                   // of outputs that are fetched in advance
constexpr int INPUTS_AHEAD = 16;                 // between two fetches of the next panels
constexpr int LINE = 64;                         // bytes of one of the cache
// Sums of a pass: in tiles those of PASS_TOKENS with two panels, or of a tile with four.
constexpr int PASS_SUMS = HAS_DOT_PRODUCTS ? PASS_TOKENS * 2 * PANEL : MAX_ROWS * 4 * PANEL;

// Whether registers hold the sums of a pass, and its weights and an input if they are used again.
static constexpr bool fits(int rows, int panels) {
    const int weights = panels * VECS;
    return rows * weights + (rows > 1 ? weights + 1 : 0) <= REGISTERS;
}

// Tokens of a pass, where all take several: of nearly the same size, as one over few tokens is as
// long as one over several.
static inline int rows_at_once(int tokens) {
    const int passes = (tokens + MAX_ROWS - 1) / MAX_ROWS;
    return passes ? (tokens + passes - 1) / passes : 1;
}

// Weights that stay in a register where several rows use them: GCC would load them for each.
template <int ROWS> static inline Vec used_by(Vec weights) {
#if defined(__AVX__)
    if (ROWS > 1) return in_order(weights);
#endif
    return weights;
}

// A part of the next panels, which a pass over the ones before fetches: where several passes go over
// panels, memory would rest in all but the first.
struct Ahead {
    const char* from = nullptr;
    int lines = 0; // for each INPUTS_AHEAD inputs of the pass

    void fetch(int input) {
        if (input % INPUTS_AHEAD) return;
        for (int i = 0; i < lines; i++, from += LINE) __builtin_prefetch(from, 0, 2);
    }
};

// Some tokens and the panels that they are multiplied with at once.
struct Pass {
    const float* x; // [rows, in]
    int64_t ldx;    // elements from one row to the next
    float* tile;    // [rows, panels * PANEL]: what is added to
    Ahead ahead = {};
};

// tile [ROWS, NP * PANEL] += x [ROWS, num_inputs] times NP panels of w. Panels are `panel_stride`
// elements apart, inputs `stride`.
template <class T, int ROWS, int NP>
static __attribute__((noinline)) void multiply(
    const T* w, int64_t panel_stride, int64_t stride, int num_inputs, const Pass& pass) {
    constexpr int N = NP * VECS;
    const float* x = pass.x;
    const int64_t ldx = pass.ldx;
    float* tile = pass.tile;
    Ahead ahead = pass.ahead;
    Vec acc[ROWS][N];
    for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < N; j++) acc[m][j] = load(tile + (m * N + j) * LANES);
    for (int k = 0; k < num_inputs; k++) {
        if (ROWS > 1) ahead.fetch(k);
        if (ROWS > 1 && NP == 1) __builtin_prefetch((const char*)(w + k * stride) + AHEAD);
        Vec weight[N];
        for (int p = 0; p < NP; p++)
            for (int v = 0; v < VECS; v++)
                weight[p * VECS + v] =
                    used_by<ROWS>(load(w + p * panel_stride + k * stride + v * LANES));
        for (int m = 0; m < ROWS; m++) {
            const Vec value = broadcast(x[m * ldx + k]);
            for (int j = 0; j < N; j++) acc[m][j] += value * weight[j];
        }
    }
    for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < N; j++) store(tile + (m * N + j) * LANES, acc[m][j]);
}

// The same address, which the compiler does not know to be the same: what was loaded from it is
// loaded again instead of kept in registers, of which sums need nearly all.
template <class T> static inline const T* read_again(const T* p) {
    asm("" : "+r"(p));
    return p;
}

// The same for panels of bf16: pairs [in / 2, PANEL, 2] of inputs.
template <int ROWS, int NP>
static __attribute__((noinline)) void multiply_pairs(
    const uint16_t* w, int64_t panel_stride, int num_inputs, const Pass& pass) {
    constexpr int N = NP * VECS;
    const float* x = pass.x;
    const int64_t ldx = pass.ldx;
    float* tile = pass.tile;
    Ahead ahead = pass.ahead;
    Vec acc[ROWS][N];
    for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < N; j++) acc[m][j] = load(tile + (m * N + j) * LANES);
    const auto add = [&](int k, const uint16_t* pairs, auto part) { // the even or the odd inputs
        Vec weight[N];
        for (int p = 0; p < NP; p++)
            for (int v = 0; v < VECS; v++)
                weight[p * VECS + v] = part(pairs + p * panel_stride + v * 2 * LANES);
        for (int m = 0; m < ROWS; m++) {
            const Vec value = broadcast(x[m * ldx + k]);
            for (int j = 0; j < N; j++) acc[m][j] += value * weight[j];
        }
    };
    const auto even = [](const uint16_t* pairs) { return load_even(pairs); };
    const auto odd = [](const uint16_t* pairs) { return load_odd(pairs); };
    for (int k = 0; k < num_inputs; k += 2, w += 2 * PANEL) {
        if (ROWS > 1) ahead.fetch(k);
        if (ROWS > 1 && NP == 1) __builtin_prefetch((const char*)w + AHEAD);
        add(k, w, even);
        if (k + 1 < num_inputs) add(k + 1, read_again(w), odd);
    }
    for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < N; j++) store(tile + (m * N + j) * LANES, acc[m][j]);
}

// The same for panels in 4 bits: bytes [in / 2, PANEL], the even input in the low half. They are
// `panel_stride` inputs apart, their scales and zeros [groups, PANEL] `next_groups`.
template <int ROWS, int NP>
static __attribute__((noinline)) void multiply4(
    const int8_t* w, int64_t panel_stride, const float* scale, const float* zero,
    int64_t next_groups, int group, int num_inputs, const Pass& pass) {
    constexpr int N = NP * VECS;
    const float* x = pass.x;
    const int64_t ldx = pass.ldx;
    float* tile = pass.tile;
    Vec acc[ROWS][N];
    for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < N; j++) acc[m][j] = load(tile + (m * N + j) * LANES);
    for (int begin = 0; begin < num_inputs; begin += group, scale += PANEL, zero += PANEL)
        for (int k = begin; k < begin + group; k += 2, w += PANEL)
            for (int j = 0; j < N; j++) {
                const int64_t p = j / VECS, v = j % VECS * LANES;
                const IntVec both = widen(w + p * panel_stride / 2 + v);
                const Vec s = load(scale + p * next_groups + v),
                          z = load(zero + p * next_groups + v);
                const Vec even = (__builtin_convertvector(both & 15, Vec) - z) * s;
                const Vec odd = (__builtin_convertvector(both >> 4 & 15, Vec) - z) * s;
                for (int m = 0; m < ROWS; m++) {
                    acc[m][j] += broadcast(x[m * ldx + k]) * even;
                    acc[m][j] += broadcast(x[m * ldx + k + 1]) * odd;
                }
            }
    for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < N; j++) store(tile + (m * N + j) * LANES, acc[m][j]);
}

template <int ROWS, int NP>
static inline void multiply4_panels(const Linear& w, int panel, const Pass& pass) {
    const int64_t size = panel_size(w), groups = int64_t(w.num_inputs) / w.group_size * PANEL;
    multiply4<ROWS, NP>(
        (const int8_t*)w.weight + panel * size / 2, size, w.scale + panel * groups,
        w.zero + panel * groups, groups, w.group_size, w.num_inputs, pass);
}

template <int ROWS, int NP>
static void multiply_panels(const Linear& w, int panel, const Pass& pass) {
    const int inputs = w.num_inputs;
    const int64_t size = panel_size(w), at = panel * size;
    if (w.type == F32)
        multiply<float, ROWS, NP>((const float*)w.weight + at, size, PANEL, inputs, pass);
    else if (w.type == BF16)
        multiply_pairs<ROWS, NP>((const uint16_t*)w.weight + at, size, inputs, pass);
    else if (w.type == I8)
        multiply<int8_t, ROWS, NP>((const int8_t*)w.weight + at, size, PANEL, inputs, pass);
    else
        multiply4_panels<ROWS, NP>(w, panel, pass);
}

template <int ROWS>
static void multiply_rows(const Linear& w, int panel, int count, const Pass& pass) {
    if (count == 4) {
        if constexpr (fits(ROWS, 4)) multiply_panels<ROWS, 4>(w, panel, pass);
    } else if (count == 2) {
        if constexpr (fits(ROWS, 2)) multiply_panels<ROWS, 2>(w, panel, pass);
    } else {
        multiply_panels<ROWS, 1>(w, panel, pass);
    }
}

// Add the products of some rows with panels [panel, panel + count).
static void multiply_tile(const Linear& w, int panel, int count, int rows, const Pass& pass) {
    switch (rows) {
        case 1: return multiply_rows<1>(w, panel, count, pass);
        case 2: return multiply_rows<2>(w, panel, count, pass);
        case 3: return multiply_rows<3>(w, panel, count, pass);
        case 4: return multiply_rows<4>(w, panel, count, pass);
        case 5: return multiply_rows<5>(w, panel, count, pass);
        default: return multiply_rows<6>(w, panel, count, pass);
    }
}

// How many panels go together: as many as have registers for their sums.
static inline int panels_at_once(int tokens, int left) {
    const int rows = rows_at_once(tokens);
    if (left >= 4 && fits(rows, 4)) return 4;
    return left >= 2 && fits(rows, 2) ? 2 : 1;
}

// Inputs x [T, in], ready to be multiplied: rounded where there are tiles, or integers.
struct ReadyInput {
    const Input x;
    const int tokens;
    std::optional<TileInput> tiles;
    std::optional<IntegerInput> integers;

    // For w and its next ones. All threads make theirs together, and hold them for one product.
    ReadyInput(const Linear& w, const Input& x, int tokens, Thread thread) : x(x), tokens(tokens) {
        if (TileInput::takes(w)) tiles.emplace(x, tokens, w.num_inputs, thread);
        if (IntegerInput::takes(w)) integers.emplace(w, x, tokens, thread);
    }
};

// Inputs and panels of w, ready to be multiplied: w is converted to float32 from blocks, and from 4
// bits where there are enough tokens that converting once pays. Those values are the ones that
// multiply_tile computes with, so the sums are the same. For a few tokens blocks are converted a
// group at a time, which stays in the L1 cache.
class Factors {
  public:
    Factors(const Linear& w, const ReadyInput& input)
        : source(w), plain(w), x(input.x), tokens(input.tokens),
          converted(is_blocks(w) ? !input.integers : w.type == I4 && tokens > MAX_ROWS),
          by_group(is_blocks(w) && tokens <= MAX_ROWS), tiles(input.tiles),
          integers(input.integers) {
        if (converted) plain.type = F32;
    }

    // Tokens of a pass. In tiles all panels pass by them before the next ones.
    int step() const { return tiles ? tiles->step() : rows_at_once(tokens); }

    // Tokens that are multiplied by all panels before the next ones, a multiple of step().
    int block() const {
        if (tiles) return tiles->step();
        const int most = BLOCK_FLOATS / source.num_inputs / step();
        return step() * (most > 1 ? most : 1);
    }

    // How many of the panels that are left go together, at most 4.
    int panels(int left) const {
        if (integers) return integers->panels(left);
        return tiles ? tiles->panels(tokens, left) : panels_at_once(tokens, left);
    }

    // Make panels [panel, panel + count), at most 4, ready to be multiplied.
    void hold(int panel, int count) {
        if (!converted || by_group) return;
        const int64_t size = int64_t(source.num_inputs) * PANEL;
        float* to = buffer();
        first = panel, plain.weight = to;
        for (int p = 0; p < count; p++)
            if (is_blocks(source))
                dequantize_panel(source, panel + p, 0, source.num_inputs / GROUP, to + p * size);
            else
                unpack4(panel + p, to + p * size);
    }

    // sums [rows, count * PANEL], of PASS_SUMS = tokens [t, t + rows), t a multiple of step(), times
    // panels [panel, panel + count), which are among those that are held.
    void multiply(int panel, int count, int t, int rows, float* sums) const {
        if (tiles) return tiles->multiply(source, panel, count, t, rows, sums);
        if (integers) return integers->multiply(source, panel, count, t, rows, sums);
        memset(sums, 0, rows * count * PANEL * 4);
        if (by_group) return multiply_by_group(panel, count, t, rows, sums);
        multiply_tile(
            plain, panel - first, count, rows,
            {x.floats + t * x.stride, x.stride, sums, ahead(panel + count, count, t)});
    }

  private:
    const Linear& source;
    Linear plain; // its weight is the buffer where panels are converted
    const Input x;
    const int tokens;
    const bool converted, by_group;
    const std::optional<TileInput>& tiles;
    const std::optional<IntegerInput>& integers;
    int first = 0; // panel of `plain`

    // What the pass from token t on fetches of panels [panel, panel + count).
    Ahead ahead(int panel, int count, int t) const {
        const int most = tokens < block() ? tokens : block();
        const int num_passes = (most + step() - 1) / step(), pass = t % block() / step();
        const int sharing = num_passes < FETCH_PASSES ? num_passes : FETCH_PASSES;
        if (converted || sharing == 1 || pass >= sharing) return {};
        const int weight_bytes = source.type == F32 ? 4 : source.type == BF16 ? 2 : 1;
        const int64_t panel_bytes = panel_size(source) * weight_bytes;
        const int64_t bytes = count * panel_bytes, per_inputs = bytes / source.num_inputs;
        const int lines = int(per_inputs * INPUTS_AHEAD / LINE);
        return {
            (const char*)source.weight + panel * panel_bytes + bytes * pass / sharing,
            (lines + sharing - 1) / sharing};
    }

    float* buffer() const { // of this thread, kept between calls
        static thread_local std::vector<float> kept;
        const size_t size = size_t(4) * source.num_inputs * PANEL;
        if (kept.size() < size) kept.resize(size);
        return kept.data();
    }

    void multiply_by_group(int panel, int count, int t, int rows, float* sums) const {
        alignas(64) float weights[4 * GROUP * PANEL];
        Linear part = plain;
        part.weight = weights, part.num_inputs = GROUP;
        const float* from = x.floats + t * x.stride;
        for (int g = 0; g < source.num_inputs / GROUP; g++, from += GROUP) {
            for (int p = 0; p < count; p++)
                dequantize_panel(source, panel + p, g, g + 1, weights + p * GROUP * PANEL);
            multiply_tile(part, 0, count, rows, {from, x.stride, sums});
        }
    }

    void unpack4(int panel, float* to) const {
        const int64_t size = int64_t(source.num_inputs) * PANEL;
        const int64_t groups = source.num_inputs / source.group_size * PANEL;
        const int8_t* from = (const int8_t*)source.weight + panel * size / 2;
        for (int k = 0; k < source.num_inputs; k += 2) {
            const int64_t at = panel * groups + k / source.group_size * PANEL;
            for (int v = 0; v < PANEL; v += LANES) {
                const IntVec both = widen(from + k / 2 * PANEL + v);
                const Vec s = load(source.scale + at + v), z = load(source.zero + at + v);
                store(to + k * PANEL + v, (__builtin_convertvector(both & 15, Vec) - z) * s);
                store(
                    to + (k + 1) * PANEL + v,
                    (__builtin_convertvector(both >> 4 & 15, Vec) - z) * s);
            }
        }
    }
};

// Scale and bias of outputs from `first` on.
static inline void scale_outputs(const Linear& w, int first, float* tile, int rows, int width) {
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < width && first + i < w.num_outputs; i++) {
            float& y = tile[m * width + i];
            if (w.type == I8) y *= w.scale[first + i];
            if (w.bias) y += w.bias[first + i];
        }
}

// to [size] = from; whole panels without the call of a function.
static inline void copy_row(const float* from, int size, float* to) {
    if (size == PANEL)
        memcpy(to, from, PANEL * 4);
    else if (size == 2 * PANEL)
        memcpy(to, from, 2 * PANEL * 4);
    else
        memcpy(to, from, size * 4);
}

// to [size] += from
static inline void add_row(const float* from, int size, float* to) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) store(to + i, load(to + i) + load(from + i));
    for (; i < size; i++) to[i] += from[i];
}

// y [T, out] = x [T, in] W^T + b (+ y if `add`), the outputs of panels [panel, panel + count), at
// most 4, for tokens [begin, end).
static void product_with_panels(
    const Linear& w, Factors& factors, int panel, int count, int begin, int end, float* y,
    int64_t ldy, bool add) {
    alignas(64) float tile[PASS_SUMS];
    const int step = factors.step(), width = count * PANEL, first = panel * PANEL;
    const int valid = w.num_outputs - first < width ? w.num_outputs - first : width;
    factors.hold(panel, count);
    for (int t = begin; t < end; t += step) {
        const int rows = end - t < step ? end - t : step;
        if (rows < ROWS_AHEAD) // the loop below does not look so far ahead
            for (int m = 0; m < rows; m++)
                for (int i = 0; i < width; i += PANEL)
                    __builtin_prefetch(y + (t + m) * ldy + first + i, 1);
        factors.multiply(panel, count, t, rows, tile);
        if (w.type == I8 || w.bias) scale_outputs(w, first, tile, rows, width);
        for (int m = 0; m < rows; m++) {
            float* out = y + (t + m) * ldy + first;
            const float* in = tile + m * width;
            if (m + ROWS_AHEAD < rows)
                for (int i = 0; i < width; i += PANEL)
                    __builtin_prefetch(out + ROWS_AHEAD * ldy + i, 1);
            if (add)
                add_row(in, valid, out);
            else
                copy_row(in, valid, out);
        }
    }
}

// The same of all tokens, the outputs of one thread, without those of the next ones.
static void product_with(
    const Linear& w, const ReadyInput& input, float* y, int64_t ldy, bool add, Thread thread) {
    const Share share = thread.share(num_panels(w.num_outputs));
    Factors factors(w, input);
    const int tokens = input.tokens, block = factors.block();
    for (int begin = 0; begin < tokens; begin += block) {
        const int end = tokens - begin < block ? tokens : begin + block;
        for (int panel = share.begin, count; panel < share.end; panel += count) {
            count = factors.panels(share.end - panel);
            product_with_panels(w, factors, panel, count, begin, end, y, ldy, add);
        }
    }
}

// y [T, out] = x [T, in] W^T + b (+ y if `add`), the outputs of one thread.
static void product(
    const Linear& w, const Input& x, int tokens, float* y, int64_t ldy, bool add, Thread thread) {
    const ReadyInput input(w, x, tokens, thread);
    for (const Linear* part = &w; part; y += part->num_outputs, part = part->next)
        product_with(*part, input, y, ldy, add, thread);
}

static inline Vec activate(Vec x, int activation) {
    if (activation == SILU) return x / (1.0f + exp(-x));
    if (activation == RELU_SQUARED) return x > 0 ? x * x : Vec{};
    if (activation == GELU) {
        for (int i = 0; i < LANES; i++) x[i] *= 0.5f * (1 + erff(x[i] * 0.7071067811865476f));
        return x;
    }
    Vec inner = 0.7978845608028654f * (x + 0.044715f * x * x * x); // GELU by tanh
    return x / (1.0f + exp(-2.0f * inner)); // 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u))
}

// y [in] = the weights of one output, times `scale`; w is in blocks.
static inline void copy_blocks(const Linear& w, int64_t output, float scale, float* y) {
    float weights[GROUP * PANEL];
    for (int k = 0; k < w.num_inputs; k += GROUP) {
        dequantize_panel(w, int(output / PANEL), k / GROUP, k / GROUP + 1, weights);
        for (int i = 0; i < GROUP; i++) y[k + i] = weights[i * PANEL + output % PANEL] * scale;
    }
}

// The same, where w is in blocks or not quantised.
static inline void copy_weights(const Linear& w, int64_t output, float scale, float* y) {
    if (is_blocks(w)) return copy_blocks(w, output, scale, y);
    const int64_t panel = output / PANEL * panel_size(w), lane = output % PANEL;
    if (w.type == F32)
        for (int64_t k = 0; k < w.num_inputs; k++)
            y[k] = ((const float*)w.weight)[panel + k * PANEL + lane] * scale;
    else
        for (int64_t k = 0; k < w.num_inputs; k++) {
            const int64_t at = (k / 2 * PANEL + lane) * 2 + k % 2;
            y[k] = scalar((const uint16_t*)w.weight + panel + at) * scale;
        }
}

// y [hidden] = the embedding of a token.
static inline void embed_token(const Model& model, int64_t token, float* y) {
    if (model.embedding) return copy_weights(*model.embedding, token, model.embed_scale, y);
    const int64_t hidden = model.hidden, at = token * hidden;
    for (int64_t k = 0; k < hidden; k++) {
        const float x = model.table_type == F32 ? ((const float*)model.table)[at + k]
                                                : scalar((const uint16_t*)model.table + at + k);
        y[k] = x * model.embed_scale;
    }
}

// gate [PANEL] = act(gate) * up
static inline void activate(float* gate, const float* up, int activation) {
    for (int i = 0; i < PANEL; i += LANES)
        store(gate + i, activate(load(gate + i), activation) * load(up + i));
}

// Where activations go: as inputs [T, half] of a product that takes tiles, or in float32.
class Activated {
  public:
    Activated(float* memory, int tokens, int half, const Linear& next)
        : layout(tokens, half), memory(memory), half(half), tiles(TileInput::takes(next)) {}

    Input input() const { return {memory, half, tiles ? (const uint16_t*)memory : nullptr}; }

    // PANEL activations of a token, those behind the last are zeros.
    void write(const float* from, int64_t t, int first) const {
        if (tiles)
            round_panel(from, place(t, first));
        else
            copy_row(from, half - first < PANEL ? half - first : PANEL, memory + t * half + first);
    }

    // The activations of a token in float32, as they are multiplied.
    void read(int64_t t, float* to) const {
        if (!tiles) return copy_row(memory + t * half, half, to);
        for (int first = 0; first < half; first += PANEL)
            for (int i = first; i < half && i < first + PANEL; i++)
                to[i] = scalar(place(t, first) + i - first);
    }

    // Fetch where they go.
    void fetch(int64_t t, int first) const {
        __builtin_prefetch(tiles ? (const void*)place(t, first) : memory + t * half + first, 1);
    }

    // The inputs of the padding of tokens [begin, end).
    void pad(int begin, int end) const {
        const int first = num_panels(half) * PANEL;
        if (!tiles || first % TILE_INPUTS == 0) return;
        for (int t = begin; t < end; t++) memset(place(t, first), 0, PANEL * 2);
    }

  private:
    const TileLayout layout;
    float* memory;
    const int half;
    const bool tiles;

    uint16_t* place(int64_t t, int first) const {
        return (uint16_t*)memory + layout.at(t, first / TILE_INPUTS) + first % TILE_INPUTS;
    }
};

struct NothingAdded {
    void operator()(int, int, int, float*) const {}
};

// y = act(x G^T) * (x U^T), the outputs of pair `pair` of panels for tokens [begin, end).
// add(t, rows, pair, both): adds to both products of tokens [t, t + rows): [rows, 2, PANEL].
template <class Add = NothingAdded>
static void gated_product_with_pair(
    const Linear& w, Factors& factors, int pair, int begin, int end, const Activated& y,
    int activation, const Add& add = {}) {
    alignas(64) float one[MAX_ROWS * PANEL], both[PASS_SUMS];
    const bool together = factors.panels(2) >= 2;
    const int step = factors.step(), first = pair * PANEL;
    factors.hold(2 * pair, 2);
    for (int t = begin; t < end; t += step) {
        const int rows = end - t < step ? end - t : step;
        if (rows < ROWS_AHEAD)
            for (int m = 0; m < rows; m++) y.fetch(t + m, first);
        if (together)
            factors.multiply(2 * pair, 2, t, rows, both);
        else
            for (int side = 0; side < 2; side++) {
                factors.multiply(2 * pair + side, 1, t, rows, one);
                for (int m = 0; m < rows; m++)
                    memcpy(both + (2 * m + side) * PANEL, one + m * PANEL, PANEL * 4);
            }
        if (w.type == I8 || w.bias) scale_outputs(w, 2 * first, both, rows, 2 * PANEL);
        add(t, rows, pair, both);
        for (int m = 0; m < rows; m++) {
            float* gate = both + 2 * m * PANEL;
            activate(gate, gate + PANEL, activation);
            y.write(gate, t + m, first);
        }
    }
}

// y = act(x W^T), the outputs of one panel for tokens [begin, end).
static inline void activated_product_with_panel(
    const Linear& w, Factors& factors, int panel, int begin, int end, const Activated& y,
    int activation) {
    alignas(64) float sums[PASS_SUMS];
    const int step = factors.step(), first = panel * PANEL;
    factors.hold(panel, 1);
    for (int t = begin; t < end; t += step) {
        const int rows = end - t < step ? end - t : step;
        factors.multiply(panel, 1, t, rows, sums);
        if (w.type == I8 || w.bias) scale_outputs(w, first, sums, rows, PANEL);
        for (int m = 0; m < rows; m++) {
            float* row = sums + m * PANEL;
            for (int i = 0; i < PANEL; i += LANES)
                store(row + i, activate(load(row + i), activation));
            y.write(row, t + m, first);
        }
    }
}

// The same of all tokens, the outputs of one thread. The panels of w are those of G and U in turns;
// each has `half` outputs.
template <class Add = NothingAdded>
static void gated_product(
    const Linear& w, const Input& x, int tokens, const Activated& y, int half, int activation,
    Thread thread, const Add& add = {}) {
    const Share share = thread.share(num_panels(half));
    const ReadyInput input(w, x, tokens, thread);
    Factors factors(w, input);
    const int block = factors.block();
    for (int begin = 0; begin < tokens; begin += block) {
        const int end = tokens - begin < block ? tokens : begin + block;
        for (int pair = share.begin; pair < share.end; pair++)
            gated_product_with_pair(w, factors, pair, begin, end, y, activation, add);
    }
    if (share.end == num_panels(half)) y.pad(0, tokens);
}
