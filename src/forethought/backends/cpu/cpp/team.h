// The threads of a parallel region, and the barriers at which they wait for each other.
//
// The thread that calls has a team of its own, which it keeps. A thread that waits at a barrier looks
// NUM_SPINS times, as a phase of a small model takes microseconds, and then sleeps: on a busy machine
// a thread that looks on takes the processor from the very thread that it waits for. Between regions
// it looks NUM_IDLE_SPINS times: the next one may follow at once, or never.
//
// Where other processes use the processors, threads wait at barriers for milliseconds. Where that is
// much of the time, the calling thread computes the next regions alone. No result depends on the
// number of threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <memory>
#include <pthread.h>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

using Clock = std::chrono::steady_clock;

#ifndef TEAM_PAUSE // a test interrupts the last thread here
#define TEAM_PAUSE()
#endif

constexpr int NUM_SPINS = 4000; // 50 to 150 microseconds on x86
constexpr int NUM_IDLE_SPINS = NUM_SPINS / 10;

// A number for whose change threads wait.
class Signal {
  public:
    uint32_t now() const { return value.load(std::memory_order_acquire); }

    void set(uint32_t number) { value.store(number, std::memory_order_release); }

    // Whether it is not `before`, or soon will be.
    bool changes(uint32_t before, int num_spins = NUM_SPINS) const {
        for (int i = 0; i < num_spins; i++) {
            if (now() != before) return true;
            pause();
        }
        return false;
    }

#ifdef __linux__
    // May return before the number has changed.
    void sleep(uint32_t before) const {
        syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, before, nullptr, nullptr, 0);
    }

    void wake() const {
        syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
#else
    void sleep(uint32_t) const { std::this_thread::yield(); }

    void wake() const {}
#endif

  private:
    alignas(64) std::atomic<uint32_t> value{0}; // in a cache line of its own

    static void pause() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
};

// Where `count` threads wait until all of them have come.
//
// A thread that goes to sleep marks it where the threads that come are counted. So the last one
// knows of it by its own count, and otherwise releases the others by a store that it does not wait
// for, which is on the path of every phase.
class Barrier {
  public:
    void wait(int index, uint32_t count) {
        const uint32_t before = passed.now();
        const uint32_t others = arrived.fetch_add(1, std::memory_order_acq_rel);
        if ((others & ~SLEEPS) + 1 == count) {
            TEAM_PAUSE();
            arrived.store(0, std::memory_order_relaxed);
            passed.set(before + 1);
            if (others & SLEEPS) passed.wake();
        } else if (!passed.changes(before)) {
            const auto begun = Clock::now();
            sleep(before, count);
            if (index == 0) slept += Clock::now() - begun;
        }
    }

    // The time that thread 0 has slept since the last call, by that thread.
    Clock::duration take_slept() { return std::exchange(slept, Clock::duration(0)); }

  private:
    static constexpr uint32_t SLEEPS = 1u << 31;

    Signal passed;
    Clock::duration slept{0};
    alignas(64) std::atomic<uint32_t> arrived{0};

    void sleep(uint32_t before, uint32_t count) {
        // All threads, or none, as the number was reset: the last one has come without knowing that
        // this one sleeps. It is about to release the others, and wakes none.
        const uint32_t others = arrived.fetch_or(SLEEPS, std::memory_order_acq_rel) & ~SLEEPS;
        const bool is_over = others == 0 || others == count;
        while (passed.now() == before)
            if (is_over)
                std::this_thread::yield();
            else
                passed.sleep(before);
    }
};

// Whether other processes take so much of the processors that one thread is faster than a team.
//
// The time in between attempts to compute as a team doubles, as a system may take some milliseconds
// to give two threads a processor each. In the end they cost at most 1 / MAX_TIMES of it.
class Contention {
  public:
    bool is_high(Clock::time_point now) const { return now < until; }

    // Count the time that the calling thread has slept at barriers until `now`.
    void observe(Clock::duration time, Clock::time_point now) {
        slept += time;
        if (MAX_SHARE * slept < now - from) {
            from = now, times = 1; // a single pause is forgiven, however long
        } else if (slept < MAX_SLEPT) {
            return;
        } else {
            from = until = now + times * slept;
            times = std::min(2 * times, MAX_TIMES);
        }
        slept = Clock::duration(0);
    }

