// The rows in memory: slots of one row each, found by id, given up by a clock. No threads and no files here.
//
// A slot is EMPTY, QUEUED (an id waits to be read), READING (a thread writes its bytes), READY, or FAILED.
// Only READY slots without pins can be given up. The clock's hand takes the first such slot whose `chances` are used
// up, and takes one chance from every other it passes. A row that was asked for once has none and earns one each time it
// is asked for again, up to three; a prefetched row has more than that until it is asked for, so that it does not go
// before it was of use.
#pragma once
#include <stdint.h>
#include <stdlib.h>

#include <memory>
#include <new>

namespace rows {

constexpr uint32_t kNone = UINT32_MAX;
constexpr uint64_t kExpectedBytes = 512;  // of a row: a processor sends for the rest itself
constexpr uint8_t kMostChances = 3, kAheadChances = kMostChances + 1;

enum State : uint8_t { EMPTY, QUEUED, READING, READY, FAILED };

struct Slot {
  int64_t id;
  uint32_t previous, next;  // of its queue while QUEUED; next also links free slots
  uint32_t pins;            // places of the running rows_get that need it
  uint32_t ahead_of;        // the epoch in which it was prefetched and not yet asked for, else 0
  int32_t error;
  uint32_t got;             // with FAILED: bytes that were there
  State state;
  uint8_t chances;
  bool urgent;              // which queue it is in
};

struct Free {
  void operator()(void* p) const { free(p); }
};

// Untouched memory of these arrays costs nothing: calloc hands out pages that the kernel fills when they are written.
template <class T>
std::unique_ptr<T[], Free> zeroed(uint64_t count) {
  auto* p = static_cast<T*>(calloc(count, sizeof(T)));
  if (!p) throw std::bad_alloc();
  return std::unique_ptr<T[], Free>(p);
}

class RowCache {
 public:
  static uint64_t slot_bytes(uint64_t row_bytes) { return row_bytes + sizeof(Slot) + 4 * sizeof(uint32_t); }

  RowCache(uint32_t capacity, uint64_t row_bytes)
      : capacity_(capacity), row_bytes_(row_bytes), mask_(places(capacity) - 1),
        slots_(zeroed<Slot>(capacity)), places_(zeroed<uint32_t>(mask_ + 1)),
        bytes_(zeroed<uint8_t>(capacity * row_bytes)) {}

  Slot& operator[](uint32_t slot) { return slots_[slot]; }
  uint8_t* bytes(uint32_t slot) { return bytes_.get() + slot * row_bytes_; }
  uint32_t capacity() const { return capacity_; }
  uint32_t used() const { return used_; }

  uint32_t find(int64_t id) const {
    for (uint64_t p = home(id);; p = (p + 1) & mask_) {
      if (!places_[p]) return kNone;
      if (slots_[places_[p] - 1].id == id) return places_[p] - 1;
    }
  }

  // What `find` and whoever reads the bytes will want soon.
  void expect(int64_t id) const { __builtin_prefetch(&places_[home(id)]); }
  void expect_bytes(uint32_t slot) const {
    const uint8_t* first = bytes_.get() + slot * row_bytes_;
    for (uint64_t at = 0; at < row_bytes_ && at < kExpectedBytes; at += 64) __builtin_prefetch(first + at);
  }

  // An EMPTY slot for an id that is not there; kNone when everything is pinned or under way.
  uint32_t take(int64_t id) {
    uint32_t slot = free_;
    if (slot != kNone) {
      free_ = slots_[slot].next;
    } else if (fresh_ < capacity_) {
      slot = fresh_++;
    } else if ((slot = evict()) == kNone) {
      return kNone;
    }
    slots_[slot] = Slot{};
    slots_[slot].id = id;
    uint64_t p = home(id);
    while (places_[p]) p = (p + 1) & mask_;
    places_[p] = slot + 1;
    ++used_;
    return slot;
  }

  void give_back(uint32_t slot) {
    remove(slot);
    slots_[slot].next = free_;
    free_ = slot;
  }

  // Slots that were prefetched in this epoch and not asked for since; `new_epoch` makes them ordinary ones.
  uint32_t ahead() const { return ahead_; }
  void set_ahead(uint32_t slot) {
    slots_[slot].ahead_of = epoch_;
    slots_[slot].chances = kAheadChances;
    ++ahead_;
  }
  bool clear_ahead(uint32_t slot) {
    const bool was = slots_[slot].ahead_of == epoch_;
    slots_[slot].ahead_of = 0;
    ahead_ -= was;
    return was;
  }
  void new_epoch() {
    if (++epoch_ == 0) epoch_ = 1;
    ahead_ = 0;
  }

 private:
  static uint64_t places(uint32_t capacity) {
    uint64_t n = 8;
    while (n < 2 * uint64_t(capacity)) n *= 2;
    return n;
  }

  uint64_t home(int64_t id) const {
    uint64_t x = static_cast<uint64_t>(id) + 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (x ^ (x >> 31)) & mask_;
  }

  uint32_t evict() {
    for (uint64_t steps = uint64_t(kAheadChances + 1) * capacity_ + 1; steps; --steps) {
      const uint32_t slot = hand_;
      hand_ = hand_ + 1 == capacity_ ? 0 : hand_ + 1;
      Slot& s = slots_[slot];
      if (s.state != READY || s.pins) continue;
      if (s.chances) {
        --s.chances;
        continue;
      }
      remove(slot);
      return slot;
    }
    return kNone;
  }

  // Takes the slot's id out of the table; later entries of the same chain move up.
  void remove(uint32_t slot) {
    uint64_t hole = home(slots_[slot].id);
    while (places_[hole] != slot + 1) hole = (hole + 1) & mask_;
    for (uint64_t p = (hole + 1) & mask_; places_[p]; p = (p + 1) & mask_) {
      const uint64_t wanted = home(slots_[places_[p] - 1].id);
      if (((p - wanted) & mask_) >= ((p - hole) & mask_)) {
        places_[hole] = places_[p];
        hole = p;
      }
    }
    places_[hole] = 0;
    clear_ahead(slot);
    slots_[slot].state = EMPTY;
    --used_;
  }

  const uint32_t capacity_;
  const uint64_t row_bytes_;
  const uint64_t mask_;
  std::unique_ptr<Slot[], Free> slots_;
  std::unique_ptr<uint32_t[], Free> places_;  // open addressing: slot + 1, or 0
  std::unique_ptr<uint8_t[], Free> bytes_;
  uint32_t free_ = kNone, fresh_ = 0, hand_ = 0, used_ = 0, ahead_ = 0, epoch_ = 1;
};

}  // namespace rows
