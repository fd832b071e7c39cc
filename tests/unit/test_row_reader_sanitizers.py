"""The native row reader under the address, undefined-behaviour and thread sanitizers, through its C ABI alone."""

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "shared_experts" / "native_rows"

DRIVER = r"""
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <thread>
#include <vector>
#include "rows.h"

static const uint64_t kRow = 1000, kPerPage = 4, kPages = 50, kRows = kPages * kPerPage;

static int64_t odd(int32_t fd, void* buffer, uint64_t bytes, uint64_t offset) {
  if (offset / 4096 == 7) return -EIO;
  if (offset / 4096 == 9) return pread(fd, buffer, 100, offset);
  return pread(fd, buffer, bytes, offset);
}

static void ask(void* reader, const std::vector<uint8_t>& file, unsigned seed, bool breaks) {
  for (int turn = 0; turn < 300; ++turn) {
    std::vector<int64_t> ids(rand_r(&seed) % 40), later(rand_r(&seed) % 40);
    for (auto& id : ids) id = rand_r(&seed) % kRows;
    for (auto& id : later) id = rand_r(&seed) % kRows;
    std::vector<uint8_t> out(ids.size() * kRow);  // exactly its size, so that one byte too many is seen
    if (rows_prefetch(reader, later.data(), later.size())) abort();
    rows_fault fault;
    bool bad = false;
    for (int64_t id : ids) bad |= breaks && (id / 4 == 7 || id / 4 == 9);
    const int32_t code = rows_get(reader, ids.data(), ids.size(), out.data(), &fault);
    if (code != (bad ? ROWS_FAULT : ROWS_OK)) abort();
    if (bad && (fault.offset / 4096 != 7 || fault.error != EIO) && (fault.offset / 4096 != 9 || fault.got != 100))
      abort();
    for (size_t i = 0; !bad && i < ids.size(); ++i)
      if (memcmp(&out[i * kRow], &file[ids[i] / 4 * 4096 + ids[i] % 4 * kRow], kRow)) abort();
    std::vector<float> numbers(ids.size() * kRow / 2);
    const rows_taking taking = {&reader, ids.data(), numbers.data(), turn % 3, 0};
    int32_t took = rows_take(&taking, ids.size(), 0);
    if (took == ROWS_ABSENT) took = rows_take(&taking, ids.size(), 1);
    if (took != (bad ? ROWS_FAULT : ROWS_OK)) abort();
    for (size_t i = 0; !bad && turn % 3 == ROWS_F32 && i < ids.size(); ++i)
      if (memcmp(&numbers[i * kRow / 4], &file[ids[i] / 4 * 4096 + ids[i] % 4 * kRow], kRow)) abort();
    if (turn % 7 == 0) rows_forget(reader);
    rows_counters counters;
    rows_count(reader, &counters);
    if (counters.cached_rows > counters.capacity_rows) abort();
  }
}

int main(int, char** argv) {
  std::vector<uint8_t> file(kPages * 4096);
  unsigned seed = 1;
  for (auto& b : file) b = rand_r(&seed);
  FILE* f = fopen(argv[1], "w+");
  if (fwrite(file.data(), 1, file.size(), f) != file.size() || fflush(f)) return 3;
  for (int depth : {1, 5})
    for (uint64_t cache : {uint64_t(0), uint64_t(60000), uint64_t(1) << 20})
      for (bool breaks : {false, true}) {
        const rows_table table = {fileno(f), depth, kRows, 0, kRow, kPerPage, 4096, cache, breaks ? odd : nullptr};
        void* reader;
        if (rows_open(&table, &reader)) return 4;
        std::thread other(ask, reader, std::cref(file), 5u, breaks);
        ask(reader, file, 6, breaks);
        other.join();
        const int64_t all[] = {0, 20, 40, 60, 80, 100};
        rows_prefetch(reader, all, 6);
        rows_close(reader);  // with reads under way
      }
  uint64_t offsets[40], took[40];
  for (int i = 0; i < 40; ++i) offsets[i] = i * 4096;
  if (rows_read_pages(fileno(f), offsets, 40, 4096, 3, took)) return 5;
  fclose(f);
  puts("clean");
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_reader_is_clean(sanitizers, tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    (tmp_path / "driver.cpp").write_text(DRIVER)
    program = tmp_path / "driver"
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]
    built = subprocess.run(
        [compiler, *flags, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", f"-I{NATIVE}",
         *map(str, sorted(NATIVE.glob("*.cpp"))), str(tmp_path / "driver.cpp"), "-o", str(program)],
        capture_output=True, text=True,
    )  # fmt: skip
    if "cannot find" in built.stderr:
        pytest.skip("this compiler has no sanitizer libraries")
    assert built.returncode == 0, built.stderr[-4000:]
    done = subprocess.run([str(program), str(tmp_path / "rows")], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-4000:]
