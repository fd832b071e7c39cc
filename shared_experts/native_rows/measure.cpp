// The device's own rate: threads that read pages one after another, and nothing else. For measurements only.
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <vector>

#include "rows.h"

int32_t rows_read_pages(int32_t fd, const uint64_t* offsets, int64_t count, uint64_t bytes, int32_t depth,
                        uint64_t* took_ns) {
  std::atomic<int64_t> next{0};
  std::atomic<int32_t> error{0};
  const auto work = [&] {
    void* page = aligned_alloc(4096, bytes);
    if (!page) error = ENOMEM;
    for (int64_t i; page && !error && (i = next.fetch_add(1)) < count;) {
      const auto began = std::chrono::steady_clock::now();
      const ssize_t got = pread(fd, page, bytes, static_cast<off_t>(offsets[i]));
      if (got != static_cast<ssize_t>(bytes)) error = got < 0 ? errno : EIO;
      took_ns[i] = std::chrono::nanoseconds(std::chrono::steady_clock::now() - began).count();
    }
    free(page);
  };
  std::vector<std::thread> threads;
  try {
    threads.reserve(depth);
    for (int32_t i = 0; i < depth; ++i) threads.emplace_back(work);
  } catch (const std::exception&) {
    error = EAGAIN;
  }
  for (std::thread& t : threads) t.join();
  return error;
}
