// Persistent threads that share one counter of work units. Not here: what a unit is.
//
// Protocol of one run (words of Pool, who writes them):
//
//   next   any thread      the next unit nobody has taken
//   gate   caller, workers bit 31 open; low bits: workers inside the run
//   epoch  caller          +1 per run; sleeping workers wait on it (futex)
//
//   caller: writes the run, opens the gate (release), epoch + 1, wakes sleepers, works, closes the gate when no unit
//           is left, waits until nobody is inside.
//   worker: enters only through an open gate (acquire), takes units until none is left, leaves (release).
//
// Invariant: when run() returns every unit is done and no worker touches the run. A worker that wakes late finds the
// gate closed, so a core that the system took away delays at most the units its thread has already begun.
// Threads do not survive fork(): a child must make its own pool.
#pragma once
#include <stdint.h>

#include <atomic>
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

  // Calls unit(run, 0..units-1), each once, in ascending order of start. A unit may wait for an earlier unit only.
  void run(Unit unit, void* run, uint32_t units);
  // While true, workers that wait spin instead of sleeping: runs come at short distances on cores that are theirs.
  void hot(bool on) {
    if (hot_.load(std::memory_order_relaxed) != on) hot_.store(on, std::memory_order_relaxed);
  }
  // Hot from here on, and workers that sleep wake up now instead of in the next run. As run(): one caller at a time.
  void rouse();
  int threads() const { return 1 + static_cast<int>(workers_.size()); }

  std::mutex callers;  // held by whoever uses run()

 private:
  void work();
  void worker(int32_t core);
  void stop();
  bool enter();

  static constexpr uint32_t kOpen = 1u << 31;
  alignas(64) std::atomic<uint32_t> next_{0};
  alignas(64) std::atomic<uint32_t> gate_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<bool> stopping_{false}, hot_{false};
  alignas(64) Unit unit_ = nullptr;  // not on the line that waiting workers look at
  void* run_ = nullptr;
  uint32_t units_ = 0;
  Wait started_, left_;
  std::vector<std::thread> workers_;
};

}  // namespace experts
