#include "probe.h"

#pragma GCC target("avx512f,amx-tile,amx-int8,amx-bf16")
#include <immintrin.h>

namespace baton {
namespace {

constexpr int kRows = 16;
constexpr int kRowBytes = 64;
constexpr int kTiles = 4;  // of sums; as many hold the operands
constexpr int64_t kOperations = int64_t{2} * kTiles * kRows * kRows * kRowBytes;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

void configure() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = kRowBytes;
    config.rows[tile] = kRows;
  }
  asm volatile("" : : "r"(&config) : "memory");  // GCC thinks that the next line reads 8 bytes of it alone
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
}

void int8_tile(int64_t num_rounds) {
  configure();
  for (int64_t round = 0; round < num_rounds; ++round) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_release();
}

void bf16_tile(int64_t num_rounds) {
  configure();
  for (int64_t round = 0; round < num_rounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

}  // namespace

const Peak kAmxPeaks[2] = {{"int8_tile", kOperations, int8_tile}, {"bf16_tile", kOperations / 2, bf16_tile}};

}  // namespace baton
