// What this machine can do at best, for benchmarks to compare kernels with: nothing here serves requests.
#pragma once

#include <cstdint>
#include <vector>

namespace baton {

// Arithmetic on registers alone, in independent chains.
struct Peak {
  const char* name;                // type and instruction: int8_dot, bf16_tile, …
  int64_t num_operations;          // of one round: a product and a sum are two
  void (*run)(int64_t num_rounds);  // on the calling thread
};

// Of every instruction set that this machine has; none on a machine with the portable one alone.
std::vector<Peak> peaks();

// Runs `num_rounds` on each thread of the pool.
void run_peak(const Peak& peak, int64_t num_rounds);

// Reads `num_bytes`, a multiple of 256 on each thread of the pool, in one stream a thread; returns a sum over them, so that no read is
// left out.
uint64_t read_stream(const uint8_t* data, int64_t num_bytes);

// The parts of one instruction set; plain arrays, so that no inline function is compiled for several sets.
extern const Peak kAvx2Peaks[3];
extern const Peak kAvx512Peaks[3];
extern const Peak kAmxPeaks[2];
uint64_t read_portable(const uint8_t* data, int64_t num_bytes);
uint64_t read_avx2(const uint8_t* data, int64_t num_bytes);
uint64_t read_avx512(const uint8_t* data, int64_t num_bytes);

}  // namespace baton
