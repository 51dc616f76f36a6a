// Layers that are in a file, and the next ones of them in memory.
//
// A forward enters these layers in their order, and the next forward begins again with the first one.
// So a thread of the window knows what is needed next: it reads layer after layer into slots, as far
// ahead as slots are free, and a slot is free again when its layer has been left. What is read is
// compared with a checksum of what was written, so no result depends on the file.

#pragma once

#include "stored_bytes.h"
#include "structures.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include <fcntl.h>

// Of bytes that follow those of which `before` is the checksum.
static uint64_t checksum_of(uint64_t before, const uint8_t* bytes, int64_t size) {
    constexpr uint64_t FACTOR = 0x9E3779B97F4A7C15;
    constexpr int NUM_WORDS = 8; // in sums of their own, which the processor computes side by side
    constexpr int64_t BLOCK = NUM_WORDS * sizeof(uint64_t);
    uint64_t sums[NUM_WORDS] = {}, words[NUM_WORDS];
    const auto add = [&] {
        for (int i = 0; i < NUM_WORDS; i++) {
            const uint64_t mixed = (sums[i] ^ words[i]) * FACTOR;
            sums[i] = mixed << 29 | mixed >> 35;
        }
    };
    for (int64_t at = 0; at + BLOCK <= size; at += BLOCK) {
        memcpy(words, bytes + at, BLOCK);
        add();
    }
    memset(words, 0, BLOCK);
    memcpy(words, bytes + size / BLOCK * BLOCK, size % BLOCK);
    add();
    for (const uint64_t sum : sums) before = ((before ^ sum) * FACTOR) ^ sum >> 32;
    return before;
}

class LayerWindow {
  public:
    // The memory has num_slots slots of slot_bytes, fewer than there are layers.
    LayerWindow(
        int file, const StoredLayer* layers, int num_layers, uint8_t* memory, int num_slots,
        int64_t slot_bytes)
        : file(file), layers(layers, layers + num_layers), memory(memory), num_slots(num_slots),
          slot_bytes(slot_bytes), is_whole(num_slots), reader([this] { read_ahead(); }) {}

    ~LayerWindow() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            is_closing = true;
        }
        changed.notify_all();
        reader.join();
    }

    LayerWindow(const LayerWindow&) = delete;
    LayerWindow& operator=(const LayerWindow&) = delete;

    // Wait for a layer, which is the next one: its products point into its slot then, until leave().
    void enter(int index) {
        std::unique_lock<std::mutex> lock(mutex);
        const StoredLayer& layer = layers[num_left % layers.size()];
        if (layer.index != index) __builtin_trap(); // a forward runs all layers in their order
        const auto began = std::chrono::steady_clock::now();
        changed.wait(lock, [this] { return num_read > num_left; });
        waited += std::chrono::steady_clock::now() - began;
        if (!is_whole[num_left % num_slots] && broken < 0) broken = index;
    }

    void leave() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            num_left++;
        }
        changed.notify_all();
    }

    // The first layer that was entered since the last call although it could not be read, with NaN for its
    // weights; -1: there is none.
    int take_broken() {
        std::lock_guard<std::mutex> lock(mutex);
        const int layer = broken;
        broken = -1;
        return layer;
    }

    // into [2]: layers that were read, and nanoseconds that forwards have waited for them
    void count(int64_t* into) {
        std::lock_guard<std::mutex> lock(mutex);
        into[0] = num_read;
        into[1] = std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count();
    }

  private:
    const int file;
    const std::vector<StoredLayer> layers;
    uint8_t* const memory;
    const int num_slots;
    const int64_t slot_bytes;
    std::mutex mutex; // of all that follows
    std::condition_variable changed;
    int64_t num_read = 0, num_left = 0; // layers, in all forwards: each in the next slot
    std::vector<bool> is_whole;         // of the layer in a slot, whether it could be read
    int broken = -1;
    std::chrono::steady_clock::duration waited{0};
    bool is_closing = false;
    std::thread reader; // last: it begins when all else is there

    void read_ahead() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            changed.wait(lock, [this] { return is_closing || num_read - num_left < num_slots; });
            if (is_closing) return;
            const int slot = int(num_read % num_slots);
            const StoredLayer& layer = layers[num_read % layers.size()];
            lock.unlock();
            const bool could_read = read(layer, memory + slot * slot_bytes);
            lock.lock();
            is_whole[slot] = could_read;
            num_read++;
            changed.notify_all();
        }
    }

    // Fill a slot; returns whether it has what was written.
    bool read(const StoredLayer& from, uint8_t* to) const {
        const bool is_read = read_stored_bytes(file, to, from.size, from.offset);
#ifdef POSIX_FADV_DONTNEED // where it was not read past the system's cache
        posix_fadvise(file, from.offset, from.size, POSIX_FADV_DONTNEED);
#endif
        uint64_t checksum = 0;
        for (int i = 0; i < from.num_weights; i++) {
            const WeightPlace& weight = from.weights[i];
            checksum = checksum_of(checksum, to + weight.place, weight.size);
            *weight.pointer = to + weight.place;
        }
        if (is_read && checksum == uint64_t(from.checksum)) return true;
        memset(to, 0xFF, from.size);
        return false;
    }
};
