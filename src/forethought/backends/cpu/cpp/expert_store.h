// Experts that are in a file, and a part of them in memory: a cache of whole experts.
//
// Before the experts of a layer compute, those that their tokens have chosen are read into slots, by
// all threads, in place of the ones that were not used for longest. A thread of the store reads ahead
// meanwhile: the experts that the gate of the next layer chooses by the input of this one, which
// differs little (Fate, 2025, section 3). What is read is what would be there anyway, so no result
// depends on it.

#pragma once

#include "stored_bytes.h"
#include "structures.h"

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

class ExpertStore {
  public:
    // The memory has num_slots slots of slot_bytes; there are at least two layers of experts in it.
    ExpertStore(
        int file, const StoredExpert* experts, int num_experts, uint8_t* memory, int num_slots,
        int64_t slot_bytes)
        : file(file), experts(experts, experts + num_experts), memory(memory),
          slot_bytes(slot_bytes), states(num_experts), slots(num_slots),
          reader([this] { read_ahead(); }) {}

    ~ExpertStore() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            is_closing = true;
        }
        changed.notify_all();
        reader.join();
    }

    ExpertStore(const ExpertStore&) = delete;
    ExpertStore& operator=(const ExpertStore&) = delete;

    // Hold the experts for which is_needed(expert), of [begin, end), and none of an earlier call.
    // What of them has to be read is left for load().
    template <class Needed> void hold(int begin, int end, Needed&& is_needed) {
        std::lock_guard<std::mutex> lock(mutex);
        expected.clear();
        missing.clear();
        for (int e = held_begin; e < held_end; e++) states[e].is_held = false;
        held_begin = begin, held_end = end;
        for (int e = begin; e < end; e++) states[e].is_held = is_needed(e - begin);
        for (int e = begin; e < end; e++) {
            if (!states[e].is_held) continue;
            counts.used++;
            if (states[e].slot >= 0 && !states[e].is_broken) {
                counts.present += states[e].is_ready;
                touch(e);
                continue;
            }
            if (states[e].slot < 0 && !take_slot(e))
                __builtin_trap(); // two layers fit: of the slots at most one layer's are held
            states[e].is_ready = states[e].is_broken = false;
            missing.push_back(e);
        }
    }

    // Read a thread's share of what is missing, and wait for what the reader is reading of the rest.
    // A barrier follows before anything is computed.
    void load(int index, int count) {
        for (size_t i = index; i < missing.size(); i += count) {
            const bool is_whole = read(missing[i]);
            std::lock_guard<std::mutex> lock(mutex);
            finish(missing[i], is_whole);
        }
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return all_ready(); });
    }

    // Read these ahead, if there is room; the layer that is held goes first.
    void expect(const std::vector<int>& chosen) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            for (int e : chosen)
                if (states[e].slot < 0)
                    expected.push_back(e);
                else
                    touch(e);
        }
        changed.notify_all();
    }

    // into [3]: experts that layers have used, those of them that were there, those read ahead
    void count(int64_t* into) {
        std::lock_guard<std::mutex> lock(mutex);
        into[0] = counts.used, into[1] = counts.present, into[2] = counts.ahead;
    }

  private:
    struct State {
        int slot = -1;
        bool is_ready = false, is_held = false;
        bool is_broken = false; // it could not be read: its weights are NaN, until it can
    };
    struct Slot {
        int expert = -1;
        int64_t used = 0; // when, in calls of touch
    };
    struct Counts {
        int64_t used = 0, present = 0, ahead = 0;
    };

    const int file;
    const std::vector<StoredExpert> experts;
    uint8_t* const memory;
    const int64_t slot_bytes;
    std::mutex mutex; // of all that follows, but `missing`, which changes between barriers
    std::condition_variable changed;
    std::vector<State> states;
    std::vector<Slot> slots;
    std::vector<int> missing;
    std::deque<int> expected;
    int held_begin = 0, held_end = 0;
    int64_t now = 0;
    Counts counts;
    bool is_closing = false;
    std::thread reader; // last: it begins when all else is there

    void touch(int expert) { slots[states[expert].slot].used = ++now; }

    bool all_ready() const {
        for (int e = held_begin; e < held_end; e++)
            if (states[e].is_held && !states[e].is_ready) return false;
        return true;
    }

    // Gives an expert the slot that was not used for longest; false: all are held or being read.
    bool take_slot(int expert) {
        int best = -1;
        for (int s = 0; s < int(slots.size()); s++) {
            const int other = slots[s].expert;
            const bool is_free = other < 0 || (states[other].is_ready && !states[other].is_held);
            if (is_free && (best < 0 || slots[s].used < slots[best].used)) best = s;
        }
        if (best < 0) return false;
        if (slots[best].expert >= 0) states[slots[best].expert] = State();
        slots[best].expert = expert;
        states[expert].slot = best;
        touch(expert);
        return true;
    }

    void finish(int expert, bool is_whole) {
        states[expert].is_ready = true;
        states[expert].is_broken = !is_whole;
        if (all_ready()) changed.notify_all();
    }

    // Fill the slot of an expert; without the lock. Returns whether all of it could be read.
    bool read(int expert) const {
        const StoredExpert& from = experts[expert];
        uint8_t* to = memory + states[expert].slot * slot_bytes;
        const bool is_whole = read_stored_bytes(file, to, from.size, from.offset);
        if (!is_whole) memset(to, 0xFF, from.size);
        point(from.gate_up, to, from.gate_up_weight, from.gate_up_scale, from.gate_up_zero);
        point(from.down, to, from.down_weight, from.down_scale, from.down_zero);
        return is_whole;
    }

    static void point(Linear* to, uint8_t* at, int64_t weight, int64_t scale, int64_t zero) {
        to->weight = at + weight;
        to->scale = scale < 0 ? nullptr : (const float*)(at + scale);
        to->zero = zero < 0 ? nullptr : (const float*)(at + zero);
    }

    void read_ahead() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            changed.wait(lock, [&] { return is_closing || !expected.empty(); });
            if (is_closing) return;
            const int expert = expected.front();
            expected.pop_front();
            if (states[expert].slot >= 0 || !take_slot(expert)) continue;
            counts.ahead++;
            lock.unlock();
            const bool is_whole = read(expert);
            lock.lock();
            finish(expert, is_whole);
        }
    }
};
