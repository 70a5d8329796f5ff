#include "linear.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "isa.h"
#include "kernels.h"
#include "thread_pool.h"

namespace baton {
namespace {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kTasksPerThread = 4;  // so that a thread that started late does not hold up the others
constexpr int64_t kRowsPerTask = 8;

int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

const Kernels& kernels() {
  switch (current_isa()) {
    case Isa::kAmx: return kAmxKernels;
    case Isa::kAvx512: return kAvx512Kernels;
    case Isa::kAvx2: return kAvx2Kernels;
    case Isa::kPortable: break;
  }
  return kPortableKernels;
}

// Memory of a thread that grows and is used again.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }
  void* at_least(int64_t num_bytes) {
    if (num_bytes > size_) {
      const int64_t size = rounded_up(num_bytes, kLineBytes);
      void* memory = std::aligned_alloc(kLineBytes, static_cast<size_t>(size));
      if (!memory) throw std::bad_alloc();
      std::free(memory_);
      memory_ = memory;
      size_ = size;
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

thread_local Scratch task_scratch;
thread_local Scratch activation_scratch;

// An odd number of cache lines: rows then fall into different sets of a cache.
int64_t row_bytes(ActivationKind kind, int64_t num_columns) {
  const int64_t num_bytes = rounded_up(kind == ActivationKind::kBf16 ? 2 * num_columns : num_columns, kLineBytes);
  return num_bytes / kLineBytes % 2 ? num_bytes : num_bytes + kLineBytes;
}

int64_t levels_bytes(ActivationKind kind, int64_t num_rows, int64_t num_columns) {
  return rounded_up(num_rows, kSideRows) * row_bytes(kind, num_columns);
}

int64_t num_scales(ActivationKind kind, int64_t num_rows, int64_t num_columns) {
  const int64_t padded = rounded_up(num_rows, kSideRows);
  return kind == ActivationKind::kGroupInt8 ? padded * (num_columns / kGroupSize) : padded;
}

}  // namespace

int64_t activation_bytes(ActivationKind kind, int64_t num_rows, int64_t num_columns) {
  constexpr int64_t kNumArrays = 3;
  return levels_bytes(kind, num_rows, num_columns) + kNumArrays * 4 * num_scales(kind, num_rows, num_columns);
}

Activations activations_over(void* memory, ActivationKind kind, int64_t num_rows, int64_t num_columns) {
  uint8_t* levels = static_cast<uint8_t*>(memory);
  float* scales = reinterpret_cast<float*>(levels + levels_bytes(kind, num_rows, num_columns));
  const int64_t count = num_scales(kind, num_rows, num_columns);
  int32_t* origins = reinterpret_cast<int32_t*>(scales + 2 * count);
  return {kind, num_rows, num_columns, row_bytes(kind, num_columns), levels, scales, scales + count, origins};
}

void quantize(const Source& source, const Activations& activations) {
  const int64_t num_tasks = (activations.num_rows + kRowsPerTask - 1) / kRowsPerTask;
  Pool::instance().parallel(num_tasks, [&](int64_t task) {
    float* scratch = static_cast<float*>(task_scratch.at_least(4 * activations.num_columns));
    const int64_t first = task * kRowsPerTask;
    kernels().quantize_rows(source, activations, first, std::min(first + kRowsPerTask, activations.num_rows), scratch);
  });
}

ActivationKind activation_kind(WeightFormat format) {
  switch (format) {
    case WeightFormat::kW8A8: return ActivationKind::kTokenInt8;
    case WeightFormat::kBf16: return ActivationKind::kBf16;
    case WeightFormat::kW8G32:
    case WeightFormat::kW4A8: break;
  }
  return ActivationKind::kGroupInt8;
}

int64_t panel_bytes(WeightFormat format, int64_t num_inputs) {
  constexpr int64_t kScalesBytes = 2 * kPanelColumns;
  switch (format) {
    case WeightFormat::kW8A8: return kPanelColumns * (rounded_up(num_inputs, 64) + 8);
    case WeightFormat::kW8G32: return num_inputs / kGroupSize * (kPanelColumns * kGroupSize + kScalesBytes);
    case WeightFormat::kW4A8: return num_inputs / kGroupSize * (kPanelColumns * kGroupSize / 2 + 2 * kScalesBytes);
    case WeightFormat::kBf16: break;
  }
  return kPanelColumns * 2 * num_inputs;
}

void matmul(const Weight& weight, const Activations& activations, const Output& output) {
  if (activations.num_rows == 0) return;
  const int64_t num_panels = (weight.num_outputs + kPanelColumns - 1) / kPanelColumns;
  Pool& pool = Pool::instance();
  const int64_t num_threads = pool.num_threads();
  const int64_t num_tasks = num_threads == 1 ? 1 : std::min(num_panels, num_threads * kTasksPerThread);
  pool.parallel(num_tasks, [&](int64_t task) {
    uint8_t* scratch = static_cast<uint8_t*>(task_scratch.at_least(kScratchBytes * weight.num_inputs));
    kernels().multiply_panels(weight, activations, output, task * num_panels / num_tasks, (task + 1) * num_panels / num_tasks, scratch);
  });
}

void linear(const Weight& weight, const Source& source, int64_t num_rows, const Output& output) {
  const ActivationKind kind = activation_kind(weight.format);
  void* memory = activation_scratch.at_least(activation_bytes(kind, num_rows, weight.num_inputs));
  const Activations activations = activations_over(memory, kind, num_rows, weight.num_inputs);
  quantize(source, activations);
  matmul(weight, activations, output);
}

}  // namespace baton
