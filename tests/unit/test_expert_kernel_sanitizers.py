"""The native expert kernel under the address, undefined-behaviour and thread sanitizers, through its C ABI alone."""

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "lanes" / "native"

DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <thread>
#include <vector>
#include "experts.h"
#include "ngram.h"
#include "share.h"

static std::vector<float> call(expert_pool* pool, const expert_layout& l, int rows, unsigned seed) {
  // Every buffer has exactly its size, so that one byte too many is seen.
  std::vector<std::vector<uint8_t>> records(3, std::vector<uint8_t>(l.record_bytes));
  // q4 codes of any value, q8 codes of both signs, scales that are finite.
  for (auto& r : records)
    for (auto& b : r) b = &b - r.data() < l.gate_up_scales ? rand_r(&seed) : rand_r(&seed) % 60;
  const uint8_t* at[3] = {records[0].data(), records[1].data(), records[2].data()};
  std::vector<int32_t> offsets = {0, rows, rows, 3 * rows}, index;
  for (int p = 0; p < 3 * rows; ++p) index.push_back(rand_r(&seed) % rows);
  std::vector<float> x(rows * l.hidden), out(3 * rows * l.hidden);
  for (auto& v : x) v = rand_r(&seed) % 2000 / 1000.0f - 1;
  if (expert_run(pool, &l, 3, at, offsets.data(), index.data(), rows, x.data(), out.data())) abort();
  uint64_t sum;
  if (expert_read(pool, &l, 3, at, &sum)) abort();
  std::vector<float> weights(3 * rows, 0.5f), total(rows * l.hidden);
  std::vector<int32_t> chosen(3 * rows);
  for (auto& c : chosen) c = rand_r(&seed) % (3 * rows);
  const int pairs = 3 * rows;
  if (expert_combine(pool, rows, 3, l.hidden, chosen.data(), pairs, weights.data(), out.data(), total.data())) abort();
  for (int few : {1, 3, 4, 7}) {
    std::vector<float> narrow(few * l.intermediate, 0.25f), matrix(l.hidden * l.intermediate, 0.5f);
    std::vector<float> product(few * l.hidden);
    if (expert_product(pool, few, l.hidden, l.intermediate, narrow.data(), matrix.data(), product.data())) abort();
  }
  return total;
}

static expert_layout layout(int format, int h, int i) {
  int g = format == 3 ? 32 : 64;
  int64_t codes = int64_t(i) * h / (format == 4 ? 1 : 2);
  if (format == 1) return {1, h, i, 0, 0, 8 * int64_t(i) * h, 0, 0, 12 * int64_t(i) * h};
  int64_t scales = 3 * codes;
  return {format, h, i, 0, 0, 2 * codes, scales, scales + 4 * i * (h / g), scales + 4 * i * (h / g) + 2 * h * (i / g)};
}

