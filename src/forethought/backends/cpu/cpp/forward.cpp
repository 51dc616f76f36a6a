// One forward of a Llama-like decoder on a CPU: a batch of packed tokens in, logits out.
//
// All layers run in one parallel region of a Team; between phases that read each other's results
// the threads meet at a barrier. Activations are float32, which tiles.h rounds to bf16. Weights are
// float32, bf16, or integers in 8 and 4 bits that are dequantised in registers; keys and values are
// float32, bf16, or integers in 8 bits (entries.h).
//
// The sum of every output runs over its inputs in order, whatever the number of tokens, and a
// query's attention over the tokens that it sees in order of position, in chunks of CHUNK, whatever
// the layout of the cache and the threads. So a token's result does not depend on the batch, to the
// last bit, up to BLOCK_QUERIES new tokens of a row; longer runs (prefills) attend in another order,
// alike however they are cut, and in tiles round queries and weights of positions to bf16.
//
// Weights W [out, in] are packed in panels of PANEL outputs: see panels.h.

#include "attention_layer.h"
#include "beams.h"
#include "chain_steps.h"
#include "drafts.h"
#include "heads.h"
#include "join.h"
#include "kernels/attention.h"
#include "kernels/experts.h"
#include "kernels/low_rank.h"
#include "kernels/norms.h"
#include "kernels/pack.h"
#include "kernels/products.h"
#include "kernels/vectors.h"
#include "layer_window.h"
#include "mixture.h"
#include "mlp.h"
#include "module_forward.h"
#include "recurrent.h"
#include "sampling.h"
#include "scratch.h"
#include "structures.h"
#include "sublayers.h"
#include "team.h"
#include "uniform.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __linux__
#include <sys/vfs.h>
#endif

// What one thread does in a forward. Each phase ends with a barrier unless it says otherwise.
class Forward {
  public:
    Forward(const Model& model, const Call& call, Thread thread)
        : model(model), call(call),
          b(model, call.num_tokens, call.max_length, thread.count, call.scratch),
          thread{thread.index, thread.count, b.tiles, thread.barrier}, hidden(model.hidden),
          tokens(call.num_tokens), narrow(is_narrow()) {}

    void run() {
        if (model.join)
            join(*model.join);
        else
            embed();
        if (thread.index == 0) find_common(call, b);
        for (int index = 0; index < model.num_layers; index++) {
            const Layer& layer = model.layers[index];
            if (layer.is_stored) enter(index);
            attend(layer, index);
            if (narrow && index == model.num_layers - 1) keep_wanted();
            add_attention(layer, index);
            if (layer.experts) {
                norm_all(layer.mlp_norm, nullptr);
                run_experts(model, *layer.experts, tokens, b, thread);
            } else {
                add_mlp(layer, index, norm_all(layer.mlp_norm, &layer.gate_up));
            }
            if (layer.is_stored && thread.index == 0) ((LayerWindow*)model.stored)->leave();
        }
        write_logits();
    }

  private:
    const Model& model;
    const Call& call;
    const Scratch b;
    const Thread thread;
    const int64_t hidden;
    int tokens;        // that are still computed
    const bool narrow; // only tokens with logits are, once the last layer has attended

    bool is_narrow() const {
        const bool states = call.states[model.num_layers] || call.states[model.num_layers + 1];
        return call.num_logits < call.num_tokens && !states;
    }

    // Wait until a layer that is in a file has been read.
    void enter(int index) const {
        if (thread.index == 0) ((LayerWindow*)model.stored)->enter(index);
        thread.wait();
    }

    // b.x = the embeddings; without a barrier: each thread norms the tokens that it has embedded.
    void embed() {
        const Share share = thread.share(tokens);
        for (int64_t t = share.begin; t < share.end; t++)
            embed_token(model, call.token_ids[t], b.x + t * hidden);
    }

    // b.joined = embeddings and states; b.x = what enters the layer, or its residual.
    void join(const Join& join) {
        const Share share = thread.share(tokens);
        for (int64_t t = share.begin; t < share.end; t++) {
            float* both = b.joined + t * 2 * hidden;
            join_token(model, call, t, both);
            if (join.project) continue;
            const float* entering = call.entering + t * hidden;
            const float* state = join.norm_residual ? both + state_at(model) : entering;
            memcpy(b.x + t * hidden, state, hidden * 4);
        }
        thread.wait();
        if (!join.project) return;
        const Input both{b.joined, 2 * hidden, nullptr};
        product(*join.project, both, tokens, b.x, hidden, false, thread);
        thread.wait();
    }

