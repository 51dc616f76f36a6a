// Uniform samples: a counter-based generator; in Python: uniform_at of model/sampling/sampler.py.

#pragma once

#include <cstdint>

// BLAKE2b (RFC 7693) of one block of `count` words, with a digest of 8 bytes, which is returned.
static inline uint64_t blake2b(const uint64_t* words, int count) {
    static constexpr uint64_t START[8] = {
        0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
        0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
    static constexpr uint8_t ORDER[10][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
        {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
        {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
        {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
        {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
        {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
        {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
        {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
        {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
        {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
    uint64_t block[16] = {}, v[16];
    for (int i = 0; i < count; i++) block[i] = words[i];
    for (int i = 0; i < 8; i++) v[i] = v[8 + i] = START[i];
    const uint64_t first = START[0] ^ 0x01010008; // one digest of 8 bytes, without a key
    v[0] = first;
    v[12] ^= uint64_t(8 * count);
    v[14] = ~v[14]; // the last block
    const auto rotate = [](uint64_t x, int by) { return x >> by | x << (64 - by); };
    const auto mix = [&](int a, int b, int c, int d, uint64_t x, uint64_t y) {
        v[a] += v[b] + x, v[d] = rotate(v[d] ^ v[a], 32);
        v[c] += v[d], v[b] = rotate(v[b] ^ v[c], 24);
        v[a] += v[b] + y, v[d] = rotate(v[d] ^ v[a], 16);
        v[c] += v[d], v[b] = rotate(v[b] ^ v[c], 63);
    };
    for (int round = 0; round < 12; round++) {
        const uint8_t* at = ORDER[round % 10];
        for (int i = 0; i < 4; i++)
            mix(i, 4 + i, 8 + i, 12 + i, block[at[2 * i]], block[at[2 * i + 1]]);
        for (int i = 0; i < 4; i++)
            mix(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, block[at[8 + 2 * i]],
                block[at[9 + 2 * i]]);
    }
    return first ^ v[0] ^ v[8];
}

// In [0, 1), with 53 random bits: that of a request's seed, the index of its sample and the position
// of a token.
static inline double uniform_at(uint64_t seed, uint64_t sample, uint64_t position) {
    const uint64_t counter[3] = {seed, sample, position};
    return double(blake2b(counter, 3) >> 11) * 0x1p-53;
}
