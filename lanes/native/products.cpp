// expert_product of experts.h: a few rows times a large fp32 matrix, as decode windows need them.
// Every output is one dots_f32 of the table in use, so it depends on its row and its column alone.
#include <mutex>

#include "handle.h"

using namespace experts;

namespace {

constexpr int64_t kUnit = 1 << 15;   // elements of the matrix that one unit reads, about
constexpr int64_t kAlone = 1 << 18;  // up to here the caller is done before others would have begun

struct Product {
  const Isa* isa;
  int32_t rows, outputs, k, unit_outputs;
  const float *x, *w;
  float* out;
};

void product_unit(void* opaque, uint32_t unit) {
  const Product& p = *static_cast<const Product*>(opaque);
  const int32_t first = static_cast<int32_t>(unit) * p.unit_outputs;
  const int32_t end = std::min(first + p.unit_outputs, p.outputs);
  p.isa->dots_f32(p.k, p.w + int64_t{first} * p.k, end - first, p.x, p.rows, p.out + first, p.outputs);
}

}  // namespace

EXPORT int expert_product(expert_pool* pool, int32_t rows, int32_t outputs, int32_t k, const float* x, const float* w,
                          float* out) {
  if (!pool || rows < 1 || rows > kMaxFewRows || outputs < 1 || outputs > kMaxRows || k < 1 || k > kMaxSize || !x ||
      !w || !out)
    return EXPERT_BAD_ARGUMENT;
  int32_t unit = outputs;
  if (int64_t{outputs} * k > kAlone) unit = static_cast<int32_t>((kUnit / k + 4) / 4 * 4);
  Product product{pool->isa, rows, outputs, k, unit, x, w, out};
  std::lock_guard<std::mutex> lock(pool->pool.callers);
  pool->pool.run(product_unit, &product, static_cast<uint32_t>((outputs + unit - 1) / unit));
  return EXPERT_OK;
}
