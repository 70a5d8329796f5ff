// 2^x for |x| <= 1/2: the polynomial of degree 5 whose largest relative error is least, 1.1e-7.
[[gnu::always_inline]] static inline Floats exp2_fraction(Floats x) {
  Floats result = fma(set1(0.00132186722f), x, set1(0.0096716983f));
  result = fma(result, x, set1(0.0555089302f));
  result = fma(result, x, set1(0.24022238f));
  result = fma(result, x, set1(0.693146884f));
  return fma(result, x, set1(1.0f));
}
