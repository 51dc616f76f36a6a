// What adapters add to the products of their tokens: y += (x A^T) B^T.
//
// A token's sums run over its inputs in order, and then over the rank, whatever the tokens beside it.

#pragma once

#include "../structures.h"
#include "products.h"

#include <cstdint>
#include <cstring>

// The part of an adapter's layer that adds to a product, such as &AdapterLayer::qkv.
using LowRankPart = LowRank AdapterLayer::*;

// low [rows, low_width] = x A^T; rows: at most MAX_ROWS.
static inline void multiply_down(
    const LowRank& by, const float* x, int64_t ldx, int rows, float* low, int64_t low_width) {
    for (int panel = 0; panel < num_panels(by.down.num_outputs); panel++) {
        alignas(64) float tile[MAX_ROWS * PANEL] = {};
        multiply_tile(by.down, panel, 1, rows, {x, ldx, tile});
        for (int m = 0; m < rows; m++)
            memcpy(low + m * low_width + panel * PANEL, tile + m * PANEL, PANEL * 4);
    }
}

// y [rows, out] += low B^T
static inline void add_up(
    const LowRank& by, const float* low, int64_t low_width, int rows, float* y, int64_t ldy) {
    for (int panel = 0; panel < num_panels(by.up.num_outputs); panel++) {
        alignas(64) float tile[MAX_ROWS * PANEL] = {};
        const int left = by.up.num_outputs - panel * PANEL;
        multiply_tile(by.up, panel, 1, rows, {low, low_width, tile});
        for (int m = 0; m < rows; m++)
            add_row(tile + m * PANEL, left < PANEL ? left : PANEL, y + m * ldy + panel * PANEL);
    }
}

// The additions to one product of a layer, for all tokens of a call that are still computed.
class LowRanks {
  public:
    // picks: the tokens are those with logits.
    LowRanks(const Call& call, int layer, LowRankPart part, bool picks)
        : call(call), layer(layer), part(part), picks(picks) {}

    // What adds to the product of a token; null: nothing does.
    const LowRank* of(int64_t t) const {
        const void* adapter = call.adapters[picks ? call.logit_index[t] : t];
        if (!adapter) return nullptr;
        const LowRank& by = ((const AdapterLayer*)adapter)[layer].*part;
        return by.down.weight ? &by : nullptr;
    }

    float* low(int64_t t) const { return call.low + t * call.low_width; }

    // Call `visit` with the additions, the first token and the number of each run of tokens of a
    // share that have the same additions.
    template <class F> void each_run(Share share, F&& visit) const {
        for (int t = share.begin, rows; t < share.end; t += rows) {
            const LowRank* by = of(t);
            for (rows = 1; rows < MAX_ROWS && t + rows < share.end; rows++)
                if (of(t + rows) != by) break;
            if (by) visit(*by, t, rows);
        }
    }

    // low = x A^T of the tokens of a share
    void multiply(Share share, const float* x, int64_t ldx) const {
        each_run(share, [&](const LowRank& by, int64_t t, int rows) {
            multiply_down(by, x + t * ldx, ldx, rows, low(t), call.low_width);
        });
    }

    // y += low B^T of the same
    void add(Share share, float* y, int64_t ldy) const {
        each_run(share, [&](const LowRank& by, int64_t t, int rows) {
            add_up(by, low(t), call.low_width, rows, y + t * ldy, ldy);
        });
    }

    // both [rows, 2, PANEL] of tokens [begin, end) += those of a pair of panels, of gate and up
    void add_pair(int begin, int end, int pair, float* both) const {
        each_run({begin, end}, [&](const LowRank& by, int t, int rows) {
            const int step = panels_at_once(rows, 2) == 2 ? rows : 1;
            for (int i = 0; i < rows; i += step)
                multiply_tile(
                    by.up, 2 * pair, 2, step,
                    {low(t + i), call.low_width, both + (t + i - begin) * 2 * PANEL});
        });
    }

  private:
    const Call& call;
    const int layer;
    const LowRankPart part;
    const bool picks;
};
