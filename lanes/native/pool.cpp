#include "pool.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>

#include "arithmetic.h"

namespace experts {
namespace {

constexpr auto kSpin = std::chrono::microseconds(40);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex_wait(const std::atomic<uint32_t>& word, uint32_t value) {
  // The time limit only guards against a lost wake; waking is what ends the sleep.
  const timespec limit{0, 50'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, &limit, nullptr, 0);
}

// True as soon as `done` holds, false when the spin time is over.
template <class Done>
bool spin(Done done) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

}  // namespace

void Wait::until_equal(const std::atomic<uint32_t>& word, uint32_t wanted) {
  if (spin([&] { return word.load(std::memory_order_acquire) == wanted; })) return;
  sleepers_.fetch_add(1);
  for (uint32_t seen; (seen = word.load()) != wanted;) futex_wait(word, seen);
  sleepers_.fetch_sub(1);
}

void Wait::until_changed(const std::atomic<uint32_t>& word, uint32_t seen) {
  if (spin([&] { return word.load(std::memory_order_acquire) != seen; })) return;
  sleepers_.fetch_add(1);
  while (word.load() == seen) futex_wait(word, seen);
  sleepers_.fetch_sub(1);
}

void Wait::wake_all(const std::atomic<uint32_t>& word) {
  if (sleepers_.load()) syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

Pool::Pool(const int32_t* cores, int32_t threads) : threads_(threads), seats_(new Seat[threads]) {
  workers_.reserve(threads - 1);
  try {
    for (int32_t i = 1; i < threads; ++i) workers_.emplace_back(&Pool::worker, this, i, cores ? cores[i] : -1);
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stopping_.store(true);
  epoch_.fetch_add(1);
  syscall(SYS_futex, &epoch_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  for (auto& worker : workers_) worker.join();
  workers_.clear();
}

void Pool::run(Unit unit, void* run, uint32_t units, uint32_t first, void (*begin)(void* run)) {
  const FloatMode mode;
  if (workers_.empty() || units < 2) {
    if (begin) begin(run);
    for (uint32_t i = 0; i < units; ++i) unit(run, i);
    return;
  }
  unit_ = unit, run_ = run, counts_[0] = first, counts_[1] = units - first;
  if (!++number_)  // numbers come again: nobody may find an old count under one
    for (uint32_t i = 0; i < threads_; ++i)
      for (auto& taken : seats_[i].taken) taken.store(uint64_t{number_} << 32, std::memory_order_relaxed);
  for (uint32_t i = 1; i < threads_; ++i) seats_[i].state.store(kOpen, std::memory_order_release);
  epoch_.fetch_add(1);
  started_.wake_all(epoch_);
  if (begin) begin(run);
  work(0);
  for (uint32_t i = 1; i < threads_; ++i) {
    std::atomic<uint32_t>& state = seats_[i].state;
    uint32_t seen = state.load(std::memory_order_acquire);
    if (seen == kOpen && state.compare_exchange_strong(seen, kIdle)) continue;
    if (seen != kIdle) left_.until_equal(state, kIdle);
  }
}

void Pool::rouse() {
  hot(true);
  run([](void*, uint32_t) {}, nullptr, 2);
}

uint32_t Pool::take(std::atomic<uint64_t>& taken, uint32_t size) {
  uint64_t seen = taken.load(std::memory_order_relaxed);
  for (;;) {
    const uint64_t now = seen >> 32 == number_ ? seen : uint64_t{number_} << 32;  // of an earlier run: none yet
    if (static_cast<uint32_t>(now) >= size) return size;
    if (taken.compare_exchange_weak(seen, now + 1, std::memory_order_relaxed)) return static_cast<uint32_t>(now);
  }
}

void Pool::work(uint32_t me) {
  uint32_t first = 0;
  for (int stage = 0; stage < 2; first += counts_[stage++]) {
    const uint32_t each = counts_[stage] / threads_, longer = counts_[stage] % threads_;  // that many have one more
    for (uint32_t k = 0, whose = me; k < threads_; ++k, whose = whose + 1 < threads_ ? whose + 1 : 0) {
      const uint32_t begin = whose * each + std::min(whose, longer), size = each + (whose < longer);
      for (uint32_t i; (i = take(seats_[whose].taken[stage], size)) < size;) unit_(run_, first + begin + i);
    }
  }
}

void Pool::worker(uint32_t me, int32_t core) {
  if (core >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    // A core outside this process's allowance is refused; the thread then runs where the process may run.
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  }
  pthread_setname_np(pthread_self(), "experts");
  const FloatMode mode;
  Seat& seat = seats_[me];
  while (!stopping_.load()) {
    uint32_t open = kOpen;
    if (seat.state.load(std::memory_order_relaxed) != kOpen) {
      if (hot_.load(std::memory_order_relaxed)) {
        pause();
        continue;
      }
      const uint32_t seen = epoch_.load();  // before the seat: who opens it changes the epoch afterwards
      if (seat.state.load() != kOpen && !stopping_.load()) started_.until_changed(epoch_, seen);
      continue;
    }
    if (!seat.state.compare_exchange_strong(open, kInside, std::memory_order_acquire)) continue;
    work(me);
    seat.state.exchange(kIdle);  // all of it before the look for who sleeps
    left_.wake_all(seat.state);
  }
}

}  // namespace experts
