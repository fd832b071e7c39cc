// Persistent threads that share work units. Not here: what a unit is.
//
// Units of a run come in one or two stages. Every thread has a stretch of each stage's units, takes those in order,
// then what is left of the others' stretches: neighbouring units lie side by side in memory, and a stream that goes on
// is read a tenth faster than one that begins anew with every unit.
//
// Protocol of one run (words of Pool, who writes them):
//
//   seat    of each thread, on lines of its own:
//     state   caller, worker  idle -> open (caller) -> inside (worker) -> idle (worker), or open -> idle (caller)
//     taken   any thread      units of its stretch, by stage, that somebody has taken, under the number of their run:
//                             nobody sets it back, which would take every one of these lines from its thread
//   epoch   caller          +1 per run; workers that sleep wait on it (futex)
//
//   caller: writes the run, opens every seat (release), epoch + 1, wakes sleepers, works; when no unit is left it takes
//           back the seats that are still open and waits until all are idle.
//   worker: enters by its seat's open -> inside (acquire), takes units until none is left, leaves (release).
//
// While each thread has units of its own, nobody else touches its lines: beginning, taking and ending cost no more with
// many threads than with few.
//
// Invariant: when run() returns every unit is done and no worker touches the run. A worker that wakes late finds its
// stretch taken and its seat idle, so a core that the system took away delays at most the unit its thread has begun.
// Threads do not survive fork(): a child must make its own pool.
#pragma once
#include <stdint.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace experts {

constexpr int kMaxThreads = 256;
constexpr int kMaxCores = 1024;  // CPU_SETSIZE

// Spins for some ten microseconds, then sleeps until `word` is (or is no longer) a value.
// Whoever stores the value that ends a wait calls wake_all.
class Wait {
 public:
  void until_equal(const std::atomic<uint32_t>& word, uint32_t wanted);
  void until_changed(const std::atomic<uint32_t>& word, uint32_t seen);
  void wake_all(const std::atomic<uint32_t>& word);

 private:
  std::atomic<uint32_t> sleepers_{0};
};

class Pool {
 public:
  using Unit = void (*)(void* run, uint32_t unit);

  // cores: logical CPUs to pin the workers to (cores[0] is the caller's, left alone), or null.
  // Throws std::system_error when a thread cannot be started.
  Pool(const int32_t* cores, int32_t threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Calls unit(run, 0..units-1), each once. Those from `first` on begin when all before have begun, so that they may
  // wait for these, which wait for none.
  // The caller begins by begin(run), when the others have been called: units may wait for that, too.
  void run(Unit unit, void* run, uint32_t units, uint32_t first, void (*begin)(void* run) = nullptr);
  void run(Unit unit, void* run, uint32_t units) { this->run(unit, run, units, units); }
  // While true, workers that wait spin instead of sleeping: runs come at short distances on cores that are theirs.
  void hot(bool on) {
    if (hot_.load(std::memory_order_relaxed) != on) hot_.store(on, std::memory_order_relaxed);
  }
  // Hot from here on, and workers that sleep wake up now instead of in the next run. As run(): one caller at a time.
  void rouse();
  int threads() const { return static_cast<int>(threads_); }

  std::mutex callers;  // held by whoever uses run()

 private:
  enum : uint32_t { kIdle, kOpen, kInside };
  // Two lines: the one beside is often fetched with the one that is asked for.
  struct alignas(128) Seat {
    std::atomic<uint32_t> state{kIdle};
    std::atomic<uint64_t> taken[2]{{0}, {0}};  // number << 32 | count
  };

  // The next of a stretch's units, `size` where none is left.
  uint32_t take(std::atomic<uint64_t>& taken, uint32_t size);
  void work(uint32_t me);
  void worker(uint32_t me, int32_t core);
  void stop();

  alignas(64) std::atomic<uint32_t> epoch_{0};
  Wait started_;
  alignas(64) std::atomic<bool> stopping_{false}, hot_{false};  // what waiting workers look at beside their seats
  alignas(64) Unit unit_ = nullptr;
  void* run_ = nullptr;
  uint32_t counts_[2]{0, 0};  // units of each stage
  uint32_t number_ = 0;       // of the run
  Wait left_;
  const uint32_t threads_;
  const std::unique_ptr<Seat[]> seats_;  // the caller's is the first
  std::vector<std::thread> workers_;
};

}  // namespace experts
