// Recurrences over the tokens of a sequence: a causal convolution, the gated delta rule, and the
// state-space models of Mamba and Mamba-2.
//
// Each function computes a part of a layer that no other part depends on (some channels, or some
// columns or rows of a head's state) for the tokens of a row in order. A token's result depends on
// the state before it alone, to the last bit: wherever the row begins, and whether that state was
// stored or has just been computed.

#pragma once

#include "../structures.h"
#include "vectors.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// log(1 + exp(x)), as torch computes it
static inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// Floats of a layer's state: of its convolution [kernel, channels], and of a head.
static inline int64_t window_size(const Recurrent& w) { return int64_t(w.kernel) * w.channels; }

static inline int64_t head_size(const Recurrent& w) { return int64_t(w.key_dim) * w.value_dim; }

// Memory of this thread, kept between calls: a state that is nowhere else.
static inline float* kept_state(size_t size) {
    static thread_local std::vector<float> kept;
    if (kept.size() < size) kept.resize(size);
    return kept.data();
}

// The inputs of some channels, which may be anywhere among the projections.
struct Channels {
    const int32_t* at;
    const Lanes lanes;
    bool adjacent = true;

    Channels(const Recurrent& w, int first)
        : at(w.at + first), lanes(lanes_of(w.channels - first)) {
        for (int i = 1; i < lanes.count; i++) adjacent &= at[i] == at[0] + i;
    }

    Vec load(const float* row) const {
        if (adjacent) return lanes.load(row + at[0]);
        float values[LANES] = {};
        for (int i = 0; i < lanes.count; i++) values[i] = row[at[i]];
        return ::load(values);
    }

    void store(float* row, Vec v) const {
        if (adjacent) return lanes.store(row + at[0], v);
        float values[LANES];
        ::store(values, v);
        for (int i = 0; i < lanes.count; i++) row[at[i]] = values[i];
    }
};

static inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

static inline Vec silu(Vec x) { return x / (1.0f + exp(-x)); }

// LANES channels from `first` on, of tokens [begin, end). Their projections become the activated sums;
// of a SHORT_CONVOLUTION, whose projections are two gates and the inputs, `mixed` gets the sums.
static __attribute__((noinline)) void convolve(
    const Recurrent& w, const RecurrentCall& call, int begin, int end, int first) {
    const Channels channels(w, first);
    const Lanes lanes = channels.lanes;
    const bool is_short = w.kind == SHORT_CONVOLUTION;
    Vec taps[MAX_KERNEL], window[MAX_KERNEL] = {};
    for (int j = 0; j < w.kernel; j++)
        taps[j] = lanes.load(w.taps + int64_t(j) * w.channels + first);
    const Vec bias = w.bias ? lanes.load(w.bias + first) : Vec{};
    for (int64_t t = begin; t < end; t++) {
        const TokenState& token = call.tokens[t];
        const int64_t place = w.offset + first;
        if (!token.follows)
            for (int j = 0; j < w.kernel; j++)
                window[j] = token.before
                                ? lanes.load(token.before + place + int64_t(j) * w.channels)
                                : Vec{};
        float* row = call.projected + t * w.width;
        for (int j = 0; j + 1 < w.kernel; j++) window[j] = window[j + 1];
        Vec x = channels.load(row);
        if (is_short) x *= lanes.load(row + first);
        window[w.kernel - 1] = x;
        Vec y = bias;
        for (int j = 0; j < w.kernel; j++) y += taps[j] * window[j];
        if (is_short)
            lanes.store(
                call.mixed + t * w.channels + first, y * lanes.load(row + w.channels + first));
        else
            channels.store(row, silu(y));
        if (token.after)
            for (int j = 0; j < w.kernel; j++)
                lanes.store(token.after + place + int64_t(j) * w.channels, window[j]);
    }
}

// Rows of a head's state, before and after a token: in the memory of the caller, or kept.
struct StateRows {
    const float* from = nullptr;
    float* to = nullptr;
    int64_t from_stride = 0, to_stride = 0;

    // place: of the part in a stored state, whose rows are `stride` floats apart; kept: [rows, width].
    void move(
        const TokenState& token, int64_t place, int64_t stride, float* kept, int rows, int width) {
        if (token.follows) {
            from = to, from_stride = to_stride;
        } else if (token.before) {
            from = token.before + place, from_stride = stride;
        } else {
            memset(kept, 0, size_t(rows) * width * 4);
            from = kept, from_stride = width;
        }
        to = token.after ? token.after + place : kept;
        to_stride = token.after ? stride : width;
    }
};

