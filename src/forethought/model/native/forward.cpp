// One forward of a Llama-like decoder on a CPU: a batch of packed tokens in, logits out.
//
// All layers run in one parallel region of OpenMP; between phases that read each other's results
// the threads meet at a barrier. Activations are float32. Weights are float32, bf16, or integers in
// 8 and 4 bits that are dequantised in registers; keys and values are float32 or bf16.
//
// The sum of every output runs over its inputs in order, whatever the number of tokens, and a
// query's attention over the tokens that it sees in order of position, whatever the layout of the
// cache. So a token's result does not depend on the batch, to the last bit, up to BLOCK_QUERIES new
// tokens of a row; longer runs (prefills) sum the scores of a query in another order.
//
// Weights W [out, in] are packed in panels of PANEL outputs: [out / PANEL, in, PANEL].

#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <type_traits>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef LANES  // of a vector of float32
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * 2)));
typedef int8_t ByteVec __attribute__((vector_size(LANES)));

constexpr int PANEL = 16;                // outputs of a panel
constexpr int VECS = PANEL / LANES;      // vectors of a panel
constexpr int SUMS = LANES == 16 ? 24 : 12; // vectors of sums that registers hold
constexpr int MAX_ROWS = 6;              // tokens that one pass over a panel multiplies
constexpr int BLOCK_QUERIES = 32;        // new tokens of a row from which queries go in blocks

enum WeightType { F32 = 0, BF16 = 1, I8 = 2, I4 = 3 };
enum Activation { SILU = 0, GELU_TANH = 1 };

extern "C" {

struct Linear {         // y = x W^T + b
    const void* weight; // panels; null: there is no such product
    const float* scale; // I8: [out]; I4: [panels, groups, PANEL]
    const float* zero;  // I4: as scale
    const float* bias;  // [out], or null
    int32_t num_inputs, num_outputs, type, group_size;
};

struct Experts { // a mixture of experts in place of the MLP
    const Linear* router;
    const Linear* gate_up; // [num_experts]
    const Linear* down;    // [num_experts]
    int32_t num_experts, top_k, renormalise, reserved;
};

struct Layer {
    const float *input_norm, *q_norm, *k_norm, *attention_norm; // [hidden], [dim], [dim], [hidden]
    const float *mlp_norm, *output_norm; // attention_norm, output_norm: behind the block, or null
    const float* rotary;                 // [positions, 2, rotary_dim]: cosines, signed sines
    Linear qkv, out, gate_up, down;
    const Experts* experts; // null: a dense MLP
    float scale;            // of the scores
    int32_t window;         // 0: none
};

struct Model {
    const Layer* layers;
    const float* final_norm;
    const Linear* head;
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, rotary_dim;
    int32_t activation, kv_type;
    float eps, head_norm_eps, logit_cap, score_cap;
};

struct Row { // the new tokens of one sequence
    int64_t first_slot;        // of position 0, where the prefix is contiguous; else -1
    const int32_t* pages;      // of the prefix, where it is not
    const int64_t* slots;      // [num_recent]: of the recent tokens; the last num_tokens are new
    const int64_t* positions;  // [num_recent], read where a layer has a window
    const uint8_t* visible;    // [num_tokens, num_recent]; null: causal
    int32_t start, num_tokens; // in the batch
    int32_t prefix, seen_from; // tokens stored before the recent ones; the first that is attended
    int32_t num_recent, reserved;
};

struct Call {
    const float* embedded;      // [T, hidden]
    const int64_t* positions;   // [T]
    const int64_t* slots;       // [T]
    const int64_t* logit_index; // [R]
    const Row* rows;
    void* const* keys;   // per layer
    void* const* values; // per layer
    float* const* states; // [num_layers + 2]: where hidden states are wanted, else null; final last
    float* logits;        // [R, vocab]
    float* scratch;       // scratch_size() floats
    int32_t num_tokens, num_logits, num_rows, page_size, max_length, num_threads;
};
}

// ---------------------------------------------------------------------------------- vectors

static inline Vec load(const float* p) {
    Vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

static inline Vec broadcast(float x) { return x - Vec{}; }

static inline IntVec widen(HalfVec x) {
#if LANES == 8 && defined(__AVX2__) // compilers take many instructions for what is one
    return (IntVec)_mm256_cvtepu16_epi32((__m128i)x);
#elif LANES == 16 && defined(__AVX512F__)
    return (IntVec)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, IntVec);
#endif
}

static inline IntVec widen(const int8_t* p) {
#if LANES == 8 && defined(__AVX2__)
    return (IntVec)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif LANES == 16 && defined(__AVX512F__)
    return (IntVec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    ByteVec bytes;
    memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, IntVec);
#endif
}

