// Products of inputs in 8 bits with weights that are integers, summed as integers.
//
// A row of x is rounded in groups of GROUP inputs (rounded_row.h). Products of its integers with those
// of a group of weights (blocks.h) are summed exactly; the sums of the groups are scaled and added in
// float32, in order, each operation rounded. So a token's outputs do not depend on the other tokens,
// and are those of model/integer_product.py to the last bit. Blocks multiply
// two rows for each token: what rounding leaves of the first is the second, and their sums are added.

#pragma once

#include "../structures.h"
#include "blocks.h"
#include "byte_sums.h"
#include "panels.h"
#include "rounded_row.h"

#include <cstdint>
#include <cstring>

// Rows times outputs, those of whole vectors.
struct IntegerPass {
    const Linear& w;
    int output, num_vectors;
    const RoundedGroup* x; // [rows, num_groups]
    int64_t num_groups;
    float* sums; // rows are `width` apart
    int64_t width;
    int64_t fetched, fetch_every; // the first group that is fetched, and groups until the next one
};

constexpr int MAX_PASS_ROWS = 6; // of a pass over a panel
constexpr int MAX_OWN_ROWS = 4;  // that each thread rounds, which takes less time than to wait
constexpr int FETCH_PASSES = 4;  // that share what is fetched for the next panels
constexpr int64_t MAX_GROUPS_AHEAD = 1024; // 256 KiB of 4 bits

// Exact sums of products of a group of inputs, for each half of it where these have factors; rows of
// x are `next` groups apart.
template <int TYPE, class Sums, int ROWS, int VECS, int HALVES>
static inline void multiply_group(
    const BlockVector<TYPE>* w, int64_t group, const RoundedGroup* x, int64_t next,
    Sums (&sums)[ROWS][VECS][HALVES]) {
    constexpr int OFFSET = zero_of(TYPE) + Sums::OFFSET;
    for (int m = 0; m < ROWS; m++)
        for (int h = 0; h < HALVES; h++) {
            const RoundedGroup& row = x[m * next];
            const int32_t minus = HALVES == 2 ? row.minus_halves[h] : row.minus_sum;
            for (int v = 0; v < VECS; v++)
                sums[m][v][h].begin(OFFSET ? all_ints(minus) * OFFSET : Ints{});
        }
    // Add those of quad k, to sums of which `added` quads were added before.
    const auto add = [&](const Ints(&quads)[VECS], int k, int added) {
        for (int m = 0; m < ROWS; m++) {
            const Ints inputs = four_inputs(x[m * next].values + 4 * k);
            for (int v = 0; v < VECS; v++) sums[m][v][k / 4 % HALVES].add(quads[v], inputs, added);
        }
    };
    if (bits_of(TYPE) == 8) {
#pragma GCC unroll 1 // registers hold no more
        for (int k = 0; k < 8; k++) {
            Ints quads[VECS];
            for (int v = 0; v < VECS; v++) quads[v] = w[v].read_quad(group, k);
            add(quads, k, k);
        }
        return;
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        Ints low[VECS], high[VECS];
        for (int v = 0; v < VECS; v++) w[v].read(group, k, low[v], high[v]);
        add(low, k, HALVES == 2 ? k : 2 * k);
        add(high, k + 4, HALVES == 2 ? k : 2 * k + 1);
    }
}

template <int TYPE, int ROWS, int VECS>
static __attribute__((noinline)) void multiply_vectors(const IntegerPass& pass) {
    constexpr int HALVES = has_factors(TYPE) ? 2 : 1;
    const int last = pass.num_vectors < VECS ? 0 : VECS - 1; // or the first once more
    const BlockVector<TYPE> w[2] = {{pass.w, pass.output}, {pass.w, pass.output + last * OUTPUTS}};
    Floats sums[ROWS][VECS] = {};
    int64_t fetched = pass.fetched, next_fetch = 0;
    for (int64_t g = 0; g < pass.num_groups; g++) {
        if (g == next_fetch) {
            for (int v = 0; v < VECS; v += PANEL / OUTPUTS) w[v].fetch(fetched);
            fetched++, next_fetch += pass.fetch_every;
        }
        const RoundedGroup* x = pass.x + g;
        ByteSums<bits_of(TYPE)> totals[ROWS][VECS][HALVES];
        multiply_group<TYPE>(w, g, x, pass.num_groups, totals);
        for (int v = 0; v < VECS; v++) {
            const Scales by = w[v].read_scales(g);
            for (int m = 0; m < ROWS; m++) {
                const RoundedGroup& row = x[m * pass.num_groups];
                Floats total = totals[m][v][0].total(), scale = all_floats(row.scale);
                if (HALVES == 2) // exact
                    total = total * by.factors[0] + totals[m][v][1].total() * by.factors[1];
                if (TYPE != W8A8) scale *= by.scale;
                sums[m][v] += rounded_product(total, scale);
                if (has_offsets(TYPE))
                    sums[m][v] += rounded_product(all_floats(row.scaled_sum), by.offset);
            }
        }
    }
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECS && v < pass.num_vectors; v++) {
            const int output = v * OUTPUTS;
            if (TYPE == W8A8)
                sums[m][v] =
                    rounded_product(sums[m][v], load_floats(pass.w.scale + pass.output + output));
            memcpy(pass.sums + m * pass.width + output, &sums[m][v], sizeof(Floats));
        }
}

