// Panels of packed weights, and what each thread computes of them.
//
// A panel holds PANEL outputs, of bf16 [in / 2, PANEL, 2], of every other type [in, PANEL], but for
// those of integers.h. The inputs of bf16 are padded with zeros to a multiple of 32: 16 pairs of them
// are one tile, and vectors read both of a pair with one load.

#pragma once

#include "../structures.h"
#include "../team.h"

#include <cstdint>

constexpr int PANEL = 16;       // outputs of a panel
constexpr int TILE_INPUTS = 32; // that the inputs of a panel in bf16 are a multiple of

struct Share { // of items for one thread
    int begin, end;
};

struct Thread { // one of those of the parallel region
    int index, count;
    uint16_t* tiles; // memory of all of them: see TileInput
    Barrier& barrier;

    // Wait for the others.
    void wait() const {
        if (count > 1) barrier.wait(index, count);
    }

    Share share(int items) const {
        return {int(int64_t(items) * index / count), int(int64_t(items) * (index + 1) / count)};
    }
};

struct Input { // of a product: [T, in]
    const float* floats;
    int64_t stride;
    const uint16_t* tiles; // the same, rounded: see TileLayout; null: not rounded yet
};

static inline int num_panels(int num_outputs) { return (num_outputs + PANEL - 1) / PANEL; }

static inline int64_t padded_inputs(int64_t num_inputs) {
    return (num_inputs + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
}

// Weights of a panel, with those of the padding.
static inline int64_t panel_size(const Linear& w) {
    const bool padded = w.type == BF16 || w.type >= W8A8;
    return (padded ? padded_inputs(w.num_inputs) : w.num_inputs) * PANEL;
}
