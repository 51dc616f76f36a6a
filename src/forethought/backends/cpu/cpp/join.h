// What a draft module reads: the embedding of a token and the hidden state before it, side by side.

#pragma once

#include "kernels/norms.h"
#include "kernels/products.h"
#include "structures.h"

#include <cstdint>
#include <cstring>

// Where the state is in what is joined; the embedding has the other half.
static inline int64_t state_at(const Model& model) {
    return model.join->state_first ? 0 : model.hidden;
}

// both [2 * hidden], of token t of a call, each half after its norm.
static inline void join_token(const Model& model, const Call& call, int64_t t, float* both) {
    const Join& join = *model.join;
    const int64_t hidden = model.hidden;
    float *state = both + state_at(model), *token = both + hidden - state_at(model);
    if (join.zero_first && call.positions[t] == 0)
        memset(token, 0, hidden * 4);
    else
        embed_token(model, call.token_ids[t], token);
    memcpy(state, call.entering + t * hidden, hidden * 4);
    if (join.token_norm) norm(token, join.token_norm, hidden, model.eps, token);
    if (join.state_norm) norm(state, join.state_norm, hidden, model.eps, state);
}