// The GPU's side by this thread, through windows, a stop in flight and a silence.
static int handshake() {
  const expert_layout l = layout(3, 64, 32);
  const int layers = 4, experts = 9, rows = 3, chosen = 3, pairs = rows * chosen;
  std::vector<uint8_t> records(experts * 8192 + 64);
  uint8_t* first = records.data() + 64 - reinterpret_cast<uintptr_t>(records.data()) % 64;
  std::vector<uint64_t> addresses;
  for (int i = 0; i < layers * experts; ++i)
    addresses.push_back(reinterpret_cast<uintptr_t>(first + i % experts * 8192));
  std::vector<int64_t> spent((pairs + 1) * 2), times(layers * 2);
  share_block at;
  if (share_block_of(rows, chosen, l.hidden, &at)) return 10;
  auto* block = static_cast<uint8_t*>(std::aligned_alloc(64, at.bytes));
  memset(block, 0, at.bytes);
  auto* bell = reinterpret_cast<uint64_t*>(block + at.doorbell);
  auto* done = reinterpret_cast<uint64_t*>(block + at.done);
  for (int64_t silence : {int64_t{20'000'000'000}, int64_t{3'000'000}}) {
    expert_pool* pool;
    expert_share* share;
    if (expert_pool_create(1, nullptr, 2, &pool)) return 11;
    share_config config{layers, experts, rows, chosen, addresses.data(), silence, spent.data(), nullptr};
    if (share_create(pool, &l, &config, block, -1, &share) != EXPERT_BAD_ARGUMENT) return 16;
    config.times = times.data();
    if (share_create(pool, &l, &config, block, -1, &share)) return 12;
    float sum = 0;
    for (int window = 0; window < 5 && silence > 5'000'000; ++window) {
      if (share_arm(share, layers)) return 13;
      for (uint64_t n = 1; n <= layers; ++n) {
        const int32_t head[2] = {int32_t(n) - 1, 1 + window % rows};
        memcpy(block + at.layer, head, 8);
        for (int p = 0; p < pairs; ++p) {
          const int32_t id = p % chosen * 2 + p / chosen;
          reinterpret_cast<int32_t*>(block + at.ids)[p] = (window + int(n) + id) % 3 ? id : ~id;  // some are the GPU's
        }
        for (int i = 0; i < rows * l.hidden; ++i) reinterpret_cast<float*>(block + at.x)[i] = float(i % 7);
        __atomic_store_n(bell, n, __ATOMIC_RELEASE);
        while (__atomic_load_n(done, __ATOMIC_ACQUIRE) < n) std::this_thread::yield();
        sum += *reinterpret_cast<float*>(block + at.y);
      }
    }
    if (share_arm(share, layers)) return 14;
    if (silence < 5'000'000)
      while (__atomic_load_n(done, __ATOMIC_ACQUIRE) != SHARE_RELEASED) std::this_thread::yield();
    share_stop(share);
    const int32_t state = share_check(share);
    if (state != (silence < 5'000'000 ? SHARE_SILENT : SHARE_STOPPED) || sum != sum) return 15;
    share_destroy(share);
    expert_pool_destroy(pool);
  }
  std::free(block);
  int64_t timed = 0;
  for (int count = 0; count <= pairs; ++count) timed += spent[2 * count];
  if (timed != 5 * layers) return 17;
  for (int n = 0; n < layers; ++n)
    if (times[2 * n] > times[2 * n + 1] || (n && times[2 * n] < times[2 * n - 1])) return 18;
  return 0;
}

static int row_ids() {
  const std::vector<int64_t> multipliers = {INT64_MAX, INT64_MIN, -3}, sizes = {1, INT64_MAX, 7, 1000};
  const std::vector<int64_t> offsets = {INT64_MAX, 5, 0, 0}, tokens = {INT64_MIN, 9, INT64_MAX, -1, 4};
  std::vector<int64_t> ids(3 * 4);
  const ngram_hash hash = {multipliers.data(), sizes.data(), offsets.data(), 9, 3, 2};
  ngram_row_ids(&hash, tokens.data(), 3, ids.data());
  for (int row = 0; row < 3; ++row)
    if (ids[4 * row] != INT64_MAX || ids[4 * row + 2] < 0 || ids[4 * row + 2] > 6) return 30;
  return 0;
}

int main() {
  if (const int code = row_ids()) return code;
  if (const int failed = handshake()) return failed;
  for (int isa = 1; isa <= expert_best_isa(); ++isa)
    for (const expert_layout& l : {layout(1, 21, 13), layout(2, 320, 704), layout(3, 288, 96), layout(3, 32, 32),
                                   layout(4, 320, 704), layout(4, 64, 64)})
      for (int threads : {1, 3}) {
        expert_pool* pool;
        if (expert_pool_create(isa, nullptr, threads, &pool)) return 3;
        std::vector<std::vector<float>> got(2);
        auto caller = [&](int n) { for (int rows : {1, 5, 18}) got[n] = call(pool, l, rows, 7); };
        std::thread other(caller, 1);
        caller(0);
        other.join();
        expert_pool_destroy(pool);
        if (memcmp(got[0].data(), got[1].data(), 4 * got[0].size())) return 4;
      }
  puts("clean");
}
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # the compiler takes minutes where cores are shared
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_kernel_is_clean(sanitizers, tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    (tmp_path / "driver.cpp").write_text(DRIVER)
    program = tmp_path / "driver"
    flags = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra", "-Werror"]
    built = subprocess.run(
        [compiler, *flags, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", f"-I{NATIVE}",
         *map(str, sorted(NATIVE.glob("*.cpp"))), str(tmp_path / "driver.cpp"), "-o", str(program)],
        capture_output=True, text=True,
    )  # fmt: skip
    if "cannot find" in built.stderr:
        pytest.skip("this compiler has no sanitizer libraries")
    assert built.returncode == 0, built.stderr[-4000:]
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr[-4000:]