template <int TYPE, int VECS> static void multiply_rows(int rows, const IntegerPass& pass) {
    switch (rows) {
        case 1: return multiply_vectors<TYPE, 1, VECS>(pass);
        case 2: return multiply_vectors<TYPE, 2, VECS>(pass);
        case 3: return multiply_vectors<TYPE, 3, VECS>(pass);
        case 4: return multiply_vectors<TYPE, 4, VECS>(pass);
        case 5: return multiply_vectors<TYPE, 5, OUTPUTS == PANEL ? VECS : 1>(pass);
        default: return multiply_vectors<TYPE, 6, OUTPUTS == PANEL ? VECS : 1>(pass);
    }
}

// Rows of inputs, ready to be multiplied.
class IntegerInput {
  public:
    static bool takes(const Linear& w) {
        return w.type == W8A8 || w.type == W4A8 || (is_blocks(w) && !w.float32_input);
    }

    // A few rows are rounded by each thread for itself, more by all of them together.
    IntegerInput(const Linear& w, const Input& x, int tokens, Thread thread)
        : rows_of_token(is_blocks(w) ? 2 : 1), tokens(tokens),
          num_groups(padded_inputs(w.num_inputs) / GROUP), rows((RoundedGroup*)thread.tiles) {
        const bool alone = tokens <= MAX_OWN_ROWS;
        if (alone) rows += thread.index * MAX_OWN_ROWS * rows_of_token * num_groups;
        const Share share = alone ? Share{0, tokens} : thread.share(tokens);
        for (int64_t t = share.begin; t < share.end; t++) {
            const float* from = x.floats + t * x.stride;
            RoundedGroup* to = rows + t * rows_of_token * num_groups;
            if (rows_of_token == 1)
                round_to_bytes(from, w.num_inputs, to);
            else
                round_to_two(from, w.num_inputs, to, to + num_groups);
        }
        if (!alone) thread.wait();
    }

    // How many of the panels that are left go together.
    static int panels(int left) { return left >= 2 ? 2 : 1; }

    // sums [num_tokens, count * PANEL] = tokens [t, t + num_tokens), at most MAX_ROWS, times panels
    // [panel, panel + count) of w.
    void multiply(const Linear& w, int panel, int count, int t, int num_tokens, float* sums) const {
        if (rows_of_token == 1) return multiply_some(w, panel, count, t, num_tokens, sums);
        alignas(64) float both[MAX_PASS_ROWS * 2 * PANEL]; // of two panels at most
        constexpr int STEP = MAX_PASS_ROWS / 2;
        const int width = count * PANEL;
        for (int first = 0; first < num_tokens; first += STEP) {
            const int some = num_tokens - first < STEP ? num_tokens - first : STEP;
            multiply_some(w, panel, count, 2 * (t + first), 2 * some, both);
            for (int m = 0; m < some; m++)
                for (int i = 0; i < width; i++)
                    sums[(first + m) * width + i] =
                        both[2 * m * width + i] + both[(2 * m + 1) * width + i];
        }
    }

  private:
    const int rows_of_token;
    const int tokens;
    const int64_t num_groups;
    RoundedGroup* rows;

    // The same of rows [t, t + num_rows), at most MAX_PASS_ROWS.
    void multiply_some(
        const Linear& w, int panel, int count, int t, int num_rows, float* sums) const {
        const bool holds_two = OUTPUTS == PANEL || num_rows <= 4; // vectors of sums, in registers
        const int vectors = count * PANEL / OUTPUTS, step = holds_two ? 2 : 1;
        // While a token's part of these panels is computed, a part of the next ones is fetched.
        const int64_t ahead = count * num_groups;
        const int passes = (tokens * rows_of_token + num_rows - 1) / num_rows;
        const int sharing = passes < FETCH_PASSES ? passes : FETCH_PASSES;
        const int64_t fetched = (ahead < MAX_GROUPS_AHEAD ? ahead : MAX_GROUPS_AHEAD) +
                                t / num_rows % sharing * num_groups / sharing;
        with_type(w, [&](auto type) {
            for (int v = 0; v < vectors; v += step)
                multiply_rows<decltype(type)::value, 2>(
                    num_rows, {w, panel * PANEL + v * OUTPUTS, vectors - v, rows + t * num_groups,
                               num_groups, sums + v * OUTPUTS, count * PANEL, fetched, sharing});
        });
    }
};
