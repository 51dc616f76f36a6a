// Vectors of LANES float32, in the extensions that GCC and Clang share, and functions of them.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#ifndef LANES // of a vector of float32
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

// Every other of 2 * LANES bf16: the first of each pair, and the second.
static inline Vec load_even(const uint16_t* p) {
    IntVec pairs;
    memcpy(&pairs, p, sizeof pairs);
    return (Vec)(pairs << 16);
}

static inline Vec load_odd(const uint16_t* p) {
    IntVec pairs;
    memcpy(&pairs, p, sizeof pairs);
    return (Vec)(pairs & int32_t(0xffff0000));
}

static inline Vec load(const int8_t* p) { return __builtin_convertvector(widen(p), Vec); }

// The first `count` lanes of a vector, fewer than all; the others are 0.
template <class T> static inline Vec load_first(const T* p, int count) {
    T lanes[LANES] = {};
    memcpy(lanes, p, count * sizeof *p);
    return load(lanes);
}

// Up to LANES floats.
struct Lanes {
    const int count;

    Vec load(const float* p) const { return count == LANES ? ::load(p) : load_first(p, count); }

    void store(float* p, Vec v) const {
        if (count == LANES)
            ::store(p, v);
        else
            memcpy(p, &v, count * 4);
    }
};

static inline Lanes lanes_of(int64_t left) { return {left < LANES ? int(left) : LANES}; }

static inline float scalar(const float* p) { return *p; }

static inline float scalar(const uint16_t* p) {
    uint32_t bits = uint32_t(*p) << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline float scalar(const int8_t* p) { return *p; }

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

static inline void store(uint16_t* p, Vec v) { // bf16, as put()
    IntVec bits;
    memcpy(&bits, &v, sizeof bits);
    const IntVec rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const HalfVec half =
        __builtin_convertvector((v != v ? bits | 0x400000 : rounded) >> 16, HalfVec);
    memcpy(p, &half, sizeof half);
}

static inline float sum(Vec v) { // halves are added to each other, then their halves
#if LANES == 16 && defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#endif
    float parts[LANES];
    memcpy(parts, &v, sizeof v);
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

// The sums of LANES vectors, each by the same tree.
static inline Vec sums(const Vec* v) {
#if LANES == 16 && defined(__AVX512F__)
    __m512 quads[4]; // of four vectors, beside each other in each quarter
    for (int i = 0; i < 4; i++, v += 4) {
        const auto halves = [](Vec a, Vec b) {
            return _mm512_unpacklo_ps((__m512)a, (__m512)b) +
                   _mm512_unpackhi_ps((__m512)a, (__m512)b);
        };
        const __m512d a = (__m512d)halves(v[0], v[1]), b = (__m512d)halves(v[2], v[3]);
        quads[i] = (__m512)_mm512_unpacklo_pd(a, b) + (__m512)_mm512_unpackhi_pd(a, b);
    }
    const auto quarters = [](__m512 a, __m512 b) {
        return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    };
    return (Vec)quarters(quarters(quads[0], quads[1]), quarters(quads[2], quads[3]));
#elif LANES == 8 && defined(__AVX__)
    const auto pairs = [](Vec a, Vec b) { return _mm256_hadd_ps((__m256)a, (__m256)b); };
    const __m256 a = _mm256_hadd_ps(pairs(v[0], v[1]), pairs(v[2], v[3]));
    const __m256 b = _mm256_hadd_ps(pairs(v[4], v[5]), pairs(v[6], v[7]));
    return (Vec)(_mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31));
#else
    Vec found;
    for (int i = 0; i < LANES; i++) found[i] = sum(v[i]);
    return found;
#endif
}

// Lane by lane the sum of LANES vectors, by the tree by which sums() adds the lanes of one.
static inline Vec sum_by_lane(const Vec* v) {
#if LANES == 16 && defined(__AVX512F__)
    Vec quarters[4];
    for (int i = 0; i < 4; i++, v += 4) quarters[i] = (v[0] + v[2]) + (v[1] + v[3]);
    return (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
#elif LANES == 8 && defined(__AVX__)
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
#else
    Vec parts[LANES];
    for (int i = 0; i < LANES; i++) parts[i] = v[i];
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
#endif
}

static inline Vec larger(Vec a, Vec b) {
#if LANES == 16 && defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

static inline float largest(Vec v) {
#if LANES == 16 && defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float result = v[0];
    for (int lane = 1; lane < LANES; lane++) result = v[lane] > result ? v[lane] : result;
    return result;
#endif
}

static inline Vec exp_near_0(Vec x) { // for |x| up to log(2) / 2
    Vec y = broadcast(1.9875691500e-4f);
    y = y * x + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    return y * (x * x) + x + 1.0f;
}

static inline Vec exp(Vec x) { // Cephes' expf: within 2 ulp
    const Vec low = broadcast(-87.336544f), high = broadcast(88.3762626647950f);
    x = x < low ? low : x;
    x = x > high ? high : x;
#if LANES == 16 && defined(__AVX512F__)
    const Vec power_of_2 = (Vec)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), 0);
    x = x - power_of_2 * 0.693359375f + power_of_2 * 2.12194440e-4f;
    return (Vec)_mm512_scalef_ps((__m512)exp_near_0(x), (__m512)power_of_2);
#else
    Vec scaled = x * 1.44269504088896341f + 0.5f;
    IntVec whole = __builtin_convertvector(scaled, IntVec);
    Vec back = __builtin_convertvector(whole, Vec);
    whole += back > scaled; // a comparison that holds is -1: round down
    back = __builtin_convertvector(whole, Vec);
    x = x - back * 0.693359375f + back * 2.12194440e-4f;
    IntVec bits = (whole + 127) << 23;
    Vec power;
    memcpy(&power, &bits, sizeof power);
    return exp_near_0(x) * power;
#endif
}
