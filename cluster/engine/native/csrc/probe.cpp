#include "probe.h"

#include <cstring>

#include "isa.h"
#include "thread_pool.h"

namespace baton {
namespace {

constexpr int64_t kStep = 256;  // bytes a reader takes at a time

bool has(Isa isa) {
  for (const Isa supported : supported_isas()) {
    if (supported == isa) return true;
  }
  return false;
}

template <size_t kCount>
void append(std::vector<Peak>& all, const Peak (&more)[kCount]) {
  all.insert(all.end(), more, more + kCount);
}

}  // namespace

std::vector<Peak> peaks() {
  std::vector<Peak> all;
  if (has(Isa::kAvx512)) {
    append(all, kAvx512Peaks);
  } else if (has(Isa::kAvx2)) {
    append(all, kAvx2Peaks);
  }
  if (has(Isa::kAmx)) append(all, kAmxPeaks);
  return all;
}

void run_peak(const Peak& peak, int64_t num_rounds) {
  Pool& pool = Pool::instance();
  pool.parallel(pool.num_threads(), [&](int64_t) { peak.run(num_rounds); });
}

uint64_t read_stream(const uint8_t* data, int64_t num_bytes) {
  Pool& pool = Pool::instance();
  const int64_t num_parts = pool.num_threads();
  const int64_t part = num_bytes / num_parts / kStep * kStep;
  const auto read = has(Isa::kAvx512) ? read_avx512 : has(Isa::kAvx2) ? read_avx2 : read_portable;
  std::vector<uint64_t> sums(static_cast<size_t>(num_parts));
  pool.parallel(num_parts, [&](int64_t i) { sums[static_cast<size_t>(i)] = read(data + i * part, part); });
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}

uint64_t read_portable(const uint8_t* data, int64_t num_bytes) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < num_bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, data + i, sizeof word);
    sum += word;
  }
  return sum;
}

}  // namespace baton