    // b.normed = norm of b.x; b.tiles instead, if that is what the next product takes, or as well if
    // adapters read the norm.
    Input norm_all(const float* weight, const Linear* next) {
        const Share share = thread.share(tokens);
        const bool tiles = next && TileInput::takes(*next);
        const TileLayout layout(tokens, hidden);
        for (int64_t t = share.begin; t < share.end; t++) {
            const bool keeps = !tiles || call.adapters; // else one row stays in the cache
            float* y = b.normed + (keeps ? t : share.begin) * hidden;
            norm(b.x + t * hidden, weight, hidden, model.eps, y);
            if (tiles) round_row(y, hidden, layout.per_tile, b.tiles + layout.at(t));
        }
        thread.wait();
        return {b.normed, hidden, tiles ? b.tiles : nullptr};
    }

    LowRanks low_ranks(int index, LowRankPart part) const {
        return LowRanks(call, index, part, tokens < call.num_tokens);
    }

    // y [T, width] += what adapters make of x, the input of a product that all threads have finished.
    void adapt(
        int index, LowRankPart part, const float* x, int64_t ldx, float* y, int64_t width) const {
        if (!call.adapters) return;
        const LowRanks adapters = low_ranks(index, part);
        const Share share = thread.share(tokens);
        adapters.multiply(share, x, ldx);
        adapters.add(share, y, width);
        thread.wait();
    }

    // Hand out a hidden state [T, hidden], where it is wanted; without a barrier.
    void keep_state(int index, const float* x) {
        float* to = call.states[index];
        if (to && thread.index == 0) memcpy(to, x, tokens * hidden * 4);
    }

    void attend(const Layer& layer, int index) {
        if (call.kv_type == F32)
            attention<float>(layer, index);
        else if (call.kv_type == BF16)
            attention<uint16_t>(layer, index);
        else
            attention<int8_t>(layer, index);
    }

    // b.mixed = what the heads of b.x attend to
    template <class T> void attention(const Layer& layer, int index) {
        T *keys = (T*)call.keys[index], *values = (T*)call.values[index];
        Input input{b.x, hidden, nullptr};
        if (layer.input_norm) input = norm_all(layer.input_norm, &layer.qkv);
        if (model.join && !model.join->project) input = {b.joined, 2 * hidden, nullptr};
        keep_state(index, b.x);
        product(layer.qkv, input, tokens, b.qkv, b.qkv_width, false, thread);
        thread.wait();
        adapt(index, &AdapterLayer::qkv, input.floats, input.stride, b.qkv, b.qkv_width);
        const int heads = model.num_heads + 2 * model.num_kv_heads;
        rotate_and_store(model, layer, call, b, keys, values, thread.share(tokens * heads));
        thread.wait();
        Attention<T>(model, layer, call, b, keys, values, thread).attend();
        thread.wait();
    }

    // Move the tokens with logits to the front, and go on with these.
    void keep_wanted() {
        if (thread.index == 0)
            for (int64_t r = 0; r < call.num_logits; r++) {
                const int64_t t = call.logit_index[r]; // they rise, so none is overwritten
                memmove(b.x + r * hidden, b.x + t * hidden, hidden * 4);
                memmove(
                    b.mixed + r * b.mixed_width, b.mixed + t * b.mixed_width, b.mixed_width * 4);
            }
        tokens = call.num_logits;
        thread.wait();
    }

    // b.x += the product of `from`, normed if `weight` is given; `place` is free memory. adapt(y):
    // adds to the product.
    template <class Adapt>
    void add_product(
        const Linear& w, const Input& from, const float* weight, float* place, Adapt&& adapt) {
        product(w, from, tokens, weight ? place : b.x, hidden, !weight, thread);
        if (weight || call.adapters) thread.wait();
        adapt(weight ? place : b.x);
        if (weight) {
            const Share share = thread.share(tokens);
            for (int64_t t = share.begin; t < share.end; t++) {
                float *x = b.x + t * hidden, *y = place + t * hidden;
                norm(y, weight, hidden, model.eps, y);
                for (int i = 0; i < hidden; i++) x[i] += y[i];
            }
        }
        thread.wait();
    }

