#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "numbers.h"
#include "row_cache.h"
#include "rows.h"

namespace rows {
namespace {

constexpr int32_t kAbi = 2;
constexpr int32_t kMostDepth = 256;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kMostPageBytes = 64 << 20;
constexpr uint32_t kMostSlots = 1u << 30;

int64_t read_file(int32_t fd, void* buffer, uint64_t bytes, uint64_t offset) {
  const ssize_t got = pread(fd, buffer, bytes, static_cast<off_t>(offset));
  return got < 0 ? -errno : got;
}

struct Outcome {
  int32_t error;
  uint32_t got;
  bool whole;
};

// A queue through the slots themselves: entering, leaving the middle and leaving the front cost the same.
struct Queue {
  uint32_t first = kNone, last = kNone;
};

class Reader {
 public:
  explicit Reader(const rows_table& table)
      : table_(table), source_(table.source ? table.source : read_file), cache_(slots(table), table.row_bytes) {
    // Signals are for the threads that know about them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    threads_.reserve(table.depth);
    try {
      for (int32_t i = 0; i < table.depth; ++i) {
        threads_.emplace_back([this] { work(); });
        pthread_setname_np(threads_.back().native_handle(), "table-rows");
      }
    } catch (const std::exception&) {
      // fewer reads in flight are slower, not wrong
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~Reader() {
    {
      std::lock_guard<std::mutex> lock(state_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

  bool has_threads() const { return !threads_.empty(); }

  bool known(const int64_t* ids, int64_t count) const {
    return std::all_of(ids, ids + count, [&](int64_t id) { return id >= 0 && uint64_t(id) < table_.rows; });
  }

  void prefetch(const int64_t* ids, int64_t count) {
    std::unique_lock<std::mutex> lock(state_);
    const uint32_t most = cache_.capacity() / 2;
    uint32_t queued = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (const uint32_t found = cache_.find(ids[i]); found != kNone) {
        cache_[found].chances = kAheadChances;
        continue;
      }
      const uint32_t slot = cache_.ahead() < most ? cache_.take(ids[i]) : kNone;
      if (slot == kNone) {
        ++counters_.dropped;
        continue;
      }
      cache_.set_ahead(slot);
      enqueue(slot, false);
      ++queued;
    }
    counters_.prefetched += queued;
    wake(queued, lock);
  }

  // put(n, bytes) is given row n of `ids`, in their order.
  template <class Put>
  bool get(const int64_t* ids, int64_t count, Put put, rows_fault* fault) {
    std::lock_guard<std::mutex> caller(callers_);
    // Pins are bounded, so that the clock always finds something to give up.
    const int64_t window = std::max<int64_t>(1, cache_.capacity() / 4);
    std::vector<uint32_t> pinned(std::min(window, count));  // places begin..end-1 of ids, round and round
    std::unique_lock<std::mutex> lock(state_);
    counters_.asked += count;
    int64_t begin = 0, end = 0;
    while (begin < count) {
      const uint32_t before = in_flight_;
      for (; end < count && end - begin < window; ++end) {
        const uint32_t slot = pin(ids[end]);
        if (slot == kNone) break;
        pinned[end % window] = slot;
      }
      if (in_flight_ > before) {
        wake(in_flight_ - before, lock);
        lock.lock();
      }
      if (begin == end) {  // every slot is being read for somebody else
        wait(lock, kNone);
        continue;
      }
      const uint32_t slot = pinned[begin % window];
      if (under_way(slot)) {
        // One wake for many rows: the last one, or the middle one where more are still to be asked for.
        const uint32_t later = pinned[(end == count ? end - 1 : begin + (end - begin) / 2) % window];
        wait(lock, under_way(later) ? later : slot);
        continue;
      }
      if (cache_[slot].state == FAILED) {
        const Slot& s = cache_[slot];
        *fault = {s.id, page_offset(s.id), s.got, s.error, 0};
        for (; begin < end; ++begin) unpin(pinned[begin % window]);
        return false;
      }
      put(begin, cache_.bytes(slot));
      unpin(slot);
      ++begin;
    }
    return true;
  }

  // `get` where nobody has to be waited for; else false, and nothing has changed.
  template <class Put>
  bool get_at_once(const int64_t* ids, int64_t count, Put put) {
    if (getpid() != process_) return false;
    const std::unique_lock<std::mutex> caller(callers_, std::try_to_lock);
    if (!caller) return false;
    const std::lock_guard<std::mutex> lock(state_);
    // Between two windows nothing of this is in a processor's caches: what will be read is sent for first.
    for (int64_t i = 0; i < count; ++i) cache_.expect(ids[i]);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t slot = cache_.find(ids[i]);
      if (slot == kNone || cache_[slot].state != READY) return false;
      cache_.expect_bytes(slot);
    }
    counters_.asked += count;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t slot = pin(ids[i]);
      put(i, cache_.bytes(slot));
      unpin(slot);
    }
    return true;
  }

  uint64_t row_bytes() const { return table_.row_bytes; }

  void forget() {
    std::lock_guard<std::mutex> lock(state_);
    cache_.new_epoch();
    while (later_.first != kNone) drop(later_.first);
    if (waiting_ && waiting_for_ == kNone) notify();
  }

  void count(rows_counters* out) {
    std::lock_guard<std::mutex> lock(state_);
    *out = counters_;
    out->capacity_rows = cache_.capacity();
    out->cached_rows = cache_.used() - in_flight_;
    out->in_flight = in_flight_;
  }

 private:
  static uint32_t slots(const rows_table& table) {
    const uint64_t wanted = std::min(table.cache_bytes / RowCache::slot_bytes(table.row_bytes), table.rows);
    return static_cast<uint32_t>(
        std::min<uint64_t>(std::max<uint64_t>(wanted, 4 * uint64_t(table.depth)), kMostSlots));
  }

  uint64_t page_offset(int64_t id) const {
    return table_.offset + uint64_t(id) / table_.rows_per_page * table_.page_bytes;
  }

  Queue& queue(bool urgent) { return urgent ? now_ : later_; }

  void enqueue(uint32_t slot, bool urgent) {
    Slot& s = cache_[slot];
    Queue& q = queue(urgent);
    s.state = QUEUED;
    s.urgent = urgent;
    s.previous = q.last;
    s.next = kNone;
    (q.last == kNone ? q.first : cache_[q.last].next) = slot;
    q.last = slot;
    ++in_flight_;
  }

  void dequeue(uint32_t slot) {
    Slot& s = cache_[slot];
    Queue& q = queue(s.urgent);
    (s.previous == kNone ? q.first : cache_[s.previous].next) = s.next;
    (s.next == kNone ? q.last : cache_[s.next].previous) = s.previous;
    --in_flight_;
  }

  void drop(uint32_t slot) {
    dequeue(slot);
    cache_.give_back(slot);
  }

  // The slot of an id, on its way if it was not there, and held until it is unpinned; kNone when there is no room.
  uint32_t pin(int64_t id) {
    uint32_t slot = cache_.find(id);
    const bool fresh = slot == kNone;
    if (fresh) {
      slot = cache_.take(id);
      if (slot == kNone) return kNone;
      enqueue(slot, true);
    }
    Slot& s = cache_[slot];
    const bool was_ahead = cache_.clear_ahead(slot);
    if (was_ahead) {
      s.chances = 0;  // from here on it must earn its place like every other row
    } else if (!fresh) {
      s.chances = s.chances >= kMostChances ? kMostChances : s.chances + 1;
    }
    if (s.state == READY) {
      ++(was_ahead ? counters_.ahead : counters_.hits);
    } else if (s.state == QUEUED && !s.urgent) {
      dequeue(slot);
      enqueue(slot, true);
    }
    ++s.pins;
    return slot;
  }

  bool under_way(uint32_t slot) { return cache_[slot].state == QUEUED || cache_[slot].state == READING; }

  void unpin(uint32_t slot) {
    Slot& s = cache_[slot];
    if (--s.pins) return;
    if (s.state == FAILED) cache_.give_back(slot);
    if (s.state == QUEUED) drop(slot);
  }

  void wait(std::unique_lock<std::mutex>& lock, uint32_t slot) {
    const auto began = std::chrono::steady_clock::now();
    waiting_ = true;
    waiting_for_ = slot;
    done_.wait(lock, [this] { return !waiting_; });
    counters_.wait_ns += std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count();
  }

  // Gives the lock back first: whoever wakes would only wait for it.
  void wake(uint32_t reads, std::unique_lock<std::mutex>& lock) {
    const uint32_t idle = idle_;
    lock.unlock();
    if (reads >= idle) {
      if (idle) work_.notify_all();
      return;
    }
    for (; reads; --reads) work_.notify_one();
  }

  void work() {
    const std::unique_ptr<uint8_t[], Free> page(static_cast<uint8_t*>(aligned_alloc(kPage, table_.page_bytes)));
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
      ++idle_;
      work_.wait(lock, [this] { return stopping_ || now_.first != kNone || later_.first != kNone; });
      --idle_;
      if (stopping_) return;
      const uint32_t slot = now_.first != kNone ? now_.first : later_.first;
      dequeue(slot);
      ++in_flight_;
      cache_[slot].state = READING;
      const int64_t id = cache_[slot].id;
      lock.unlock();
      const Outcome outcome = page ? read(page.get(), id) : Outcome{ENOMEM, 0, false};
      // While READING the bytes are this thread's alone.
      if (outcome.whole) memcpy(cache_.bytes(slot), page.get() + place(id), table_.row_bytes);
      lock.lock();
      finish(slot, outcome);
    }
  }

  uint64_t place(int64_t id) const { return uint64_t(id) % table_.rows_per_page * table_.row_bytes; }

  // Reads until the row is whole. A direct read must start on a page, so what a short one left is read again from the
  // last page boundary; no progress means that the file ends.
  Outcome read(uint8_t* page, int64_t id) const {
    const uint64_t needed = place(id) + table_.row_bytes;
    uint64_t had = 0;
    for (uint64_t at = 0; had < needed; at = had / kPage * kPage) {
      const int64_t got = source_(table_.fd, page + at, table_.page_bytes - at, page_offset(id) + at);
      if (got == -EINTR) continue;
      if (got < 0) return {static_cast<int32_t>(-got), static_cast<uint32_t>(had), false};
      if (uint64_t(got) > table_.page_bytes - at) return {EIO, static_cast<uint32_t>(had), false};
      if (at + uint64_t(got) <= had) return {0, static_cast<uint32_t>(had), false};
      had = at + uint64_t(got);
    }
    return {0, static_cast<uint32_t>(had), true};
  }

  void finish(uint32_t slot, const Outcome& outcome) {
    Slot& s = cache_[slot];
    --in_flight_;
    ++counters_.reads;
    counters_.read_bytes += outcome.got;
    if (outcome.whole) {
      s.state = READY;
    } else if (s.pins) {
      s.state = FAILED;
      s.error = outcome.error;
      s.got = outcome.got;
    } else {
      cache_.give_back(slot);  // whoever asks for the row will read it again, and hear of it then
    }
    if (waiting_ && (waiting_for_ == slot || waiting_for_ == kNone)) notify();
  }

  void notify() {
    waiting_ = false;
    done_.notify_one();
  }

  const rows_table table_;
  const rows_source source_;
  const pid_t process_ = getpid();
  std::mutex callers_;  // held by the running get
  std::mutex state_;    // guards everything below
  RowCache cache_;
  Queue now_, later_;  // ids that get waits for, ids ahead of it
  rows_counters counters_{};
  uint32_t in_flight_ = 0, idle_ = 0;
  uint32_t waiting_for_ = kNone;  // a slot, or kNone for any
  bool waiting_ = false, stopping_ = false;
  std::condition_variable work_, done_;
  std::vector<std::thread> threads_;
};

bool sound(const rows_table& t) {
  return t.depth >= 1 && t.depth <= kMostDepth && t.rows >= 1 && t.rows <= uint64_t(1) << 62 && t.row_bytes >= 1 &&
         t.page_bytes % kPage == 0 && t.page_bytes >= kPage && t.page_bytes <= kMostPageBytes && t.offset % kPage == 0 &&
         t.rows_per_page >= 1 && t.row_bytes <= t.page_bytes && t.rows_per_page <= t.page_bytes / t.row_bytes;
}

}  // namespace
}  // namespace rows

int32_t rows_abi() { return rows::kAbi; }

int32_t rows_open(const rows_table* table, void** reader) {
  if (!table || !reader || !rows::sound(*table)) return ROWS_BAD_ARGUMENT;
  try {
    auto made = std::make_unique<rows::Reader>(*table);
    if (!made->has_threads()) return ROWS_NO_THREADS;
    *reader = made.release();
    return ROWS_OK;
  } catch (const std::bad_alloc&) {
    return ROWS_NO_MEMORY;
  }
}

void rows_close(void* reader) { delete static_cast<rows::Reader*>(reader); }

int32_t rows_prefetch(void* reader, const int64_t* ids, int64_t count) {
  auto* r = static_cast<rows::Reader*>(reader);
  if (count < 0 || !r->known(ids, count)) return ROWS_BAD_ARGUMENT;
  r->prefetch(ids, count);
  return ROWS_OK;
}

int32_t rows_get(void* reader, const int64_t* ids, int64_t count, uint8_t* out, rows_fault* fault) {
  auto* r = static_cast<rows::Reader*>(reader);
  if (count < 0 || !fault || !r->known(ids, count)) return ROWS_BAD_ARGUMENT;
  try {
    const uint64_t bytes = r->row_bytes();
    const auto put = [=](int64_t n, const uint8_t* row) { memcpy(out + n * bytes, row, bytes); };
    return r->get(ids, count, put, fault) ? ROWS_OK : ROWS_FAULT;
  } catch (const std::bad_alloc&) {
    return ROWS_NO_MEMORY;
  }
}

int32_t rows_take(const rows_taking* taking, int64_t count, int32_t wait) {
  auto* r = static_cast<rows::Reader*>(*taking->reader);
  if (!r) return ROWS_ABSENT;
  const int32_t kind = taking->kind;
  if (count < 0 || kind < ROWS_BF16 || kind > ROWS_F32 || !r->known(taking->ids, count)) return ROWS_BAD_ARGUMENT;
  const uint64_t columns = r->row_bytes() / (kind == ROWS_F32 ? 4 : 2);
  const auto put = [=](int64_t n, const uint8_t* row) { rows::numbers(row, columns, kind, taking->out + n * columns); };
  try {
    if (!wait) return r->get_at_once(taking->ids, count, put) ? ROWS_OK : ROWS_ABSENT;
    rows_fault fault;
    return r->get(taking->ids, count, put, &fault) ? ROWS_OK : ROWS_FAULT;
  } catch (const std::bad_alloc&) {
    return ROWS_NO_MEMORY;
  }
}

void rows_forget(void* reader) { static_cast<rows::Reader*>(reader)->forget(); }

void rows_count(void* reader, rows_counters* counters) { static_cast<rows::Reader*>(reader)->count(counters); }