// N vectors of a head's values from `first` on, of tokens [begin, end): those columns of the state
// S [key_dim, value_dim] of the gated delta rule (Yang et al. 2024, Gated Delta Networks, eq. 10),
//
//     S = a S + k (b (v - a k S)),  y = q S
//
// whose queries and keys are normalised, and whose step widths are the decays a: of a head, or of each
// of its keys (Kimi Team 2025, Kimi Linear, eq. 1).
template <int N>
static __attribute__((noinline)) void delta_rule(
    const Recurrent& w, const RecurrentCall& call, int begin, int end, int head, int first) {
    const int keys = w.key_dim, group = head / (w.num_heads / w.num_groups);
    const int query_at = w.at[group * keys], key_at = w.at[(w.num_groups + group) * keys];
    const int value_at = w.at[2 * w.num_groups * keys + head * w.value_dim] + first;
    const int64_t place = w.offset + window_size(w) + head * head_size(w) + first;
    const Lanes last = lanes_of(w.value_dim - first - (N - 1) * LANES);
    const auto read = [&](const float* p, int n) {
        return n + 1 < N ? load(p + n * LANES) : last.load(p + n * LANES);
    };
    const auto write = [&](float* p, int n, Vec v) {
        if (n + 1 < N)
            store(p + n * LANES, v);
        else
            last.store(p + n * LANES, v);
    };
    const int stride = w.num_steps > 1;
    StateRows state;
    float* kept = kept_state(size_t(keys) * N * LANES);
    for (int64_t t = begin; t < end; t++) {
        const float* row = call.projected + t * w.width;
        const float *query = row + query_at, *key = row + key_at;
        const float *decays = row + w.steps[head], beta = row[w.betas[head]];
        state.move(call.tokens[t], place, w.value_dim, kept, keys, N * LANES);
        Vec known[N] = {}, y[N] = {}, change[N];
        for (int k = 0; k < keys; k++) {
            const float left = decays[k * stride] * key[k];
            for (int n = 0; n < N; n++)
                known[n] += left * read(state.from + k * state.from_stride, n);
        }
        for (int n = 0; n < N; n++) change[n] = (read(row + value_at, n) - known[n]) * beta;
        for (int k = 0; k < keys; k++)
            for (int n = 0; n < N; n++) {
                Vec s = decays[k * stride] * read(state.from + k * state.from_stride, n);
                s += key[k] * change[n];
                y[n] += query[k] * s;
                write(state.to + k * state.to_stride, n, s);
            }
        float* mixed = call.mixed + t * w.num_heads * w.value_dim + head * w.value_dim + first;
        for (int n = 0; n < N; n++) write(mixed, n, y[n]);
    }
}

// All values of a head.
static inline void delta_rule(
    const Recurrent& w, const RecurrentCall& call, int begin, int end, int head) {
    for (int first = 0; first < w.value_dim;) {
        const int vectors = (w.value_dim - first + LANES - 1) / LANES;
        if (vectors >= 4)
            delta_rule<4>(w, call, begin, end, head, first), first += 4 * LANES;
        else if (vectors >= 2)
            delta_rule<2>(w, call, begin, end, head, first), first += 2 * LANES;
        else
            delta_rule<1>(w, call, begin, end, head, first), first += LANES;
    }
}

// The step widths of LANES values from `first` on, of tokens [begin, end): a product with what stands
// from column `late` on, before their bias.
static __attribute__((noinline)) void multiply_steps(
    const Recurrent& w, const RecurrentCall& call, int begin, int end, int first, int late) {
    const Lanes lanes = lanes_of(w.value_dim - first);
    for (int64_t t = begin; t < end; t++) {
        float* row = call.projected + t * w.width;
        Vec step = {};
        for (int i = 0; i < w.step_inputs; i++)
            step += row[late + i] * lanes.load(w.step_product + int64_t(i) * w.value_dim + first);
        lanes.store(row + w.steps[0] + first, step);
    }
}

constexpr int STATE_ROWS = 32; // of a state-space model, which are computed together

// Rows [first, first + count) of a head's state S [value_dim, key_dim], of tokens [begin, end), in
// Mamba-2 (Dao and Gu 2024, Transformers are SSMs, section 3):
//
//     S = exp(a dt) S + dt x B^T,  y = S C + D x
//
// In Mamba (Gu and Dao 2023, section 3.2), of one head, each row has its dt, a and D, and a has one
// number for each key. B and C are what follows the inputs of the step widths.
template <bool IS_SELECTIVE>
static __attribute__((noinline)) void state_space(
    const Recurrent& w, const RecurrentCall& call, int begin, int end, int head, int first,
    int count) {
    const int size = w.key_dim, whole = size / LANES * LANES;
    const int group = head / (w.num_heads / w.num_groups);
    const int inner = w.num_heads * w.value_dim, value = head * w.value_dim + first;
    const int x_at = w.at[value], step_at = w.steps[head] + (IS_SELECTIVE ? first : 0);
    const int b_at = IS_SELECTIVE ? w.steps[0] - 2 * size : w.at[inner + group * size];
    const int c_at = IS_SELECTIVE ? b_at + size : w.at[inner + (w.num_groups + group) * size];
    const int64_t place = w.offset + window_size(w) + head * head_size(w) + int64_t(first) * size;
    StateRows state;
    float* kept = kept_state(size_t(count) * size);
    for (int64_t t = begin; t < end; t++) {
        const float* row = call.projected + t * w.width;
        const float *x = row + x_at, *b = row + b_at, *c = row + c_at;
        float step = row[step_at], left = IS_SELECTIVE ? 0.0f : expf(step * w.decays[head]);
        state.move(call.tokens[t], place, size, kept, count, size);
        float* mixed = call.mixed + t * inner + value;
        for (int p = 0; p < count; p++) {
            const float* from = state.from + p * state.from_stride;
            float* to = state.to + p * state.to_stride;
            if (IS_SELECTIVE) step = softplus(row[step_at + p] + w.biases[first + p]);
            const float* decays = w.decays + int64_t(first + p) * size;
            const float learned = step * x[p];
            Vec total = {};
            const auto add = [&](int i, Lanes lanes) {
                const Vec decay = IS_SELECTIVE ? exp(step * lanes.load(decays + i)) : Vec{} + left;
                const Vec s = decay * lanes.load(from + i) + learned * lanes.load(b + i);
                total += s * lanes.load(c + i);
                lanes.store(to + i, s);
            };
            for (int i = 0; i < whole; i += LANES) add(i, {LANES});
            if (whole < size) add(whole, {size - whole});
            mixed[p] = sum(total) + w.skips[IS_SELECTIVE ? first + p : head] * x[p];
        }
    }
}
