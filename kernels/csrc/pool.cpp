#include "pool.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace sapwood {
namespace {

// Covers the gap between two kernels of a step; to sleep and be woken takes about as long. No yielding comes
// after it: a thread that yields is put behind whatever else wants its core, one that wakes is put before it.
constexpr std::chrono::microseconds SPIN(20);
constexpr int PAUSES = 16;  // between two looks at the clock

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins until done() holds; false if it does not within SPIN.
template <class Done>
inline bool spin_for(const Done &done) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < PAUSES; i++) {
            if (done()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

class Pool {
public:
    ~Pool() { resize(1); }

    void resize(int threads) {
        std::lock_guard<std::mutex> alone(busy_);
        {
            std::lock_guard<std::mutex> hold(sleep_);
            stop_ = true;
        }
        wake_.notify_all();
        for (std::thread &thread : threads_) thread.join();
        threads_.clear();
        stop_ = false;
        for (int i = 1; i < threads; i++) threads_.emplace_back([this] { serve(); });
    }

    void run(int threads, int64_t count, int64_t run, Task task, const void *context) {
        std::unique_lock<std::mutex> alone(busy_, std::try_to_lock);
        if (!alone.owns_lock() || threads_.empty()) {
            for (int64_t i = 0; i < count; i++) task(context, i);
            return;
        }
        task_ = task, context_ = context, count_ = count, run_ = run;
        seats_.store(threads - 1, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        // Opens the loop: whoever sees the new state sees the fields above.
        state_.store(((state_.load() >> 32) + 1) << 32 | OPEN, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) {
            {
                std::lock_guard<std::mutex> hold(sleep_);
            }
            wake_.notify_all();
        }
        work();
        // Closed: nobody enters any more; those inside finish what they have claimed.
        state_.fetch_and(~OPEN, std::memory_order_seq_cst);
        if (!spin_for([&] { return empty(); })) sleep_until_empty();
    }

private:
    // State: the loop's number in the high half, whether it takes threads in, and how many are inside.
    static constexpr uint64_t OPEN = 1ull << 31, INSIDE = OPEN - 1;

    void work() {
        for (;;) {
            const int64_t first = next_.fetch_add(run_, std::memory_order_relaxed);
            if (first >= count_) return;
            const int64_t end = first + run_ < count_ ? first + run_ : count_;
            for (int64_t i = first; i < end; i++) task_(context_, i);
        }
    }

    void serve() {
        uint64_t seen = 0;
        while (!stop_) {
            if (!spin_for([&] { return stop_ || fresh(seen); })) sleep(seen);
            if (enter(seen)) {
                work();
                leave();
            }
        }
    }

    bool fresh(uint64_t seen) const {
        const uint64_t state = state_.load(std::memory_order_seq_cst);
        return (state & OPEN) && state >> 32 != seen;
    }

    // Takes a seat in the loop that is open, if there is one and it is not the one seen last.
    bool enter(uint64_t &seen) {
        uint64_t state = state_.load(std::memory_order_acquire);
        while ((state & OPEN) && state >> 32 != seen) {
            if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
            seen = state >> 32;
            if (seats_.fetch_sub(1, std::memory_order_relaxed) > 0) return true;
            leave();
            return false;
        }
        return false;
    }

    void leave() {
        state_.fetch_sub(1, std::memory_order_seq_cst);
        if (caller_sleeps_.load(std::memory_order_seq_cst) && empty()) {
            {
                std::lock_guard<std::mutex> hold(sleep_);
            }
            emptied_.notify_one();
        }
    }

    bool empty() const { return (state_.load(std::memory_order_seq_cst) & INSIDE) == 0; }

    void sleep_until_empty() {
        std::unique_lock<std::mutex> hold(sleep_);
        caller_sleeps_.store(true, std::memory_order_seq_cst);
        emptied_.wait(hold, [&] { return empty(); });
        caller_sleeps_.store(false, std::memory_order_relaxed);
    }

    void sleep(uint64_t seen) {
        std::unique_lock<std::mutex> hold(sleep_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(hold, [&] { return stop_ || fresh(seen); });
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }

    std::mutex busy_, sleep_;
    std::condition_variable wake_, emptied_;
    std::vector<std::thread> threads_;
    std::atomic<bool> stop_{false}, caller_sleeps_{false};
    std::atomic<int> sleepers_{0}, seats_{0};
    std::atomic<int64_t> next_{0};
    std::atomic<uint64_t> state_{0};
    Task task_ = nullptr;
    const void *context_ = nullptr;
    int64_t count_ = 0, run_ = 1;
};

Pool &pool() {
    static Pool *instance = new Pool;  // never destroyed: its threads may outlive static destructors
    return *instance;
}

}  // namespace

void set_threads(int threads) { pool().resize(threads); }

void run_tasks(int threads, int64_t count, int64_t run, Task task, const void *context) {
    pool().run(threads, count, run, task, context);
}

}  // namespace sapwood
