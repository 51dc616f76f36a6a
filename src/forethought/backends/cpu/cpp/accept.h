// Acceptance, and the end of a generation; in Python: speculative/verify/accept.py.

#pragma once

#include "structures.h"

#include <algorithm>
#include <cstdint>
#include <vector>

struct Accepted {
    int32_t count; // tokens that a row gains; none: the logits after its root are not finite
    bool has_ended;
};

// Accept a chain while its tokens are those that the target draws, and the token drawn after that,
// up to the one that ends the row. Where none can be drawn, the last accepted token is the last.
// draw(at, tokens): the token after the root and `at` accepted ones, or NO_TOKEN; num_left: tokens
// that the row may have; tokens: written.
template <class Draw>
static inline Accepted accept(
    const std::vector<int64_t>& drafted, const ChainRow& row, int64_t num_left, int64_t* tokens,
    const Draw& draw) {
    const int64_t *ends = row.ends, *last = ends + row.num_ends;
    int32_t count = 0;
    while (count <= int64_t(drafted.size())) {
        const int64_t token = draw(count);
        if (token == NO_TOKEN) break;
        tokens[count++] = token;
        if (std::find(ends, last, token) != last || count == num_left) return {count, true};
        if (count > int64_t(drafted.size()) || drafted[count - 1] != token) break;
    }
    return {count, count == 0};
}
