// How a word of KV and what multiplies it meet where a dot-product instruction takes both as they are. Include inside a namespace of the
// ISA, after the vector operations.

struct Bf16Words {
  using Operand = Ints;
  using Factor = uint16_t;  // an element of a query, or a weight
  static constexpr int kParts = 1;  // of a word, multiplied one after the other

  [[gnu::always_inline]] static inline void store_query(Factor* p, Floats x) { store_bf16(p, x); }
  [[gnu::always_inline]] static inline void store_weights(Factor* p, Floats x) { store_bf16(p, x); }
  template <class Workspace>
  [[gnu::always_inline]] static inline Factor* weights(Workspace& w, int r) {
    return w.weights[r];
  }

  template <int PART>
  [[gnu::always_inline]] static inline Operand part(Ints words) {
    return words;
  }
  template <int PART>
  [[gnu::always_inline]] static inline Operand factor(const Factor* pair) {
    int32_t word;
    std::memcpy(&word, pair, sizeof word);
    return set1(word);
  }
  [[gnu::always_inline]] static inline Floats dot(Floats sum, Operand words, Operand factor) { return dot_bf16(sum, words, factor); }
};

struct ByteWords {
  static constexpr int kParts = 1;

  [[gnu::always_inline]] static inline void split_query(int32_t*, int) {}

  template <int PART>
  [[gnu::always_inline]] static inline Ints part(Ints words) {
    return words;
  }
  template <int PART>
  [[gnu::always_inline]] static inline Ints query(const int32_t* words, int, int word) {
    return set1(words[word]);
  }
  [[gnu::always_inline]] static inline Ints dot(Ints sum, Ints keys, Ints query) { return dot_bytes(sum, keys, query); }
};
