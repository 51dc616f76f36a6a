// The MLP of a module whose other parts torch computes.

#pragma once

#include "kernels/products.h"
#include "kernels/vectors.h"
#include "projections.h"
#include "structures.h"

#include <cstdint>

// x [count] = act(x [count]), times `factors` unless they are null.
static inline void activate_row(float* x, const float* factors, int activation, int count) {
    for (int i = 0; i < count; i += LANES) {
        const Lanes lanes = lanes_of(count - i);
        const Vec y = activate(lanes.load(x + i), activation);
        lanes.store(x + i, factors ? y * lanes.load(factors + i) : y);
    }
}

// x [count] *= factor. Not inlined, so that it is not one operation with what follows.
static __attribute__((noinline)) void scale_row(float* x, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] *= factor;
}

// What one thread does; see mlp() in forward.cpp.
static void run_mlp(
    const Mlp& w, const float* x, int tokens, float* rows, float* y, Thread thread) {
    if (x) project(w.enter, w.num_enter, {x, w.hidden, nullptr}, tokens, rows, w.width, thread);
    const int per_row = (w.inner + PANEL - 1) / PANEL; // parts, which threads share
    const Share share = thread.share(tokens * per_row);
    for (int part = share.begin; part < share.end; part++) {
        const int first = part % per_row * PANEL, left = w.inner - first;
        float* row = rows + int64_t(part / per_row) * w.width + first;
        const int count = left < PANEL ? left : PANEL;
        const float* factors = w.has_gate ? row + w.inner : nullptr;
        if (factors && w.gate_scale != 1) scale_row(row, w.gate_scale, count);
        activate_row(row, factors, w.activation, count);
    }
    if (!y) return;
    thread.wait();
    product(w.down, {rows, w.width, nullptr}, tokens, y, w.hidden, false, thread);
}

// The widest input of its products.
static int64_t widest_input(const Mlp& w) {
    return larger(w.inner, w.enter ? widest_input(w.enter, w.num_enter) : w.hidden);
}