static inline Vec load(const uint16_t* p) { // bf16
    HalfVec half;
    memcpy(&half, p, sizeof half);
    IntVec bits = widen(half) << 16;
    Vec v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static inline Vec load(const int8_t* p) { return __builtin_convertvector(widen(p), Vec); }

static inline float scalar(const float* p) { return *p; }

static inline float scalar(const uint16_t* p) {
    uint32_t bits = uint32_t(*p) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline void put(float* p, float x) { *p = x; }

static inline void put(uint16_t* p, float x) { // bf16, to the nearest even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) { // not a number
        *p = uint16_t((bits >> 16) | 0x40);
        return;
    }
    *p = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float sum(Vec v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

static inline Vec exp(Vec x) { // Cephes' expf: within 2 ulp
    const Vec low = broadcast(-87.336544f), high = broadcast(88.3762626647950f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    Vec scaled = x * 1.44269504088896341f + 0.5f;
    IntVec whole = __builtin_convertvector(scaled, IntVec);
    Vec back = __builtin_convertvector(whole, Vec);
    whole += back > scaled; // a comparison that holds is -1: round down
    back = __builtin_convertvector(whole, Vec);
    x = x - back * 0.693359375f + back * 2.12194440e-4f;
    Vec y = broadcast(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * (x * x) + x + 1.0f;
    IntVec bits = (whole + 127) << 23;
    Vec power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

static inline Vec activate(Vec x, int activation) {
    if (activation == SILU) return x / (1.0f + exp(-x));
    Vec inner = 0.7978845608028654f * (x + 0.044715f * x * x * x); // GELU by tanh
    return x / (1.0f + exp(-2.0f * inner)); // 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u))
}

static inline void activate(float* gate, const float* up, int size, int activation) {
    float padded[2][LANES];
    for (int i = 0; i < size; i += LANES) {
        const int left = size - i < LANES ? size - i : LANES;
        if (left == LANES) {
            store(gate + i, activate(load(gate + i), activation) * load(up + i));
            continue;
        }
        memset(padded, 0, sizeof padded);
        memcpy(padded[0], gate + i, left * 4);
        memcpy(padded[1], up + i, left * 4);
        store(padded[0], activate(load(padded[0]), activation) * load(padded[1]));
        memcpy(gate + i, padded[0], left * 4);
    }
}

// ---------------------------------------------------------------------------------- products

// tile [ROWS, NP * PANEL] += x[ROWS, begin..end) times the same inputs of NP panels of w. Panels are
// `panel_stride` elements apart, inputs `stride`.
template <class T, int ROWS, int NP>
static inline void multiply(
    const T* w, int64_t panel_stride, int64_t stride, const float* x, int64_t ldx, int count,
    float* tile) {
    constexpr int N = NP * VECS;
    Vec acc[ROWS][N];
    for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < N; j++) acc[m][j] = load(tile + (m * N + j) * LANES);
    for (int k = 0; k < count; k++) {
        Vec weight[N];
        for (int p = 0; p < NP; p++)
            for (int v = 0; v < VECS; v++)
                weight[p * VECS + v] = load(w + p * panel_stride + k * stride + v * LANES);
        for (int m = 0; m < ROWS; m++) {
            const Vec value = broadcast(x[m * ldx + k]);
            for (int j = 0; j < N; j++) acc[m][j] += value * weight[j];
        }
    }
    for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < N; j++) store(tile + (m * N + j) * LANES, acc[m][j]);
}

// The same for one panel in 4 bits: bytes [in / 2, PANEL], the even input in the low half.
template <int ROWS>
static inline void multiply4(
    const uint8_t* w, const float* scale, const float* zero, int group, const float* x, int64_t ldx,
    int begin, int end, float* tile) {
    Vec acc[ROWS][VECS];
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECS; v++) acc[m][v] = load(tile + (m * VECS + v) * LANES);
    for (int k = begin; k < end; k += 2) {
        const int at = k / group * PANEL;
        for (int v = 0; v < VECS; v++) {
            const IntVec both = widen((const int8_t*)w + k / 2 * PANEL + v * LANES);
            const Vec s = load(scale + at + v * LANES), z = load(zero + at + v * LANES);
            const Vec even = (__builtin_convertvector(both & 15, Vec) - z) * s;
            const Vec odd = (__builtin_convertvector(both >> 4 & 15, Vec) - z) * s;
            for (int m = 0; m < ROWS; m++) {
                acc[m][v] += broadcast(x[m * ldx + k]) * even;
                acc[m][v] += broadcast(x[m * ldx + k + 1]) * odd;
            }
        }
    }
    for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < VECS; v++) store(tile + (m * VECS + v) * LANES, acc[m][v]);
}

template <int ROWS, int NP>
static void multiply_panels(
    const Linear& w, int panel, const float* x, int64_t ldx, int begin, int end, float* tile) {
    const int64_t size = int64_t(w.num_inputs) * PANEL, at = panel * size + int64_t(begin) * PANEL;
    x += begin;
    if (w.type == F32)
        multiply<float, ROWS, NP>(
            (const float*)w.weight + at, size, PANEL, x, ldx, end - begin, tile);
    else if (w.type == BF16)
        multiply<uint16_t, ROWS, NP>(
            (const uint16_t*)w.weight + at, size, PANEL, x, ldx, end - begin, tile);
    else
        multiply<int8_t, ROWS, NP>(
            (const int8_t*)w.weight + at, size, PANEL, x, ldx, end - begin, tile);
}

template <int ROWS>
static void multiply_rows(
    const Linear& w, int panel, int count, const float* x, int64_t ldx, int begin, int end,
    float* tile) {
    if (w.type == I4) {
        const int64_t size = int64_t(w.num_inputs) * PANEL / 2;
        const int64_t groups = int64_t(w.num_inputs) / w.group_size * PANEL;
        multiply4<ROWS>(
            (const uint8_t*)w.weight + panel * size, w.scale + panel * groups,
            w.zero + panel * groups, w.group_size, x, ldx, begin, end, tile);
    } else if (count == 4) {
        if constexpr (ROWS * 4 * VECS <= SUMS)
            multiply_panels<ROWS, 4>(w, panel, x, ldx, begin, end, tile);
    } else if (count == 2) {
        if constexpr (ROWS * 2 * VECS <= SUMS)
            multiply_panels<ROWS, 2>(w, panel, x, ldx, begin, end, tile);
    } else {
        multiply_panels<ROWS, 1>(w, panel, x, ldx, begin, end, tile);
    }
}

static void multiply_tile(
    const Linear& w, int panel, int count, const float* x, int64_t ldx, int rows, int begin,
    int end, float* tile) {
    switch (rows) {
        case 1: return multiply_rows<1>(w, panel, count, x, ldx, begin, end, tile);
        case 2: return multiply_rows<2>(w, panel, count, x, ldx, begin, end, tile);
        case 3: return multiply_rows<3>(w, panel, count, x, ldx, begin, end, tile);
        case 4: return multiply_rows<4>(w, panel, count, x, ldx, begin, end, tile);
        case 5: return multiply_rows<5>(w, panel, count, x, ldx, begin, end, tile);
        default: return multiply_rows<6>(w, panel, count, x, ldx, begin, end, tile);
    }
}

// How many panels go together: as many as have registers for their sums.
static inline int panels_at_once(const Linear& w, int tokens, int left) {
    const int rows = tokens < MAX_ROWS ? tokens : MAX_ROWS;
    if (w.type == I4 && tokens <= MAX_ROWS) return 1;
    if (left >= 4 && rows * 4 * VECS <= SUMS) return 4;
    return left >= 2 && rows * 2 * VECS <= SUMS ? 2 : 1;
}

// The panels of w as float32, for products of so many tokens that converting once pays. The values
// are those that multiply_tile computes with, so the sums are the same.
class Unpacked {
  public:
    Unpacked(const Linear& w, int tokens)
        : source(w), needed(w.type != F32 && tokens > MAX_ROWS) {}

    // Multiply as multiply_tile does.
    void multiply(
        int panel, int count, const float* x, int64_t ldx, int rows, float* tile) {
        const int size = source.num_inputs;
        if (!needed) return multiply_tile(source, panel, count, x, ldx, rows, 0, size, tile);
        if (panel != first || count != held) unpack(panel, count);
        Linear plain = source;
        plain.weight = buffer();
        plain.type = F32;
        multiply_tile(plain, 0, count, x, ldx, rows, 0, size, tile);
    }

    // The same for panel `side` of a pair, which are unpacked together.
    void multiply_one(int pair, int side, const float* x, int64_t ldx, int rows, float* tile) {
        const int size = source.num_inputs;
        if (!needed) return multiply_tile(source, pair + side, 1, x, ldx, rows, 0, size, tile);
        if (pair != first || held != 2) unpack(pair, 2);
        Linear plain = source;
        plain.weight = buffer();
        plain.type = F32;
        multiply_tile(plain, side, 1, x, ldx, rows, 0, size, tile);
    }

  private:
    const Linear& source;
    const bool needed;
    int first = -1, held = 0;

    float* buffer() const { // of this thread, kept between calls
        static thread_local std::vector<float> kept;
        const size_t size = size_t(4) * source.num_inputs * PANEL;
        if (kept.size() < size) kept.resize(size);
        return kept.data();
    }

    void unpack(int panel, int count) {
        const int64_t size = int64_t(source.num_inputs) * PANEL;
        float* to = buffer();
        first = panel, held = count;
        for (int p = 0; p < count; p++, to += size) {
            const int64_t at = (panel + p) * size;
            if (source.type == BF16)
                widen_all((const uint16_t*)source.weight + at, size, to);
            else if (source.type == I8)
                widen_all((const int8_t*)source.weight + at, size, to);
            else
                unpack4(panel + p, to);
        }
    }

    template <class T> static void widen_all(const T* from, int64_t size, float* to) {
        for (int64_t i = 0; i < size; i += LANES) store(to + i, load(from + i));
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

struct Share { // of items for one thread
    int begin, end;
    Share(int count, int thread, int threads) {
        begin = int(int64_t(count) * thread / threads);
        end = int(int64_t(count) * (thread + 1) / threads);
    }
};

static inline int panels(const Linear& w) { return (w.num_outputs + PANEL - 1) / PANEL; }

static inline void scale_outputs(
    const Linear& w, int first, float* tile, int rows, int width) {
    for (int m = 0; m < rows; m++)
        for (int i = 0; i < width && first + i < w.num_outputs; i++) {
            float& y = tile[m * width + i];
            if (w.type == I8) y *= w.scale[first + i];
            if (w.bias) y += w.bias[first + i];
        }
}

// y [T, ldy] = x W^T + b (+ y if `add`), the share of one thread.
static void product(
    const Linear& w, const float* x, int64_t ldx, int tokens, float* y, int64_t ldy, bool add,
    Share share) {
    alignas(64) float tile[MAX_ROWS * 4 * PANEL];
    Unpacked weights(w, tokens);
    for (int panel = share.begin, count; panel < share.end; panel += count) {
        count = panels_at_once(w, tokens, share.end - panel);
        const int width = count * PANEL, first = panel * PANEL;
        const int valid = w.num_outputs - first < width ? w.num_outputs - first : width;
        for (int t = 0; t < tokens; t += MAX_ROWS) {
            const int rows = tokens - t < MAX_ROWS ? tokens - t : MAX_ROWS;
            memset(tile, 0, rows * width * 4);
            weights.multiply(panel, count, x + t * ldx, ldx, rows, tile);
            if (w.type == I8 || w.bias) scale_outputs(w, first, tile, rows, width);
            for (int m = 0; m < rows; m++) {
                float* out = y + (t + m) * ldy + first;
                const float* in = tile + m * width;
                if (add)
                    for (int i = 0; i < valid; i++) out[i] += in[i];
                else
                    memcpy(out, in, valid * 4);
            }
        }
    }
}

// y [T, half] = act(x G^T) * (x U^T): the panels of w are those of G and U in turns.
static void gated_product(
    const Linear& w, const float* x, int64_t ldx, int tokens, float* y, int64_t ldy, int half,
    int activation, Share share) {
    alignas(64) float tile[2][MAX_ROWS * PANEL];
    alignas(64) float both[MAX_ROWS * 2 * PANEL];
    const bool together = panels_at_once(w, tokens, 2) >= 2;
    Unpacked weights(w, tokens);
    for (int pair = share.begin; pair < share.end; pair++) {
        const int first = pair * PANEL;
        const int valid = half - first < PANEL ? half - first : PANEL;
        for (int t = 0; t < tokens; t += MAX_ROWS) {
            const int rows = tokens - t < MAX_ROWS ? tokens - t : MAX_ROWS;
            const float* from = x + t * ldx;
            if (together) {
                memset(both, 0, rows * 2 * PANEL * 4);
                weights.multiply(2 * pair, 2, from, ldx, rows, both);
                for (int m = 0; m < rows; m++)
                    for (int side = 0; side < 2; side++)
                        memcpy(tile[side] + m * PANEL, both + (2 * m + side) * PANEL, PANEL * 4);
            } else {
                for (int side = 0; side < 2; side++) {
                    memset(tile[side], 0, rows * PANEL * 4);
                    weights.multiply_one(2 * pair, side, from, ldx, rows, tile[side]);
                }
            }
            for (int side = 0; side < 2; side++)
                if (w.type == I8 || w.bias)
                    scale_outputs(w, (2 * pair + side) * PANEL, tile[side], rows, PANEL);
            for (int m = 0; m < rows; m++) {
                activate(tile[0] + m * PANEL, tile[1] + m * PANEL, PANEL, activation);
                memcpy(y + (t + m) * ldy + first, tile[0] + m * PANEL, valid * 4);
            }
        }
    }
}

// ---------------------------------------------------------------------------------- norms

static void norm(const float* x, const float* weight, int size, float eps, float* y) {
    Vec squares = {};
    int i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    const float factor = 1.0f / sqrtf(total / size + eps);
    for (i = 0; i + LANES <= size; i += LANES) store(y + i, load(x + i) * factor * load(weight + i));
    for (; i < size; i++) y[i] = x[i] * factor * weight[i];
}

// ---------------------------------------------------------------------------------- attention

template <class T> static inline float dot(const float* a, const T* b, int size) {
    Vec total = {};
    int i = 0;
    for (; i + LANES <= size; i += LANES) total += load(a + i) * load(b + i);
    float result = sum(total);
    for (; i < size; i++) result += a[i] * scalar(b + i);
    return result;
}

template <class T> static inline void add_scaled(float* y, const T* x, float factor, int size) {
    int i = 0;
    for (; i + LANES <= size; i += LANES) store(y + i, load(y + i) + load(x + i) * factor);
    for (; i < size; i++) y[i] += scalar(x + i) * factor;
}

// scores [length] -> their softmax, not divided by the sum, which is returned.
static float exponentials(float* scores, int length) {
    float highest = -INFINITY;
    for (int i = 0; i < length; i++) highest = scores[i] > highest ? scores[i] : highest;
    Vec total = {};
    int i = 0;
    for (; i + LANES <= length; i += LANES) {
        const Vec e = exp(load(scores + i) - highest);
        store(scores + i, e);
        total += e;
    }
    float rest = 0;
    for (; i < length; i++) {
        const Vec e = exp(broadcast(scores[i] - highest));
        scores[i] = e[0];
        rest += e[0];
    }
    return sum(total) + rest;
}

static inline int64_t prefix_slot(const Row& row, int position, int page_size) {
    if (row.first_slot >= 0) return row.first_slot + position;
    return int64_t(row.pages[position / page_size]) * page_size + position % page_size;
}

// The tokens of the row that token `n` attends to: prefix [low, prefix), then recent ones.
struct Sight {
    const Row& row;
    int n, window;
    int64_t position;
    int low;

    Sight(const Row& row, int n, int window) : row(row), n(n), window(window) {
        position = row.positions[row.num_recent - row.num_tokens + n];
        low = row.seen_from;
        if (window && position - window + 1 > low) low = int(position - window + 1);
    }

    bool sees(int recent) const {
        if (window && position - row.positions[recent] >= window) return false;
        if (row.visible) return row.visible[int64_t(n) * row.num_recent + recent];
        return recent <= row.num_recent - row.num_tokens + n;
    }
};

// One token, one key head and the query heads that share it: exact over any set of tokens.
template <class T>
static void attend_token(
    const Model& model, const Layer& layer, const Call& call, const Row& row, int n, int kv_head,
    const float* q, const T* keys, const T* values, float* scores, float* out) {
    const int dim = model.head_dim, group = model.num_heads / model.num_kv_heads;
    const int64_t stride = int64_t(model.num_kv_heads) * dim;
    const Sight sight(row, n, layer.window);
    const int capacity = call.max_length;
    keys += kv_head * dim;
    values += kv_head * dim;
    int length = 0;
    const auto score = [&](int64_t slot) {
        for (int g = 0; g < group; g++) {
            float x = dot(q + g * dim, keys + slot * stride, dim) * layer.scale;
            if (model.score_cap > 0) x = model.score_cap * tanhf(x / model.score_cap);
            scores[g * capacity + length] = x;
        }
        length++;
    };
    for (int p = sight.low; p < row.prefix; p++) score(prefix_slot(row, p, call.page_size));
    for (int r = 0; r < row.num_recent; r++)
        if (sight.sees(r)) score(row.slots[r]);
    float totals[64];
    for (int g = 0; g < group; g++) totals[g] = exponentials(scores + g * capacity, length);
    memset(out, 0, group * dim * 4);
    length = 0;
    const auto mix = [&](int64_t slot) {
        for (int g = 0; g < group; g++)
            add_scaled(out + g * dim, values + slot * stride, scores[g * capacity + length], dim);
        length++;
    };
    for (int p = sight.low; p < row.prefix; p++) mix(prefix_slot(row, p, call.page_size));
    for (int r = 0; r < row.num_recent; r++)
        if (sight.sees(r)) mix(row.slots[r]);
    for (int g = 0; g < group; g++)
        for (int d = 0; d < dim; d++) out[g * dim + d] /= totals[g];
}

// Up to MAX_ROWS queries of one head, of consecutive tokens of a causal row: keys and values of a
// page at a time, as products of matrices.
template <class T, int ROWS>
static void attend_block(
    const Model& model, const Layer& layer, const Call& call, const Row& row, int n, int kv_head,
    const float* q, int64_t ldq, const T* keys, const T* values, float* scratch, float* out) {
    const int dim = model.head_dim, capacity = call.max_length;
    const int64_t stride = int64_t(model.num_kv_heads) * dim;
    const Sight first(row, n, layer.window);
    const int length = row.prefix + n + ROWS; // positions; recent ones follow the prefix
    const int low = first.low / PANEL * PANEL;
    float* scores = scratch;                                  // [ROWS, capacity]
    float* packed = scratch + int64_t(ROWS) * capacity;       // [dim, PANEL]
    alignas(64) float tile[ROWS * PANEL];
    keys += kv_head * dim;
    values += kv_head * dim;
    const auto slot = [&](int p) {
        return p < row.prefix ? prefix_slot(row, p, call.page_size) : row.slots[p - row.prefix];
    };
    for (int p = low; p < length; p += PANEL) {
        const int count = length - p < PANEL ? length - p : PANEL;
        for (int i = 0; i < PANEL; i++) {
            if (i < count) {
                const T* key = keys + slot(p + i) * stride;
                for (int d = 0; d < dim; d++) packed[d * PANEL + i] = scalar(key + d);
            } else {
                for (int d = 0; d < dim; d++) packed[d * PANEL + i] = 0;
            }
        }
        memset(tile, 0, sizeof tile);
        multiply<float, ROWS, 1>(packed, 0, PANEL, q, ldq, dim, tile);
        for (int m = 0; m < ROWS; m++)
            for (int i = 0; i < count; i++) {
                float x = tile[m * PANEL + i] * layer.scale;
                if (model.score_cap > 0) x = model.score_cap * tanhf(x / model.score_cap);
                scores[m * capacity + p + i] = x;
            }
    }
    float totals[ROWS];
    int begins[ROWS];
    for (int m = 0; m < ROWS; m++) {
        const Sight sight(row, n + m, layer.window);
        const int stop = row.prefix + n + m + 1;
        begins[m] = sight.low; // in a causal chain positions are indices
        totals[m] = exponentials(scores + m * capacity + begins[m], stop - begins[m]);
        for (int p = low; p < begins[m]; p++) scores[m * capacity + p] = 0;
        for (int p = stop; p < length; p++) scores[m * capacity + p] = 0;
    }
    for (int d = 0; d < dim; d += PANEL) {
        memset(tile, 0, sizeof tile);
        if (d + PANEL <= dim) {
            for (int p = low; p < length;) { // runs of tokens whose slots follow each other
                const int64_t begin = slot(p);
                int end = p + 1;
                while (end < length && slot(end) == begin + end - p) end++;
                multiply<T, ROWS, 1>(
                    values + begin * stride + d, 0, stride, scores + p, capacity, end - p, tile);
                p = end;
            }
        } else {
            for (int p = low; p < length; p++)
                for (int m = 0; m < ROWS; m++)
                    for (int i = 0; i < dim - d; i++)
                        tile[m * PANEL + i] +=
                            scores[m * capacity + p] * scalar(values + slot(p) * stride + d + i);
        }
        for (int m = 0; m < ROWS; m++)
            for (int i = 0; i < PANEL && d + i < dim; i++)
                out[m * ldq + d + i] = tile[m * PANEL + i] / totals[m];
    }
}

template <class T>
static void attend_queries(
    const Model& model, const Layer& layer, const Call& call, const Row& row, int n, int count,
    int kv_head, const float* q, int64_t ldq, const T* keys, const T* values, float* scratch,
    float* out) {
    const auto run = [&](auto rows) {
        attend_block<T, decltype(rows)::value>(
            model, layer, call, row, n, kv_head, q, ldq, keys, values, scratch, out);
    };
    switch (count) {
        case 1: return run(std::integral_constant<int, 1>{});
        case 2: return run(std::integral_constant<int, 2>{});
        case 3: return run(std::integral_constant<int, 3>{});
        case 4: return run(std::integral_constant<int, 4>{});
        case 5: return run(std::integral_constant<int, 5>{});
        default: return run(std::integral_constant<int, 6>{});
    }
}

// ---------------------------------------------------------------------------------- the forward

struct Buffers { // of one call; T tokens
    float *x, *normed, *qkv, *mixed, *wide, *scores;
    int64_t qkv_width, mixed_width, wide_width, scores_size;
};

static int64_t scores_size(const Model& model, int max_length) { // of one thread
    const int64_t group = model.num_heads / model.num_kv_heads;
    const int64_t rows = group > MAX_ROWS ? group : MAX_ROWS;
    return rows * max_length + int64_t(PANEL) * model.head_dim + 64;
}

static int64_t wide_width(const Model& model) {
    int64_t width = model.intermediate > model.hidden ? model.intermediate : model.hidden;
    for (int i = 0; i < model.num_layers; i++) // of experts: router, then one expert at a time
        if (const Experts* experts = model.layers[i].experts) {
            const int64_t needed =
                experts->num_experts + int64_t(model.intermediate) + model.hidden + 16;
            if (needed > width) width = needed;
        }
    return (width + 15) / 16 * 16;
}

static int64_t mixed_width(const Model& model) {
    const int64_t heads = int64_t(model.num_heads) * model.head_dim;
    return heads > model.hidden ? heads : model.hidden;
}

static Buffers buffers(const Model& model, const Call& call) {
    Buffers b;
    const int64_t tokens = call.num_tokens, hidden = (model.hidden + 15) / 16 * 16;
    b.qkv_width = int64_t(model.num_heads + 2 * model.num_kv_heads) * model.head_dim;
    b.mixed_width = mixed_width(model);
    b.wide_width = wide_width(model);
    b.scores_size = scores_size(model, call.max_length);
    float* at = call.scratch;
    b.x = at, at += tokens * hidden;
    b.normed = at, at += tokens * hidden;
    b.qkv = at, at += tokens * b.qkv_width + 16;
    b.mixed = at, at += tokens * b.mixed_width + 16;
    b.wide = at, at += tokens * b.wide_width + 16;
    b.scores = at;
    return b;
}

template <class T>
static void rotate_and_store(
    const Model& model, const Layer& layer, const Call& call, const Buffers& b, T* keys, T* values,
    Share items) { // items: (token, head of queries, keys or values)
    const int dim = model.head_dim, rotated = model.rotary_dim, half = rotated / 2;
    const int heads = model.num_heads, kv_heads = model.num_kv_heads;
    const int per_token = heads + 2 * kv_heads;
    float turned[1024];
    for (int item = items.begin; item < items.end; item++) {
        const int t = item / per_token, head = item % per_token;
        float* x = b.qkv + t * b.qkv_width + int64_t(head) * dim;
        const int64_t slot = call.slots[t];
        if (head >= heads + kv_heads) {
            T* value = values + (slot * kv_heads + head - heads - kv_heads) * dim;
            for (int d = 0; d < dim; d++) put(value + d, x[d]);
            continue;
        }
        const float* weight = head < heads ? layer.q_norm : layer.k_norm;
        if (weight) norm(x, weight, dim, model.head_norm_eps, x);
        const float* cosines = layer.rotary + call.positions[t] * 2 * rotated;
        const float* sines = cosines + rotated;
        for (int d = 0; d < half; d++) turned[d] = x[d] * cosines[d] + x[d + half] * sines[d];
        for (int d = half; d < rotated; d++) turned[d] = x[d] * cosines[d] + x[d - half] * sines[d];
        memcpy(x, turned, rotated * 4);
        if (head >= heads) {
            T* key = keys + (slot * kv_heads + head - heads) * dim;
            for (int d = 0; d < dim; d++) put(key + d, x[d]);
        }
    }
}

template <class T>
static void attend(
    const Model& model, const Layer& layer, const Call& call, const Buffers& b, const T* keys,
    const T* values, int thread, int threads) {
    const int dim = model.head_dim, group = model.num_heads / model.num_kv_heads;
    float* scores = b.scores + thread * b.scores_size;
    int item = 0; // dealt in turns: long and short ones go to all threads
    for (int r = 0; r < call.num_rows; r++) {
        const Row& row = call.rows[r];
        const bool blocks = !row.visible && row.num_tokens > BLOCK_QUERIES;
        const int step = blocks ? MAX_ROWS : 1;
        for (int n = 0; n < row.num_tokens; n += step) {
            const int64_t token = row.start + n;
            const int count = row.num_tokens - n < step ? row.num_tokens - n : step;
            for (int kv_head = 0; kv_head < model.num_kv_heads; kv_head++) {
                const float* q = b.qkv + token * b.qkv_width + int64_t(kv_head) * group * dim;
                float* out = b.mixed + token * b.mixed_width + int64_t(kv_head) * group * dim;
                if (!blocks) {
                    if (item++ % threads == thread)
                        attend_token(
                            model, layer, call, row, n, kv_head, q, keys, values, scores, out);
                    continue;
                }
                for (int g = 0; g < group; g++) {
                    if (item++ % threads != thread) continue;
                    // Outputs lie mixed_width apart, queries qkv_width: out is written apart.
                    alignas(64) float block[MAX_ROWS * 1024];
                    alignas(64) float queries[MAX_ROWS * 1024];
                    for (int m = 0; m < count; m++)
                        memcpy(queries + m * dim, q + m * b.qkv_width + g * dim, dim * 4);
                    attend_queries(
                        model, layer, call, row, n, count, kv_head, queries, int64_t(dim), keys,
                        values, scores, block);
                    for (int m = 0; m < count; m++)
                        memcpy(out + m * b.mixed_width + g * dim, block + m * dim, dim * 4);
                }
            }
        }
    }
}

// The experts of each token one after the other, tokens shared out among the threads by output.
static void run_experts(
    const Model& model, const Experts& experts, const float* normed, int tokens, const Buffers& b,
    float* x, int thread, int threads) {
    const int hidden = model.hidden, inner = model.intermediate, number = experts.num_experts;
    product(
        *experts.router, normed, hidden, tokens, b.wide, b.wide_width, false,
        Share(panels(*experts.router), thread, threads));
#pragma omp barrier
    for (int t = 0; t < tokens; t++) {
        const float* logits = b.wide + t * b.wide_width;
        float* activated = b.wide + t * b.wide_width + (number + 15) / 16 * 16;
        float highest = -INFINITY, total = 0, chosen_total = 0;
        for (int e = 0; e < number; e++) highest = logits[e] > highest ? logits[e] : highest;
        for (int e = 0; e < number; e++) total += expf(logits[e] - highest);
        int chosen[64];
        float weights[64];
        for (int k = 0; k < experts.top_k; k++) {
            int best = -1;
            for (int e = 0; e < number; e++) {
                bool taken = false;
                for (int i = 0; i < k; i++) taken |= chosen[i] == e;
                if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
            }
            chosen[k] = best;
            weights[k] = expf(logits[best] - highest) / total;
            chosen_total += weights[k];
        }
        for (int k = 0; k < experts.top_k; k++) {
            const Linear &gate_up = experts.gate_up[chosen[k]], &down = experts.down[chosen[k]];
            const float weight =
                experts.renormalise ? weights[k] / chosen_total : weights[k];
            gated_product(
                gate_up, normed + t * hidden, hidden, 1, activated, inner, inner, model.activation,
                Share((inner + PANEL - 1) / PANEL, thread, threads));
#pragma omp barrier
            const Share share(panels(down), thread, threads);
            alignas(64) float tile[PANEL];
            for (int panel = share.begin; panel < share.end; panel++) {
                memset(tile, 0, sizeof tile);
                multiply_tile(down, panel, 1, activated, inner, 1, 0, inner, tile);
                if (down.type == I8 || down.bias)
                    scale_outputs(down, panel * PANEL, tile, 1, PANEL);
                for (int i = 0; i < PANEL && panel * PANEL + i < hidden; i++)
                    x[t * hidden + panel * PANEL + i] += tile[i] * weight;
            }
#pragma omp barrier
        }
    }
}

// x [T, hidden] += norm of y [T, hidden], where a layer norms what a block returns.
static void add_normed(
    float* x, const float* y, const float* weight, const Model& model, Share tokens, float* place) {
    for (int t = tokens.begin; t < tokens.end; t++) {
        norm(y + int64_t(t) * model.hidden, weight, model.hidden, model.eps, place);
        for (int i = 0; i < model.hidden; i++) x[int64_t(t) * model.hidden + i] += place[i];
    }
}

static void keep_state(float* to, const float* x, int64_t size, int thread) {
    if (to && thread == 0) memcpy(to, x, size * 4);
}

static void run(const Model& model, const Call& call, int thread, int threads) {
    Buffers b = buffers(model, call);
    const int hidden = model.hidden;
    int tokens = call.num_tokens;
    const auto norm_all = [&](const float* x, const float* weight) {
        const Share share(tokens, thread, threads);
        for (int t = share.begin; t < share.end; t++)
            norm(x + int64_t(t) * hidden, weight, hidden, model.eps, b.normed + int64_t(t) * hidden);
    };
    {
        const Share share(tokens, thread, threads);
        memcpy(
            b.x + int64_t(share.begin) * hidden, call.embedded + int64_t(share.begin) * hidden,
            int64_t(share.end - share.begin) * hidden * 4);
    }
    const bool narrow = call.num_logits < tokens && !call.states[model.num_layers] &&
                        !call.states[model.num_layers + 1];
    for (int index = 0; index < model.num_layers; index++) {
        const Layer& layer = model.layers[index];
        norm_all(b.x, layer.input_norm);
#pragma omp barrier
        keep_state(call.states[index], b.x, int64_t(tokens) * hidden, thread);
        product(
            layer.qkv, b.normed, hidden, tokens, b.qkv, b.qkv_width, false,
            Share(panels(layer.qkv), thread, threads));
#pragma omp barrier
        const Share heads(
            tokens * (model.num_heads + 2 * model.num_kv_heads), thread, threads);
        if (model.kv_type == F32)
            rotate_and_store(
                model, layer, call, b, (float*)call.keys[index], (float*)call.values[index], heads);
        else
            rotate_and_store(
                model, layer, call, b, (uint16_t*)call.keys[index], (uint16_t*)call.values[index],
                heads);
#pragma omp barrier
        if (model.kv_type == F32)
            attend(
                model, layer, call, b, (const float*)call.keys[index],
                (const float*)call.values[index], thread, threads);
        else
            attend(
                model, layer, call, b, (const uint16_t*)call.keys[index],
                (const uint16_t*)call.values[index], thread, threads);
#pragma omp barrier
        if (narrow && index == model.num_layers - 1) { // what follows is per token
            if (thread == 0)
                for (int r = 0; r < call.num_logits; r++) {
                    const int64_t t = call.logit_index[r]; // they rise, so none is overwritten
                    memmove(b.x + int64_t(r) * hidden, b.x + t * hidden, hidden * 4);
                    memmove(
                        b.mixed + r * b.mixed_width, b.mixed + t * b.mixed_width,
                        b.mixed_width * 4);
                }
            tokens = call.num_logits;
#pragma omp barrier
        }
        const Share outputs(panels(layer.out), thread, threads), mine(tokens, thread, threads);
        float* place = b.normed + int64_t(mine.begin) * hidden; // free at these points
        if (layer.attention_norm) {
            product(layer.out, b.mixed, b.mixed_width, tokens, b.wide, hidden, false, outputs);
#pragma omp barrier
            add_normed(b.x, b.wide, layer.attention_norm, model, mine, place);
        } else {
            product(layer.out, b.mixed, b.mixed_width, tokens, b.x, hidden, true, outputs);
        }
#pragma omp barrier
        norm_all(b.x, layer.mlp_norm);
#pragma omp barrier
        if (layer.experts) {
            run_experts(model, *layer.experts, b.normed, tokens, b, b.x, thread, threads);
            continue;
        }
        gated_product(
            layer.gate_up, b.normed, hidden, tokens, b.wide, model.intermediate,
            model.intermediate, model.activation,
            Share((model.intermediate + PANEL - 1) / PANEL, thread, threads));
#pragma omp barrier
        const Share downs(panels(layer.down), thread, threads);
        if (layer.output_norm) {
            product(
                layer.down, b.wide, model.intermediate, tokens, b.mixed, hidden, false, downs);
#pragma omp barrier
            add_normed(b.x, b.mixed, layer.output_norm, model, mine, place);
        } else {
            product(layer.down, b.wide, model.intermediate, tokens, b.x, hidden, true, downs);
        }
#pragma omp barrier
    }
    keep_state(call.states[model.num_layers], b.x, int64_t(tokens) * hidden, thread);
    norm_all(b.x, model.final_norm);
#pragma omp barrier
    keep_state(call.states[model.num_layers + 1], b.normed, int64_t(tokens) * hidden, thread);
    if (!narrow && call.num_logits < tokens) {
        if (thread == 0)
            for (int r = 0; r < call.num_logits; r++)
                memcpy(
                    b.x + int64_t(r) * hidden, b.normed + call.logit_index[r] * hidden, hidden * 4);
#pragma omp barrier
    }
    const float* last = !narrow && call.num_logits < tokens ? b.x : b.normed;
    const int64_t vocab = model.head->num_outputs;
    product(
        *model.head, last, hidden, call.num_logits, call.logits, vocab, false,
        Share(panels(*model.head), thread, threads));
    if (model.logit_cap > 0) {
#pragma omp barrier
        const Share share(call.num_logits, thread, threads);
        for (int64_t i = share.begin * vocab; i < share.end * vocab; i++)
            call.logits[i] = model.logit_cap * tanhf(call.logits[i] / model.logit_cap);
    }
}

extern "C" {

int64_t scratch_size(const Model* model, int32_t tokens, int32_t max_length, int32_t threads) {
    const int64_t hidden = (model->hidden + 15) / 16 * 16;
    const int64_t qkv = int64_t(model->num_heads + 2 * model->num_kv_heads) * model->head_dim;
    const int64_t per_token = 2 * hidden + qkv + mixed_width(*model) + wide_width(*model);
    return tokens * per_token + 64 + threads * scores_size(*model, max_length);
}

// Bytes of each structure, for whoever fills them.
void structure_sizes(int32_t* sizes) {
    const int32_t found[] = {sizeof(Linear), sizeof(Experts), sizeof(Layer),
                             sizeof(Model),  sizeof(Row),     sizeof(Call)};
    memcpy(sizes, found, sizeof found);
}

void forward(const Model* model, const Call* call) {
#pragma omp parallel num_threads(call->num_threads)
    run(*model, *call, omp_get_thread_num(), omp_get_num_threads());
}

// The weights of `count` outputs, float32 [count, in]; w is not quantised. Returns how many it has
// written: fewer where one is no output.
int32_t embed(const Linear* w, const int64_t* outputs, int32_t count, float* y) {
    for (int32_t t = 0; t < count; t++) {
        if (outputs[t] < 0 || outputs[t] >= w->num_outputs) return t;
        const int64_t at = outputs[t] / PANEL * PANEL * w->num_inputs + outputs[t] % PANEL;
        float* to = y + int64_t(t) * w->num_inputs;
        for (int64_t k = 0; k < w->num_inputs; k++)
            to[k] = w->type == F32 ? ((const float*)w->weight)[at + k * PANEL]
                                   : scalar((const uint16_t*)w->weight + at + k * PANEL);
    }
    return count;
}

void linear(const Linear* w, const float* x, int32_t tokens, float* y, int32_t num_threads) {
#pragma omp parallel num_threads(num_threads)
    product(
        *w, x, w->num_inputs, tokens, y, w->num_outputs, false,
        Share(panels(*w), omp_get_thread_num(), omp_get_num_threads()));
}
}
