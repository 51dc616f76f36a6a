// Vectors of OUTPUTS outputs, and sums of products of bytes, four for each output.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(NO_BYTE_PRODUCTS) || !defined(__AVX2__)
#define BYTE_PRODUCTS 0 // plain loops
#elif defined(__AVX512BW__)
#define BYTE_PRODUCTS 512 // bits of a vector
#else
#define BYTE_PRODUCTS 256
#endif

#if (BYTE_PRODUCTS == 512 && defined(__AVX512VNNI__)) || \
    (BYTE_PRODUCTS == 256 && defined(__AVXVNNI__))
#define HAS_VNNI 1 // instructions that add the products of four bytes
#else
#define HAS_VNNI 0
#endif

constexpr int OUTPUTS = BYTE_PRODUCTS == 512 ? 16 : 8; // of a vector
typedef float Floats __attribute__((vector_size(OUTPUTS * 4)));
typedef int32_t Ints __attribute__((vector_size(OUTPUTS * 4))); // integers, or four bytes each

static inline Floats load_floats(const float* p) {
    Floats v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline Ints load_ints(const void* p) {
    Ints v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline Floats all_floats(float x) { return x - Floats{}; }

static inline Ints all_ints(int32_t x) { return x - Ints{}; }

static inline float float16(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, size = bits & 0x7fff;
    const uint32_t wide = size << 13; // with the exponent of a half, 112 less than that of a float
    if (size < 0x400) {               // no normal number
        const float x = float(size) * 0x1p-24f;
        return sign ? -x : x;
    }
    const uint32_t value = sign | (wide + (size < 0x7c00 ? 112u << 23 : 224u << 23));
    float x;
    memcpy(&x, &value, 4);
    return x;
}

static inline Floats load_float16(const uint8_t* p) {
#if BYTE_PRODUCTS == 512
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    uint16_t bits[OUTPUTS];
    memcpy(bits, p, sizeof bits);
    Floats v;
    for (int i = 0; i < OUTPUTS; i++) v[i] = float16(bits[i]);
    return v;
#endif
}

static inline Floats load_bfloat16(const uint8_t* p) {
#if BYTE_PRODUCTS == 512
    return (Floats)(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)) << 16);
#elif defined(__AVX2__)
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    uint16_t bits[OUTPUTS];
    memcpy(bits, p, sizeof bits);
    Ints v;
    for (int i = 0; i < OUTPUTS; i++) v[i] = int32_t(uint32_t(bits[i]) << 16);
    return (Floats)v;
#endif
}

// Bytes without a sign.
static inline Floats load_unsigned(const uint8_t* p) {
#if BYTE_PRODUCTS == 512
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    Floats v;
    for (int i = 0; i < OUTPUTS; i++) v[i] = p[i];
    return v;
#endif
}

// Bytes with a sign.
static inline Floats load_signed(const uint8_t* p) {
#if BYTE_PRODUCTS == 512
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    Floats v;
    for (int i = 0; i < OUTPUTS; i++) v[i] = int8_t(p[i]);
    return v;
#endif
}

// A value that is computed as it is written: neither is its last operation fused with the next one,
// nor are several sums put in another order.
template <class T> static inline T in_order(T value) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(value));
#elif defined(__AVX__)
    __asm__("" : "+x"(value));
#else
    __asm__("" : "+m"(value));
#endif
    return value;
}

// The product, rounded before it is added to anything.
static inline Floats rounded_product(Floats a, Floats b) { return in_order(a * b); }

// Four inputs in 8 bits, for all outputs.
static inline Ints four_inputs(const int8_t* x) {
    int32_t four;
    memcpy(&four, x, 4);
    return all_ints(four);
}

#if BYTE_PRODUCTS == 512
static inline __m512i add_pairs(__m512i a, __m512i b) { return _mm512_add_epi16(a, b); }
static inline __m512i pair_products(__m512i a, __m512i b) { return _mm512_maddubs_epi16(a, b); }
static inline Ints sums_of_pairs(__m512i a) {
    return (Ints)_mm512_madd_epi16(a, _mm512_set1_epi16(1));
}
static inline __m512i magnitudes(__m512i w) { return _mm512_abs_epi8(w); }
static inline __m512i signed_as(__m512i x, __m512i w) {
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), __m512i{}, x);
}
typedef __m512i ByteVector;
#elif BYTE_PRODUCTS == 256
static inline __m256i add_pairs(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
static inline __m256i pair_products(__m256i a, __m256i b) { return _mm256_maddubs_epi16(a, b); }
static inline Ints sums_of_pairs(__m256i a) {
    return (Ints)_mm256_madd_epi16(a, _mm256_set1_epi16(1));
}
static inline __m256i magnitudes(__m256i w) { return _mm256_abs_epi8(w); }
static inline __m256i signed_as(__m256i x, __m256i w) { return _mm256_sign_epi8(x, w); }
typedef __m256i ByteVector;
#endif

// Sums of products of weights of BITS bits, unsigned if these are less than 8, with inputs of
// magnitudes up to 127.
template <int BITS> class ByteSums {
  public:
    // What is added to each weight: the sums are too large by as many times the sum of the inputs.
    static constexpr int OFFSET = HAS_VNNI && BITS == 8 ? 128 : 0;

    void begin(Ints start) { sums = start; }

    // Add the products of four weights of each output with four inputs. `index`: of the call. It
    // is called 4 or 8 times.
    void add(Ints weights, Ints inputs, [[maybe_unused]] int index) {
#if HAS_VNNI && BYTE_PRODUCTS == 512
        const Ints w = BITS == 8 ? weights ^ int32_t(0x80808080) : weights;
        sums = (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)inputs);
#elif HAS_VNNI
        const Ints w = BITS == 8 ? weights ^ int32_t(0x80808080) : weights;
        sums = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)inputs);
#elif BYTE_PRODUCTS
        const auto w = (ByteVector)weights, x = (ByteVector)inputs;
        ByteVector next =
            BITS == 8 ? pair_products(magnitudes(w), signed_as(x, w)) : pair_products(w, x);
        if (index % NUM_PAIRS) next = add_pairs(pairs, next);
        if (index % NUM_PAIRS < NUM_PAIRS - 1)
            pairs = in_order(next);
        else
            sums = in_order(sums + sums_of_pairs(next));
#else
        for (int lane = 0; lane < OUTPUTS; lane++)
            for (int shift = 0; shift < 32; shift += 8) {
                const int32_t w =
                    BITS == 8 ? int8_t(weights[lane] >> shift) : uint8_t(weights[lane] >> shift);
                sums[lane] += w * int8_t(inputs[lane] >> shift);
            }
#endif
    }

    Floats total() const { return __builtin_convertvector(sums, Floats); }

  private:
    Ints sums;
#if BYTE_PRODUCTS && !HAS_VNNI
    // Of pairs of products that 16 bits can add, of at most (2^BITS - 1) * 127 each.
    static constexpr int NUM_PAIRS = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
    ByteVector pairs;
#endif
};
