// The threads of share.h.
#include "share.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "handle.h"

using namespace experts;

namespace {

constexpr int64_t kHotNs = 2'000'000, kSleepNs = 20'000, kGraceNs = 1'000'000'000;
constexpr int64_t kMostSpentNs = 4'000'000;  // a layer that took longer was held up by something else
constexpr int32_t kMostBlockPairs = 1024;
constexpr int kLooks = 64;  // at the doorbell between two looks at the clock

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * int64_t{1'000'000'000} + t.tv_nsec;
}

void look_away() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

int64_t aligned(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace

struct expert_share {
  expert_pool* pool;
  expert_layout layout;
  share_config config;
  share_block at;
  uint8_t* block;
  // Scratch of one layer; sized once.
  std::vector<int32_t> taken, offsets, pair_rows;
  std::vector<const uint8_t*> records;

  std::atomic<int32_t> state{SHARE_IDLE};
  std::atomic<int64_t> progress_ns{0};
  std::atomic<uint32_t> orders{0};  // +1 for every window and for the end; the thread sleeps on it
  std::atomic<uint64_t> count{0};
  std::atomic<bool> stopping{false};
  int64_t rung_ns = 0;  // when the thread saw the last doorbell
  Wait ordered;
  std::mutex ending;
  std::condition_variable ended;
  std::thread thread, guard;

  void run(int32_t core);
  void look_after();
  bool await(uint64_t n);
  int32_t serve();
  // The first error stays.
  void end(int32_t reason) {
    int32_t now = state.load();
    while (now < SHARE_STOPPED && !state.compare_exchange_weak(now, reason)) {
    }
    __atomic_store_n(word(at.done), SHARE_RELEASED, __ATOMIC_RELEASE);
  }
  // After `serve`, of a layer with so many experts for the CPU. False where the window was given up meanwhile.
  bool answer(uint64_t n, int32_t jobs) {
    if (jobs < 0) return false;
    uint64_t before = n - 1;
    if (!__atomic_compare_exchange_n(word(at.done), &before, n, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
      return false;
    // The GPU waits for none of these: they are whole when the thread says that it is idle.
    const int64_t now = now_ns();
    progress_ns.store(now);
    config.spent[2 * jobs] += 1, config.spent[2 * jobs + 1] += std::min(now - rung_ns, kMostSpentNs);
    config.times[2 * (n - 1)] = rung_ns, config.times[2 * (n - 1) + 1] = now;
    return true;
  }
  void fetch(int64_t from, int64_t bytes) const {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + from + i);
  }
  uint64_t* word(int64_t offset) const { return reinterpret_cast<uint64_t*>(block + offset); }
  int32_t input(int64_t offset) const { return *reinterpret_cast<const int32_t*>(block + offset); }
};

void expert_share::run(int32_t core) {
  if (core >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  }
  pthread_setname_np(pthread_self(), "expert-share");
  bool hot = false;  // windows follow each other: the pool's workers are awake
  int64_t ended_ns = 0;
  for (uint32_t seen = 0; !stopping.load();) {
    if (orders.load() == seen) {
      if (hot && now_ns() - ended_ns < kHotNs) {
        look_away();
        continue;
      }
      if (hot) pool->pool.hot(hot = false);
      ordered.until_changed(orders, seen);
      continue;
    }
    ++seen;
    if (state.load() != SHARE_ARMED) continue;  // the order was to stop
    const uint64_t layers = count.load();
    if (!hot) {
      const std::lock_guard<std::mutex> alone(pool->pool.callers);
      pool->pool.rouse();
    }
    for (uint64_t n = 1; n <= layers && await(n) && answer(n, serve()); ++n) {
      int32_t armed = SHARE_ARMED;
      if (n == layers) state.compare_exchange_strong(armed, SHARE_IDLE);
    }
    hot = true, ended_ns = now_ns();
    if (state.load() >= SHARE_SILENT) return pool->pool.hot(false);  // an error stays
  }
  pool->pool.hot(false);
  end(SHARE_STOPPED);
}

void expert_share::look_after() {
  pthread_setname_np(pthread_self(), "share-guard");
  // The thread itself would have said SILENT in time: much later it is no longer running.
  const int64_t limit = config.silence_ns + kGraceNs;
  const auto pace = std::chrono::nanoseconds(std::clamp<int64_t>(config.silence_ns / 16, 1'000'000, 100'000'000));
  std::unique_lock<std::mutex> lock(ending);
  while (!ended.wait_for(lock, pace, [this] { return stopping.load(); }))
    if (state.load() == SHARE_ARMED && now_ns() - progress_ns.load() > limit) end(SHARE_STUCK);
}

// True when the n-th doorbell has rung.
bool expert_share::await(uint64_t n) {
  const int64_t began = now_ns();
  for (;;) {
    for (int i = 0; i < kLooks; ++i) {
      const uint64_t rung = __atomic_load_n(word(at.doorbell), __ATOMIC_ACQUIRE);
      if (rung == n) {
        if (state.load() != SHARE_ARMED) return false;  // given up: what the layer needs may be gone
        rung_ns = now_ns();
        return pool->pool.hot(true), true;
      }
      if (rung != n - 1) return end(SHARE_OUT_OF_ORDER), false;
      look_away();
    }
    if (stopping.load() || state.load() != SHARE_ARMED) return false;
    const int64_t waited = now_ns() - began;
    if (waited > config.silence_ns) return end(SHARE_SILENT), false;
    if (waited > kHotNs) {
      pool->pool.hot(false);
      const timespec nap{0, kSleepNs};
      nanosleep(&nap, nullptr);
    }
  }
}

// Computes the CPU's rows of the layer that the block describes: of how many experts; -1 after an error.
int32_t expert_share::serve() {
  // The GPU has just written all of it: its lines come side by side instead of one behind the other.
  fetch(at.layer, 8), fetch(at.ids, 4 * int64_t{config.chosen});
  const int32_t layer = input(at.layer), rows = input(at.rows);
  if (layer < 0 || layer >= config.layers || rows < 1 || rows > config.rows) return end(SHARE_BAD_INPUT), -1;
  fetch(at.x, 4 * int64_t{layout.hidden});
  const int64_t first = int64_t{layer} * config.experts;
  const int32_t jobs = expert_work(rows, config.chosen, reinterpret_cast<const int32_t*>(block + at.ids),
                                   config.experts, taken.data(), offsets.data(), pair_rows.data());
  if (jobs < 0) return end(SHARE_BAD_INPUT), -1;
  if (!jobs) return 0;
  for (int32_t j = 0; j < jobs; ++j)
    records[j] = reinterpret_cast<const uint8_t*>(config.addresses[first + taken[j]]);
  const int code = expert_run(pool, &layout, jobs, records.data(), offsets.data(), pair_rows.data(), rows,
                              reinterpret_cast<const float*>(block + at.x), reinterpret_cast<float*>(block + at.y));
  if (code) return end(SHARE_FAILED), -1;
  return jobs;
}

EXPORT int share_block_of(int32_t rows, int32_t chosen, int32_t hidden, share_block* block) {
  if (!block || rows < 1 || chosen < 1 || hidden < 1 || hidden > kMaxSize || rows > kMostBlockPairs || chosen > kMostBlockPairs ||
      rows * chosen > kMostBlockPairs)
    return EXPERT_BAD_ARGUMENT;
  const int64_t pairs = int64_t{rows} * chosen;
  block->doorbell = 0, block->done = 64, block->layer = 128, block->rows = 132, block->ids = 192;
  block->x = aligned(block->ids + 4 * pairs, 64);
  block->y = aligned(block->x + 4 * int64_t{rows} * hidden, 64);
  block->bytes = aligned(block->y + 4 * pairs * hidden, 4096);
  return EXPERT_OK;
}

EXPORT int share_create(expert_pool* pool, const expert_layout* layout, const share_config* config, uint8_t* block,
                        int32_t core, expert_share** share) {
  if (!share) return EXPERT_BAD_ARGUMENT;
  *share = nullptr;
  share_block at;
  if (!pool || !valid(layout) || !config || !block || reinterpret_cast<uintptr_t>(block) % 64 || core < -1 ||
      core >= kMaxCores || config->layers < 1 || config->experts < 1 || !config->addresses || !config->spent ||
      !config->times || config->silence_ns < 1 || share_block_of(config->rows, config->chosen, layout->hidden, &at))
    return EXPERT_BAD_ARGUMENT;
  try {
    const size_t pairs = size_t(config->rows) * config->chosen;
    auto made = std::unique_ptr<expert_share>(new expert_share);
    made->pool = pool, made->layout = *layout, made->config = *config, made->at = at, made->block = block;
    made->taken.resize(pairs), made->offsets.resize(pairs + 1), made->pair_rows.resize(pairs);
    made->records.resize(pairs);
    *share = made.release();
    (*share)->guard = std::thread(&expert_share::look_after, *share);
    (*share)->thread = std::thread(&expert_share::run, *share, core);
  } catch (const std::bad_alloc&) {
    return EXPERT_NO_MEMORY;
  } catch (const std::system_error&) {
    share_destroy(*share);
    *share = nullptr;
    return EXPERT_NO_THREAD;
  }
  return EXPERT_OK;
}

EXPORT int share_arm(expert_share* share, uint64_t count) {
  if (!share || !count || count > uint64_t(share->config.layers) || share->stopping.load()) return EXPERT_BAD_ARGUMENT;
  // Whoever has seen the last layer done may be here before the thread has said that it is idle.
  while (share->state.load() == SHARE_ARMED &&
         __atomic_load_n(share->word(share->at.done), __ATOMIC_ACQUIRE) == share->count.load()) {
  }
  if (share->state.load() != SHARE_IDLE) return EXPERT_BAD_ARGUMENT;
  __atomic_store_n(share->word(share->at.doorbell), 0, __ATOMIC_RELAXED);
  __atomic_store_n(share->word(share->at.done), 0, __ATOMIC_RELAXED);
  share->count.store(count);
  share->progress_ns.store(now_ns());
  share->state.store(SHARE_ARMED);
  share->orders.fetch_add(1);
  share->ordered.wake_all(share->orders);
  return EXPERT_OK;
}

EXPORT int32_t share_check(const expert_share* share) {
  if (!share) return SHARE_STOPPED;
  return share->state.load();
}

EXPORT void share_stop(expert_share* share) {
  if (!share || share->stopping.load()) return;
  {
    const std::lock_guard<std::mutex> lock(share->ending);
    share->stopping.store(true);
  }
  share->ended.notify_all();
  share->orders.fetch_add(1);
  share->ordered.wake_all(share->orders);
  if (share->guard.joinable()) share->guard.join();
  if (!share->thread.joinable()) return;
  // A thread that does not get on cannot be waited for.
  share->state.load() == SHARE_STUCK ? share->thread.detach() : share->thread.join();
}

EXPORT int32_t share_destroy(expert_share* share) {
  share_stop(share);
  if (!share) return 0;
  if (share->state.load() == SHARE_STUCK) return 1;
  delete share;
  return 0;
}
