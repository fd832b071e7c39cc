#include "arithmetic.h"
namespace experts { extern const Isa kAvx512 = {3, kScalar.quantise, kScalar.dots, kScalar.dots_f32, kScalar.gate, kScalar.combine, kScalar.read}; }
