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
  return total;
}

static expert_layout layout(int format, int h, int i) {
  int g = format == 3 ? 32 : 64;
  int64_t codes = int64_t(i) * h / (format == 4 ? 1 : 2);
  if (format == 1) return {1, h, i, 0, 0, 8 * int64_t(i) * h, 0, 0, 12 * int64_t(i) * h};
  int64_t scales = 3 * codes;
  return {format, h, i, 0, 0, 2 * codes, scales, scales + 4 * i * (h / g), scales + 4 * i * (h / g) + 2 * h * (i / g)};
}

int main() {
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