    void add_attention(const Layer& layer, int index) {
        const Input mixed{b.mixed, b.mixed_width, nullptr};
        add_product(layer.out, mixed, layer.attention_norm, b.wide, [&](float* y) {
            adapt(index, &AdapterLayer::out, b.mixed, b.mixed_width, y, hidden);
        });
    }

    void add_mlp(const Layer& layer, int index, const Input& normed) {
        const int inner = layer.down.num_inputs;
        const Activated y(b.wide, tokens, inner, layer.down);
        multiply_gated(layer, index, normed, y);
        thread.wait();
        add_product(layer.down, y.input(), layer.output_norm, b.mixed, [&](float* sums) {
            adapt_down(index, y, inner, sums);
        });
    }

    void multiply_gated(const Layer& layer, int index, const Input& normed, const Activated& y) {
        const int inner = layer.down.num_inputs;
        if (!call.adapters)
            return gated_product(layer.gate_up, normed, tokens, y, inner, model.activation, thread);
        const LowRanks adapters = low_ranks(index, &AdapterLayer::gate_up);
        adapters.multiply(thread.share(tokens), normed.floats, normed.stride);
        thread.wait();
        gated_product(
            layer.gate_up, normed, tokens, y, inner, model.activation, thread,
            [&](int t, int rows, int pair, float* both) {
                adapters.add_pair(t, t + rows, pair, both);
            });
    }

    // As adapt(), of activations, which may be in tiles.
    void adapt_down(int index, const Activated& x, int inner, float* y) const {
        const Input plain = x.input();
        if (!call.adapters || !plain.tiles)
            return adapt(index, &AdapterLayer::down, plain.floats, inner, y, hidden);
        static thread_local std::vector<float> row;
        row.resize(inner);
        const LowRanks adapters = low_ranks(index, &AdapterLayer::down);
        const Share share = thread.share(tokens);
        for (int64_t t = share.begin; t < share.end; t++) {
            const LowRank* by = adapters.of(t);
            if (!by) continue;
            x.read(t, row.data());
            multiply_down(*by, row.data(), inner, 1, adapters.low(t), call.low_width);
        }
        adapters.add(share, y, hidden);
        thread.wait();
    }

    // to [R, hidden] = x [T, hidden] of the tokens with logits; `to` may be x.
    void pick_wanted(const float* x, float* to) const {
        for (int64_t r = 0; r < call.num_logits; r++) {
            const int64_t t = call.num_logits < tokens ? call.logit_index[r] : r;
            memmove(to + r * hidden, x + t * hidden, hidden * 4);
        }
    }

    void write_logits() {
        keep_state(model.num_layers, b.x);
        if (model.final_norm) norm_all(model.final_norm, nullptr);
        const float* last = model.final_norm ? b.normed : b.x;
        keep_state(model.num_layers + 1, last);
        const bool picks = call.num_logits < tokens;
        if (thread.index == 0) {
            if (call.last) pick_wanted(b.x, call.last);
            if (call.last_normed) pick_wanted(last, call.last_normed);
            if (picks) pick_wanted(last, b.x);
        }
        if (!call.logits) return;
        if (picks) {
            last = b.x;
            thread.wait();
        }
        const int64_t vocab = model.head->num_outputs;
        const Input states{last, hidden, nullptr};
        product(*model.head, states, call.num_logits, call.logits, vocab, false, thread);
        if (model.logit_cap <= 0) return;
        thread.wait();
        const Share share = thread.share(call.num_logits);
        for (int64_t i = share.begin * vocab; i < share.end * vocab; i++)
            call.logits[i] = model.logit_cap * tanhf(call.logits[i] / model.logit_cap);
    }
};

constexpr int64_t MIN_SHARED_FLOATS = 1 << 16; // of rows whose norms threads share

