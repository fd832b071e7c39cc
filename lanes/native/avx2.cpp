#include "arithmetic.h"
namespace experts { extern const Isa kAvx2 = {2, kScalar.quantise, kScalar.dots, kScalar.dots_f32, kScalar.gate, kScalar.combine, kScalar.read}; }