  private:
    static constexpr int MAX_SHARE = 4; // of the time since `from`: 1 / MAX_SHARE
    static constexpr std::chrono::milliseconds MAX_SLEPT{10};
    static constexpr int MAX_TIMES = 16; // what was slept

    Clock::time_point from, until;
    int times = 1; // what was slept, for which it computes alone
    Clock::duration slept{0};
};

class Team {
  public:
    // Call work(index, count, barrier) in `count` threads, of which the calling one is the first,
    // and wait for all of them. They are fewer where the system gives no more threads, and the
    // calling one alone under contention.
    template <class Work> static void run(int count, const Work& work) {
        Team& team = of_this_thread();
        const size_t num_workers = team.workers.size();
        if (count > 1) count = team.members(count);
        if (count == 1) return work(0, 1, team.barrier);
        team.start(count, &work, [](const void* work, int index, int count, Barrier& barrier) {
            (*static_cast<const Work*>(work))(index, count, barrier);
        });
        work(0, count, team.barrier);
        team.barrier.wait(0, count);
        const auto slept = team.barrier.take_slept();
        if (slept.count() && team.workers.size() == num_workers) // not for threads to begin
            team.contention.observe(slept, Clock::now());
    }

    ~Team() {
        if (born != num_forks()) forget();
        call = nullptr;
        for (auto& worker : workers) worker->begin();
        for (auto& worker : workers) worker->thread.join();
    }

  private:
    using Call = void (*)(const void* work, int index, int count, Barrier& barrier);

    struct Worker {
        Signal begun; // regions
        std::atomic<bool> sleeps{false};
        std::thread thread;

        void begin() {
            begun.set(begun.now() + 1);
            std::atomic_thread_fence(std::memory_order_seq_cst);
            if (sleeps.load(std::memory_order_relaxed)) begun.wake();
        }

        void wait(uint32_t before) {
            if (begun.changes(before, NUM_IDLE_SPINS)) return;
            sleeps.store(true, std::memory_order_relaxed);
            std::atomic_thread_fence(std::memory_order_seq_cst);
            while (begun.now() == before) begun.sleep(before);
            sleeps.store(false, std::memory_order_relaxed);
        }
    };

    std::vector<std::unique_ptr<Worker>> workers;
    Barrier barrier;
    Call call = nullptr; // of the region; null: the threads end
    const void* work = nullptr;
    int count = 1;
    int born = num_forks();
    Contention contention;

    static Team& of_this_thread() {
        static thread_local Team team;
        return team;
    }

    void start(int count, const void* work, Call call) {
        this->count = count, this->work = work, this->call = call;
        for (int i = 0; i < count - 1; i++) workers[i]->begin();
    }

    // Threads of the next region, `count` at most.
    int members(int count) {
        if (contention.is_high(Clock::now())) return 1;
        if (born != num_forks()) forget();
        try {
            while (int(workers.size()) < count - 1) add();
        } catch (const std::system_error&) { // a limit on threads
            workers.pop_back();
        }
        return std::min(count, 1 + int(workers.size()));
    }

    void add() {
        workers.push_back(std::make_unique<Worker>());
        const int index = int(workers.size());
        Worker* worker = workers.back().get();
        worker->thread = std::thread([this, worker, index] { serve(*worker, index); });
    }

    void serve(Worker& worker, int index) {
        for (uint32_t before = 0;; before++) {
            worker.wait(before);
            if (!call) return;
            const int members = count;
            call(work, index, members, barrier);
            barrier.wait(index, members);
        }
    }

    // A forked process has no thread of its parent but the one that forked.
    void forget() {
        for (auto& worker : workers) worker.release();
        workers.clear();
        born = num_forks();
    }

    // Forks that lead to this process, since this function was called first.
    static int num_forks() {
        static std::atomic<int> forks{0};
        static const int failed = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
        (void)failed;
        return forks.load(std::memory_order_relaxed);
    }
};
