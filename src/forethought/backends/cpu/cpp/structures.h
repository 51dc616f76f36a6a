// What the caller hands over, as plain structures: structures.py reads their fields here.

#pragma once

#include <cstdint>

constexpr int MAX_HEAD_DIM = 1024; // sizes of buffers on the stack; weights.py refuses more
constexpr int MAX_GROUP = 64;      // query heads that share a key head

// A8: inputs are rounded to 8 bits, see integers.h. From Q8_0 on: blocks of GGUF files, see blocks.h.
enum WeightType { F32, BF16, I8, I4, W8A8, W4A8, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };
constexpr int64_t NO_TOKEN = -1; // where the model's logits are not finite

enum Activation { SILU = 0, GELU_TANH = 1, RELU_SQUARED = 2, GELU = 3 };

enum Scoring { SOFTMAX = 0, SIGMOID = 1 };

enum RecurrentKind { DELTA_RULE = 0, STATE_SPACE = 1, SHORT_CONVOLUTION = 2, SELECTIVE_SCAN = 3 };
enum RecurrentStage { ALL = 0, BEFORE_LATE = 1, AFTER_LATE = 2 };
constexpr int MAX_KERNEL = 16; // inputs of a channel that a causal convolution reads

extern "C" {

// y = x W^T + b
struct Linear {
    const void* weight; // panels; null: there is no such product
    const float* scale; // 8 bits: [out]; 4 bits: [panels, groups, PANEL]; see blocks.h for others
    const float* zero;  // 4 bits: as scale
    const float* bias;  // [out], or null
    int32_t num_inputs, num_outputs, type, group_size;
    int32_t float32_input; // x is multiplied in float32, though BF16 or blocks might round it
    const Linear* next;    // further outputs, whose weights are blocks of another type; or null
};

// An expert in a file; see expert_store.h. Places are bytes from `offset` on, -1 for none.
struct StoredExpert {
    int64_t offset, size;
    Linear *gate_up, *down; // whose addresses are set when it is read
    int64_t gate_up_weight, gate_up_scale, gate_up_zero;
    int64_t down_weight, down_scale, down_zero;
};

// A tensor of a layer in a file, in bytes from the layer's begin.
struct WeightPlace {
    int64_t place, size;
    const void** pointer; // set to its address when the layer is read
};

// A layer in a file; see layer_window.h.
struct StoredLayer {
    int64_t offset, size;       // of the file
    int64_t checksum;           // of its tensors
    const WeightPlace* weights; // [num_weights]
    int32_t num_weights;
    int32_t index; // of the model's layers
};

// A mixture of experts in place of the MLP.
struct Experts {
    const Linear* router;  // outputs: logits of the experts, then those of the shared ones' gates;
                           // null: the caller chooses
    const Linear* gate_up; // [num_experts + num_shared]; of experts without gates, up alone
    const Linear* down;    // [num_experts + num_shared]
    int32_t num_experts, top_k, renormalise;
    int32_t num_shared;        // of all tokens, each times the sigmoid of its gate
    int32_t first_stored;      // of its experts in the store
    void* store;               // ExpertStore; null: all of them are in memory
    const Linear* next_router; // of the next layer with experts in the store, or null
    int32_t next_stored;       // its first expert there
    int32_t has_no_gates;
    // Of a router with sigmoids (DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2):
    const float* bias; // [num_experts]: added to the scores by which experts are chosen; or null
    int32_t scoring;   // enum Scoring
    int32_t num_groups, top_groups; // of experts, of which the best are chosen first; 0: none
    float epsilon, scale;           // added to the sum that renormalises; of the weights then
};

// The choice of experts alone.
struct RouteCall {
    const float* x;  // [T, hidden]
    float* logits;   // [T, num_experts], written
    int32_t* chosen; // [T, top_k], written, the best first
    float* weights;  // [T, top_k], written
    int32_t num_tokens, num_threads;
};

// How a draft module joins the embedding of a token and a hidden state, side by side.
struct Join {
    const float *token_norm, *state_norm; // [hidden], or null: read as it is
    const Linear* project; // of both, to what enters the layer; null: its attention reads both
    int32_t state_first;   // the state comes before the embedding
    int32_t zero_first;    // the embedding of a token at position 0 is 0
    int32_t norm_residual; // without `project`: the normed state is the layer's residual
    int32_t feeds_normed;  // the state that the next token is joined with is behind the final norm
};

// input_norm: null in a draft module whose attention reads what enters
struct Layer {
    const float *input_norm, *q_norm, *k_norm, *attention_norm; // [hidden], [dim], [dim], [hidden]
    const float *mlp_norm, *output_norm; // attention_norm, output_norm: behind the block, or null
    const float* rotary;                 // [positions, 2, rotary_dim]: cosines, signed sines
    Linear qkv, out, gate_up, down;
    const Experts* experts; // null: a dense MLP
    float scale;            // of the scores
    int32_t window;         // > 0: of the last positions; < 0: of a chunk; 0: none
    int32_t is_stored;      // it is in the model's LayerWindow
};

// What an adapter adds to a product: (x A^T) B^T.
struct LowRank {
    Linear down, up; // A and B in float32, B as the product that it adds to; null: nothing is added
};

struct AdapterLayer {
    LowRank qkv, out, gate_up, down;
};

struct ModuleDecoder;

struct Model {
    const Layer* layers;
    const float* final_norm; // or null
    const Linear* head;
    const Linear*
        embedding;     // whose weights of a token are its embedding; plain or blocks; or null:
    const void* table; // [num_embeddings, hidden] of `table_type`, F32 or BF16
    const Join* join;  // null: a model, which reads tokens alone
    const ModuleDecoder* decoder; // in the place of layers; null: they are above
    void* stored;                 // LayerWindow; null: all layers are in memory
    int32_t table_type, num_embeddings;
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, rotary_dim, activation;
    float eps, head_norm_eps, logit_cap, score_cap, embed_scale;
};

// The new tokens of one sequence.
struct Row {
    int64_t first_slot;        // of position 0, where the prefix is contiguous; else -1
    const int32_t* pages;      // of the prefix, where it is not
    const int64_t* slots;      // [num_recent]: of the recent tokens; the last num_tokens are new
    const int64_t* positions;  // [num_recent], read where a layer has a window
    const uint8_t* visible;    // [num_tokens, num_recent]; null: causal
    int64_t start, num_tokens; // in the batch
    int64_t prefix, seen_from; // tokens stored before the recent ones; the first that is attended
    int64_t num_recent;
    const int64_t* segments; // [num_segments, 2]: of the tokens that it sees, from the prefix on:
    int64_t num_segments;    // how many, and by how many positions queries are rotated further
};

struct Call {
    const int64_t* token_ids;   // [T]
    const float* entering;      // [T, hidden]: the states that tokens are joined with
    const int64_t* positions;   // [T]
    const int64_t* slots;       // [T]
    const int64_t* logit_index; // [R]
    const Row* rows;
    void* const* keys;    // per layer, in the form of `kv_type`; see entries.h
    void* const* values;  // per layer
    float* const* states; // [num_layers + 2]: where hidden states are wanted, else null; final last
    float* last;          // [R, hidden]: the last layer's output of the tokens with logits, or null
    float* last_normed;   // the same behind the final norm
    float* logits;        // [R, vocab], or null
    float* scratch;       // scratch_size() floats, aligned to 64 bytes
    const void* const*
        adapters; // [T]: AdapterLayer [num_layers] of each token, or null; null: none
    float* low;   // [T, low_width]: what adapters compute between their products
    int32_t num_tokens, num_logits, num_rows, page_size, max_length, num_threads;
    int32_t kv_type;   // F32, BF16 or I8
    int32_t low_width; // of the greatest rank, whole panels
};

// The most probable tokens, one after the other, behind each row of a call.
struct Chains {
    const Call* known;       // of known tokens: the last one of each row has logits
    const int64_t* slots;    // [num_rows, num_levels]: of the drafted tokens
    const int32_t* num_rows; // [num_levels]: rows whose drafts go so deep, the first ones
    const int64_t* ids;      // the target's id of each output; null: the same
    int64_t* drafted;        // [num_levels, num_rows of the call], written
    int32_t num_levels;
    int32_t num_choices;   // outputs that may be drafted, the first ones
    int32_t last_position; // further ones are computed as this one
};

// A search with ReDrafter's head; see beams.h.
struct Beams {
    const Linear* recur;   // [hidden, 2 * hidden], of embedding and state; null: they are added
    const Linear* enter;   // [exit, 2 * hidden], of context and state; null: exit is 2 * hidden
    const Linear* head;    // [num_blocks + 1]: those of residual blocks, then to the logits
    const int64_t* ids;    // the target's id of each logit; null: the same
    const float* contexts; // [num_roots, hidden]
    const int64_t* roots;
    int64_t* tokens;  // [length, num_roots, width], written: of each level as many as there are
    int64_t* parents; // the same: beams of the level before
    float* scores;    // the same
    int32_t num_blocks, num_roots, width, length, num_threads;
    float min_logprob; // where all beams of a level are less probable, it is the last
};

// What the distribution of a token depends on beside the logits; see sampling.h.
struct Sampling {
    const int64_t* bias_ids;  // [num_bias]
    const float* bias;        // [num_bias]
    const int64_t* past;      // [num_past]: of prompt and output; read where there is a penalty
    const int64_t* dry_ids;   // [num_dry]: tokens that DRY penalises
    const float* dry;         // [num_dry]: by how much
    const int64_t* held_ends; // [num_held_ends]: ids that end a generation, and may not follow yet
    const uint8_t* mask;      // [ceil(vocab / 8)]: bits of what a constraint allows; null: all
    double top_p;             // 1: all
    float temperature, min_p, repetition, presence, frequency;
    float top_n_sigma;                    // 0: all
    float xtc_probability, xtc_threshold; // XTC's; 0: off
    int32_t top_k;                        // 0: all
    int32_t num_bias, num_past, num_prompt, num_dry, num_held_ends;
    int32_t num_before_end; // tokens that come before any of held_ends
    int32_t num_logprobs;   // most probable tokens that are scored beside the sampled one; -1: none
    int32_t confidence_k;   // as of TokenConfidence; 0: it is not wanted
};

// Rows of logits to sample from.
struct Draws {
    const float* logits;        // [num_rows, vocab]
    const Sampling* samplings;  // of which several rows may share one
    const int32_t* sampling_of; // [num_rows]
    const double* uniforms;     // [num_rows]
    int64_t* tokens;            // [num_rows], written
    int32_t num_rows, vocab, num_threads;
};

// A sequence that is decoded, with drafts or without.
struct ChainRow {
    const int32_t* pages;        // of all its slots; read where these are not contiguous
    const int64_t* ends;         // [num_ends]: ids after which it ends
    const int64_t* pauses;       // [num_pauses]: ids after which it waits, rising
    const int64_t* known;        // [num_known]: the last known tokens, which are not stored yet
    int64_t first_slot;          // of position 0, where they are; else -1
    int64_t num_known, position; // position: of the last known one
    int64_t draft_len, num_left; // to draft in a step, and to decode, at most
    int64_t num_ends, num_pauses;
    const Sampling* sampling; // null: each token is the most probable one
    int64_t seed, sample;     // of its uniform samples
    const void* adapter;      // as of Call
    float* const* after;      // where the states of recurrent layers go after the last known token
                              // and all that may be stored after it; of a target with ModuleDecoder
};

// Hidden states of the target, as a draft module reads them.
struct TargetStates {
    void* stored;          // [slots, num_layers, hidden], of `type`, F32 or BF16
    const int32_t* layers; // [num_layers]: which of Call::states they are
    const float* norm;     // [num_layers * hidden]: in front of `entry`; null: there is none
    const Linear* entry;   // to the width of the module; null: they are read as they are
    int32_t num_layers, type;
    float eps;
};

struct TokenState;

// Decode steps; see chain_steps.h.
struct ChainSteps {
    const Model* draft;   // null: no row has drafts
    const Call* known;    // of the draft network: known tokens of the rows with drafts
    const Call* target;   // of the last known token of each row, with room for `width` of them
                          // and for all known ones
    const ChainRow* rows; // [num_rows]: none drafts more than the one before it
    const TargetStates* states;     // null: the draft network reads none
    const TokenState* known_states; // of the first step's tokens; of a target with ModuleDecoder
    const int64_t* ids;             // as of Chains
    int64_t* tokens;       // [num_steps, num_rows, 2, width], written: drafted, and decoded ones
    int32_t* counts;       // [num_steps, num_rows, 2], zeros, written: how many of either
    double* scores;        // [num_steps, num_rows, width, scores_width], written: as rows ask for
    double* draft_seconds; // [1], written
    const int32_t* interrupt; // when it is not 0 any more, the call ends; null: it never does
    int32_t num_rows, num_steps;
    int32_t width;                      // one more than are drafted in a step
    int32_t num_choices, last_position; // as of Chains
    int32_t num_known;                  // the draft network reads further tokens as token 0
    int32_t seen_from;                  // as of Row, in the draft network
    int32_t scores_width;
    int32_t max_waiting;     // rows that wait when the call ends
    int32_t ended_rows_wait; // not only those that have decoded one of `pauses`
    int32_t stores_drafted;  // its entries of drafted tokens are those of known ones
};

// A recurrent layer: products, a causal convolution per channel, a recurrence per head, a norm and
// gates; see recurrent.h. The projections of a token are the outputs of `enter`, beside each other.
struct Recurrent {
    const Linear* enter;    // [num_enter]; null where the caller multiplies
    const Linear* out;      // the same
    const int32_t* sources; // [num_enter]: the first projection that a product reads; -1: x
    const float* scale;     // [width], of the projections; null: 1
    const float* taps;      // [kernel, channels]
    const float* bias;      // [channels], of the convolution, or null
    const int32_t* at;      // [channels]: the projection that a channel reads
    const int32_t* gates;   // [num_heads]: where the gates of a head's outputs begin
    const int32_t* steps;   // [num_heads]: where the step widths of a head begin
    const int32_t* betas;   // [num_heads]: how much of a value is learned; DELTA_RULE
    const float* decays;    // logarithms of what is left of a state after a unit step: [num_heads];
                            // of a SELECTIVE_SCAN [value_dim, key_dim]
    const float* biases;    // [num_heads, num_steps], of the step widths
    const float* skips;     // of the inputs: [num_heads], STATE_SPACE; [value_dim], SELECTIVE_SCAN
    const float* norm;      // [num_heads * value_dim], in groups of `norm_size`; or null
    // Of a SELECTIVE_SCAN, of what the last product gives, inputs of step widths, keys and queries:
    const float* late_norm;    // [step_inputs + 2 * key_dim], three norms
    const float* step_product; // [step_inputs, value_dim]: from the first of them to step widths
    int64_t offset;            // of this layer in a state, floats
    int32_t kind, num_enter, width, kernel, channels, hidden;
    int32_t num_late; // of the products, the last ones, which read what the convolution writes
    int32_t num_heads, num_groups; // of which each has the keys of num_heads / num_groups heads
    int32_t num_steps; // step widths of a head: 1; one for each of its keys (DELTA_RULE) or values
    int32_t key_dim, value_dim, norm_size, step_inputs;
    int32_t norm_first;   // before the gates
    int32_t has_sigmoids; // the gates are sigmoids; else SiLU
    float norm_eps, min_step, max_step, beta_factor;
};

// Where the state before a token is, and where the one after it goes: those of all layers, [floats].
struct TokenState {
    const float* before; // null: zeros
    float* after;        // or null
    int64_t follows; // the state before it is that after the previous token; `before` is not read
};

struct RecurrentCall {
    const float* x;   // [T, hidden]; null: `projected` is given
    float* projected; // [T, width], overwritten
    float* mixed;     // [T, num_heads * value_dim], or [T, channels], written
    float* y;         // [T, hidden], written; null: `mixed` is the result
    const TokenState* tokens;
    const int32_t* rows; // [num_rows + 1]: where sequences begin, which share no state
    int32_t num_tokens, num_rows, num_threads;
    int32_t stage; // where the caller multiplies: up to the late products, or from there on
};

// One of the products that enter a layer; see projections.h.
struct Projection {
    Linear weight;
    const float* norm; // [norm_size], of its first outputs, which are normed; or null
    int32_t source;    // the first projection that it reads; -1: the layer's inputs
    int32_t begin;     // of its outputs among the projections
    int32_t adds;      // to what is there
    int32_t norm_size;
    float eps;
};

// The attention of a module that torch runs otherwise; see attention_layer.h.
struct ModuleAttention {
    const Model* model; // of one layer: heads, norms, window, scale; `hidden`: its widest input
    const Projection* enter; // [num_enter]; null where the caller multiplies
    const Linear* out;       // the same
    const int32_t* at;       // [heads, of keys and values too]: where each begins
    const int32_t* tails; // the same, of dimensions from `split` on; null: they follow the others
    const int32_t* gates; // [num_heads]: where the gates of a head's outputs begin; null: none
    int32_t num_enter, width, num_inputs, num_outputs;
    int32_t index; // of its keys and values in a call
    int32_t split;
    int32_t value_dim; // of values, which zeros follow up to the width of keys
    float key_scale;
};

struct ModuleAttentionCall {
    const float* x;      // [T, num_inputs]; null: `projected` is given
    float* projected;    // [T, width]
    float* mixed;        // [T, hidden], written: outputs of heads, `value_dim` of each
    float* y;            // [T, num_outputs], written; null: `mixed` is the result
    const float* rotary; // [T, 2, rotary_dim], as of Layer; null: nothing is rotated
    const Call* batch;   // whose positions are rows of `rotary`
};

// y = down(act(gate(x)) * up(x)), or down(act(up(x))), where gate and up are the first projections.
struct Mlp {
    const Projection* enter; // [num_enter]; null where the caller multiplies
    Linear down;             // the same
    int32_t num_enter, activation, hidden, inner;
    int32_t width; // of a row of projections
    int32_t has_gate;
    float gate_scale; // of the outputs of `gate`
};

// Experts that a router chooses, and an MLP that all tokens pass, times the sigmoid of its gate.
struct Mixture {
    const Experts* experts;
    const Mlp* shared;         // or null
    const Linear* shared_gate; // one output; null: 1 takes the place of the sigmoid
    int32_t activation, hidden;
};

struct MixtureCall {
    const float* x;      // [T, hidden]
    float* y;            // [T, hidden], written
    const float* shared; // [T, hidden]: outputs of the shared MLP; null: they are computed
    const float* gates;  // [T]: outputs of its gate, where `shared` is given and there is one
    int32_t num_tokens, num_threads;
};

// What a sublayer reads: the hidden states x, the side states, the sum of both, or x and after it
// the embeddings of the tokens. Side states are those that sublayers hand to others without x.
enum SublayerInput { HIDDEN = 0, SIDE = 1, HIDDEN_AND_SIDE = 2, HIDDEN_AND_EMBEDDINGS = 3 };

// What a decoder adds to its hidden states: x += output_norm(scale * f(norm(input))), where f is one
// of these, or scale * recurrent(y) + attention_scale * attention(attention_input * y), where
// y = norm(input). Or side states, which that is then.
struct Sublayer {
    const float* norm;        // of the input, [hidden] or twice that; null: there is none
    const float* output_norm; // [hidden]; null: there is none
    const ModuleAttention* attention;
    const Recurrent* recurrent;
    const Mlp* mlp;
    const Mixture* mixture;
    const Linear* linear;
    float eps, output_eps, scale;
    float attention_input, attention_scale; // beside a recurrent layer
    int32_t input;                          // enum SublayerInput
    int32_t to_side;
    int32_t begins; // the decoder layer that begins with it; -1: none does
};

// Consecutive sublayers over a batch; see sublayers.h.
struct SublayersCall {
    const Sublayer* sublayers;
    float* x;                 // [T, hidden], overwritten
    float* normed;            // [T, hidden], or twice that where a sublayer reads embeddings
    float* y;                 // [T, hidden]
    float* side;              // [T, hidden], where there are side states
    float* embeddings;        // [T, hidden], where they are read
    float* projected;         // [T, widest]: of any of them, see its structure
    float* mixed;             // the same
    const float* rotary;      // as of ModuleAttentionCall
    float* const* states;     // as of Call, of what enters layers; null: they are not wanted
    const Call* batch;        // as of ModuleAttentionCall; also where there is no attention
    const TokenState* tokens; // as of RecurrentCall
    const int32_t* rows;      // the same
    int32_t num_sublayers, hidden;
};

// What a module computes in the place of layers, and around it; see module_forward.h.
struct ModuleDecoder {
    const Sublayer* sublayers;
    const float* rotary; // [positions, 2, rotary_dim], as of Layer; null: nothing is rotated
    int32_t num_sublayers;
    int32_t width; // of a row of `projected` and `mixed`, as of SublayersCall
    int32_t type;  // of embeddings, of what the sublayers and the norm give, and of logits: F32 or
                   // BF16, to which they are rounded
    float embedding_factor;              // of embeddings
    float logits_factor, logits_divisor; // of logits
};

// Experts of tokens whose choice is the caller's.
struct ExpertsCall {
    const float* x;        // [T, hidden]
    const int32_t* chosen; // [T, top_k]
    const float* weights;  // [T, top_k]
    float* y;              // [T, hidden], zeros, to which outputs are added in the order of choice
    float* scratch;        // experts_scratch_size() floats
    int32_t num_tokens, activation, num_threads;
};

// Dynamic trees, one behind each row of a call.
struct Trees {
    const Call* known;    // as of Chains, with room for the logits of `width` tokens of each row
    const int64_t* slots; // [num_rows, depth, width]: of the nodes that are read
    const int64_t* ids;   // as of Chains
    int64_t* kept;        // [num_rows, total, 3], written: number, token and parent, best first
    int32_t depth, width;
    int32_t total; // nodes that are kept, not more than there are
    int32_t last_position;
};
}
