// Regions of a Team for test_native_team.py.

#include "team.h"

#include <atomic>
#include <cstdint>
#include <unistd.h>
#include <vector>

extern "C" {

// Threads of a region.
int32_t members(int32_t threads) {
    std::atomic<int32_t> present{0};
    Team::run(threads, [&](int, int, Barrier&) { present++; });
    return present;
}

// Times that a thread saw another one before or after its own phase.
int32_t phases_out_of_step(int32_t threads, int32_t phases) {
    std::vector<std::atomic<int32_t>> reached(threads);
    std::atomic<int32_t> wrong{0};
    Team::run(threads, [&](int index, int count, Barrier& barrier) {
        for (int32_t phase = 1; phase <= phases; phase++) {
            reached[index] = phase;
            barrier.wait(index, count);
            for (int i = 0; i < count; i++) wrong += reached[i] != phase;
            barrier.wait(index, count);
        }
    });
    return wrong;
}

// The threads wait for the second one, which waits for a byte of a pipe.
void wait_for_byte(int32_t threads, int32_t pipe) {
    Team::run(threads, [&](int index, int count, Barrier& barrier) {
        char byte;
        while (index == 1 && read(pipe, &byte, 1) != 1) {
        }
        barrier.wait(index, count);
    });
}

// Whether contention is high after milliseconds of sleep were observed at some times.
int32_t is_high(const int64_t* slept, const int64_t* at, int32_t size, int64_t now) {
    using std::chrono::milliseconds;
    Contention contention;
    const Clock::time_point start;
    for (int32_t i = 0; i < size; i++)
        contention.observe(milliseconds(slept[i]), start + milliseconds(at[i]));
    return contention.is_high(start + milliseconds(now));
}
}
