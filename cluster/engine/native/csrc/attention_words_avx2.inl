// The words of attention_words.inl where no instruction takes them as they are: each is multiplied in two parts, which its loads are
// split into once for all rows; queries and weights are stored split. Include inside a namespace of the ISA, after the vector operations.

// A part is one of the two numbers, as float32. So are queries, rounded to bfloat16 as everywhere, and weights, which need no rounding.
struct Bf16Words {
  using Operand = Floats;
  using Factor = float;
  static constexpr int kParts = 2;

  [[gnu::always_inline]] static inline void store_query(Factor* p, Floats x) {
    uint16_t rounded[kLanes];
    store_bf16(rounded, x);
    store(p, low_bf16(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rounded)))));
  }
  [[gnu::always_inline]] static inline void store_weights(Factor* p, Floats x) { store(p, x); }
  // They take the place of the scores.
  template <class Workspace>
  [[gnu::always_inline]] static inline Factor* weights(Workspace& w, int r) {
    return w.scores[r];
  }

  template <int PART>
  [[gnu::always_inline]] static inline Operand part(Ints words) {
    return PART == 0 ? low_bf16(words) : high_bf16(words);
  }
  template <int PART>
  [[gnu::always_inline]] static inline Operand factor(const Factor* pair) {
    Factor factor;
    std::memcpy(&factor, pair + PART, sizeof factor);
    return set1(factor);
  }
  [[gnu::always_inline]] static inline Floats dot(Floats sum, Operand numbers, Operand factor) { return fma(numbers, factor, sum); }
};

// A part is the even or the odd bytes, as 16-bit numbers: sums of two products of bytes would saturate 16 bits.
struct ByteWords {
  static constexpr int kParts = 2;

  // The even bytes of all words come first, then the odd ones.
  static void split_query(int32_t* words, int num_words) {
    for (int i = 0; i < num_words; ++i) {
      const int32_t word = words[i];
      words[i] = (static_cast<int8_t>(word) & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(static_cast<int8_t>(word >> 16)) << 16);
      words[num_words + i] = (static_cast<int8_t>(word >> 8) & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(word >> 24) << 16);
    }
  }

  template <int PART>
  [[gnu::always_inline]] static inline Ints part(Ints words) {
    return PART == 0 ? _mm256_and_si256(words, _mm256_set1_epi16(0xff)) : _mm256_srli_epi16(words, 8);
  }
  template <int PART>
  [[gnu::always_inline]] static inline Ints query(const int32_t* words, int num_words, int word) {
    return set1(words[PART * num_words + word]);
  }
  [[gnu::always_inline]] static inline Ints dot(Ints sum, Ints keys, Ints query) {
    sum = dot_int16(sum, keys, query);
    asm("" : "+x"(sum));  // or GCC adds the parts' products first, which takes more registers than there are
    return sum;
  }
};