extern "C" {

// Experts in an open file, and memory for `num_slots` of them; the arrays are read, not kept, but for
// the memory and what `experts` points to. Null: no thread can be started.
void* open_experts(
    int32_t file, const StoredExpert* experts, int32_t num_experts, void* memory, int32_t num_slots,
    int64_t slot_bytes) {
    try {
        return new ExpertStore(file, experts, num_experts, (uint8_t*)memory, num_slots, slot_bytes);
    } catch (const std::system_error&) {
        return nullptr;
    }
}

void close_experts(void* store) { delete (ExpertStore*)store; }

void count_experts(void* store, int64_t* counts) { ((ExpertStore*)store)->count(counts); }

// Layers in an open file, and memory for `num_slots` of them; arguments as of open_experts().
void* open_layers(
    int32_t file, const StoredLayer* layers, int32_t num_layers, void* memory, int32_t num_slots,
    int64_t slot_bytes) {
    try {
        return new LayerWindow(file, layers, num_layers, (uint8_t*)memory, num_slots, slot_bytes);
    } catch (const std::system_error&) {
        return nullptr;
    }
}

void close_layers(void* window) { delete (LayerWindow*)window; }

int32_t broken_layer(void* window) { return ((LayerWindow*)window)->take_broken(); }

void count_layers(void* window, int64_t* counts) { ((LayerWindow*)window)->count(counts); }

// Of the tensors of a layer, one after the other; 0 is that of none.
int64_t checksum(int64_t before, const void* bytes, int64_t size) {
    return int64_t(checksum_of(uint64_t(before), (const uint8_t*)bytes, size));
}

// Whether a file is in the memory of the machine.
int32_t is_in_memory(int32_t file) {
#ifdef __linux__
    struct statfs system;
    if (fstatfs(file, &system)) return 0;
    return system.f_type == 0x01021994 || system.f_type == 0x858458F6; // tmpfs, ramfs
#else
    return 0;
#endif
}

// Floats of scratch memory that a call may use.
int64_t scratch_size(const Model* model, int32_t tokens, int32_t max_length, int32_t threads) {
    return Scratch(*model, tokens, max_length, threads, nullptr).size;
}

// Whether products with bf16 run on AMX, and whether their inputs are rounded to bf16.
int32_t uses_amx() { return amx_allowed(); }

int32_t rounds_inputs() { return TileInput::is_possible(); }

// Float32 [count, in]: the embeddings of tokens, of which none is outside the vocabulary.
void embed(const Linear* w, const int64_t* tokens, int32_t count, float* y) {
    for (int64_t t = 0; t < count; t++) copy_weights(*w, tokens[t], 1, y + t * w->num_inputs);
}

// Bytes of a panel of blocks, and of its scales.
int32_t block_panel_bytes(int32_t type, int32_t num_inputs) {
    return num_inputs / GROUP * group_bytes(type);
}

int32_t block_scale_bytes(int32_t type, int32_t num_inputs) {
    return int32_t(scale_bytes(type, num_inputs / GROUP));
}

// Write the panels of w from the blocks of a file: see pack_panels().
void pack_blocks(
    const Linear* w, const uint8_t* rows, int32_t num_outputs, int32_t halves,
    int32_t num_threads) {
    const int panels = num_panels(num_outputs / halves) * halves;
    Team::run(num_threads, [&](int index, int count, Barrier& barrier) {
        const Share share = Thread{index, count, nullptr, barrier}.share(panels);
        pack_panels(*w, rows, num_outputs, halves, share);
    });
}

// The first of `count` tokens that is outside the vocabulary, or `count`.
int32_t first_unknown(const Model* model, const int64_t* tokens, int32_t count) {
    for (int32_t t = 0; t < count; t++)
        if (tokens[t] < 0 || tokens[t] >= model->num_embeddings) return t;
    return count;
}

// Of a model without recurrent layers. Returns how many tokens are before the first that is outside the
// vocabulary: if there is one, nothing is computed.
int32_t forward(const Model* model, const Call* call) {
    if (model->decoder) return ModuleForward(*model).compute(*call, nullptr);
    const int known = first_unknown(model, call->token_ids, call->num_tokens);
    if (known < call->num_tokens) return known;
    Team::run(call->num_threads, [&](int index, int count, Barrier& barrier) {
        const TilesGuard guard;
        Forward(*model, *call, {index, count, nullptr, barrier}).run();
    });
    return call->num_tokens;
}

// As forward(), of the known tokens; then each level of the drafts.
int32_t draft_chains(const Model* model, const Chains* chains) {
    Network network(*model);
    ChainLevels levels(*model, *chains);
    return draft(network, *chains->known, levels);
}

int32_t draft_trees(const Model* model, const Trees* trees) {
    Network network(*model);
    TreeLevels levels(*model, *trees);
    return draft(network, *trees->known, levels);
}

// The most probable outputs of rows of logits, which are overwritten: [rows, count], falling.
void top_logprobs(
    float* logits, int32_t rows, int32_t vocab, int32_t count, float* logprobs, int64_t* outputs) {
    for (int64_t r = 0; r < rows; r++)
        for (const Candidate& candidate : most_probable(logits + r * vocab, vocab, count))
            *logprobs++ = candidate.logprob, *outputs++ = candidate.index;
}

// Levels of the search, whose beams are written; `model` has the embeddings.
int32_t search_beams(const Model* model, const Beams* search) {
    BeamLevels levels(*model, *search);
    Memory memory(tiles_size(levels.max_rows, levels.widest, search->num_threads));
    for (int32_t level = 0; level < search->length; level++) {
        Team::run(search->num_threads, [&](int index, int count, Barrier& barrier) {
            const TilesGuard guard;
            levels.predict({index, count, (uint16_t*)memory.begin, barrier});
        });
        if (!levels.extend(level)) return level + 1;
    }
    return search->length;
}

// Returns the forwards that were made, or -1 if a token is outside a vocabulary.
int32_t decode_chains(const Model* target, const ChainSteps* steps) {
    return ChainDecoder(*target, *steps).run();
}

// Sample the next token of each row of logits.
void draw_tokens(const Draws* draws) {
    const int64_t vocab = draws->vocab;
    const bool is_small = draws->num_rows * vocab < MIN_SHARED_LOGITS;
    Team::run(is_small ? 1 : draws->num_threads, [&](int index, int count, Barrier&) {
        static thread_local Sampler sampler;
        for (int64_t r = index; r < draws->num_rows; r += count)
            draws->tokens[r] = sampler.draw(
                draws->logits + r * vocab, vocab, draws->samplings[draws->sampling_of[r]],
                {nullptr, 0}, draws->uniforms[r]);
    });
}

// Write the log-probabilities of tokens and of the k most probable ones: [rows, 2 + 2 k].
void score_logprobs(
    const float* logits, const int64_t* tokens, int32_t rows, int32_t vocab, int32_t k,
    double* scores) {
    for (int64_t r = 0; r < rows; r++)
        score_logprob(logits + r * vocab, vocab, tokens[r], k, scores + r * (2 + 2 * k));
}

// Write the fields of TokenConfidence of tokens, over as many of the most probable ones: [rows, 4].
void score_confidences(
    const float* logits, const int64_t* tokens, const int64_t* ks, int32_t rows, int32_t vocab,
    double* scores) {
    for (int64_t r = 0; r < rows; r++)
        score_confidence(logits + r * vocab, vocab, tokens[r], int32_t(ks[r]), scores + 4 * r);
}

// In [0, 1): see uniform.h.
double uniform_sample(int64_t seed, int64_t sample, int64_t position) {
    return uniform_at(seed, sample, position);
}

// y [tokens, size] = norms of x; y may be x.
void norm_rows(
    const float* x, const float* weight, int32_t tokens, int32_t size, float eps, float* y,
    int32_t num_threads) {
    const bool is_small = int64_t(tokens) * size < MIN_SHARED_FLOATS;
    Team::run(is_small ? 1 : num_threads, [&](int index, int count, Barrier& barrier) {
        const Share share = Thread{index, count, nullptr, barrier}.share(tokens);
        for (int64_t t = share.begin; t < share.end; t++)
            norm(x + t * size, weight, size, eps, y + t * size);
    });
}

void linear(const Linear* w, const float* x, int32_t tokens, float* y, int32_t num_threads) {
    Memory memory(tiles_size(tokens, w->num_inputs, num_threads));
    int64_t width = 0;
    for (const Linear* part = w; part; part = part->next) width += part->num_outputs;
    Team::run(num_threads, [&](int index, int count, Barrier& barrier) {
        const TilesGuard guard;
        product(
            *w, {x, w->num_inputs, nullptr}, tokens, y, width, false,
            {index, count, (uint16_t*)memory.begin, barrier});
    });
}

// y [tokens, hidden]; `rows`: [tokens, width], overwritten. Without x it has what the products of x
// are; without y its first `inner` columns are what `down` is to be multiplied by.
void mlp(const Mlp* w, const float* x, int32_t tokens, float* rows, float* y, int32_t num_threads) {
    Memory memory(x || y ? tiles_size(tokens, widest_input(*w), num_threads) : 0);
    Team::run(num_threads, [&](int index, int count, Barrier& barrier) {
        const TilesGuard guard;
        run_mlp(*w, x, tokens, rows, y, {index, count, (uint16_t*)memory.begin, barrier});
    });
}

int64_t experts_scratch_size(const Experts* w, int32_t hidden, int32_t tokens, int32_t threads) {
    return ExpertScratch(*w, hidden, tokens, threads, nullptr).size;
}

void experts(const Experts* w, const ExpertsCall* call) {
    const int64_t hidden = w->down[0].num_outputs;
    Team::run(call->num_threads, [&](int index, int count, Barrier& barrier) {
        const TilesGuard guard;
        run_chosen_experts(*w, *call, hidden, {index, count, nullptr, barrier});
    });
}

void route(const Experts* w, const RouteCall* call) {
    const int64_t hidden = w->router->num_inputs;
    Memory memory(tiles_size(call->num_tokens, hidden, call->num_threads));
    Team::run(call->num_threads, [&](int index, int count, Barrier& barrier) {
        const TilesGuard guard;
        run_router(*w, *call, {index, count, (uint16_t*)memory.begin, barrier});
    });
}

void recurrent(const Recurrent* layer, const RecurrentCall* call) {
    const int64_t mixed = int64_t(layer->num_heads) * layer->value_dim;
    const int64_t widest = larger(layer->hidden, larger(mixed, layer->channels));
    const bool multiplies = call->x || call->y;
    Memory memory(multiplies ? tiles_size(call->num_tokens, widest, call->num_threads) : 0);
    Team::run(call->num_threads, [&](int index, int count, Barrier& barrier) {
        const TilesGuard guard;
        run_recurrent(*layer, *call, {index, count, (uint16_t*)memory.begin, barrier});
    });
}

// Its products, attention and gates; keys and values are stored.
void module_attention(const ModuleAttention* layer, const ModuleAttentionCall* call) {
    Team::run(call->batch->num_threads, [&](int index, int count, Barrier& barrier) {
        const TilesGuard guard;
        run_attention(*layer, *call, {index, count, nullptr, barrier});
    });
}

void sublayers(const SublayersCall* call) {
    const Call& batch = *call->batch;
    const int64_t size = round_up(mixture_size(*call));
    Memory memory(size + tiles_size(batch.num_tokens, widest_input(*call), batch.num_threads));
    uint16_t* tiles = (uint16_t*)(memory.begin + size);
    Team::run(batch.num_threads, [&](int index, int count, Barrier& barrier) {
        const TilesGuard guard;
        Sublayers(*call, memory.begin, {index, count, tiles, barrier}).run();
    });
}

// As forward(), of a module; states: [T], of the tokens.
int32_t module_forward(const Model* model, const Call* call, const TokenState* states) {
    return ModuleForward(*model).compute(*call, states);
}

void mixture(const Mixture* w, const MixtureCall* call) {
    const int tokens = call->num_tokens, num_threads = call->num_threads;
    const int64_t size = round_up(MixtureScratch(*w, tokens, num_threads, nullptr).size);
    Memory memory(size + tiles_size(tokens, widest_input(*w), num_threads));
    uint16_t* tiles = (uint16_t*)(memory.begin + size);
    Team::run(num_threads, [&](int index, int count, Barrier& barrier) {
        const TilesGuard guard;
        run_mixture(*w, *call, memory.begin, {index, count, tiles, barrier});
    });
}

// See run_heads().
void residual_heads(
    const Linear* linears, int32_t num_heads, int32_t num_blocks, const float* states,
    int32_t tokens, float* logits, int32_t num_threads) {
    const int64_t width = linears[0].num_inputs, size = round_up(tokens * width);
    Memory memory(2 * size + tiles_size(tokens, width, num_threads));
    float *x = memory.begin, *y = x + size;
    uint16_t* tiles = (uint16_t*)(y + size);
    Team::run(num_threads, [&](int index, int count, Barrier& barrier) {
        const TilesGuard guard;
        run_heads(
            linears, num_heads, num_blocks, states, tokens, x, y, logits,
            {index, count, tiles, barrier});
    });
}
}
