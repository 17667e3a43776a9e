// Included by elementwise_<isa>.cpp inside `namespace spillway::<isa>`, after its Vector. It has no include guard and
// uses no inline function of another header: the linker could keep the AVX-512 form of a shared function for every
// machine.
//
// Vector: kLanes float32 values; load, load_pairs (2 * kLanes bfloat16 values in any order), store, broadcast, + - * /,
// sqrt, sign (1, -1, or a zero or NaN itself) and quiet (NaN -> 0x7FC00000), each operation rounded once. Loading a
// float16 NaN may give any NaN. Stores of bfloat16 (by integer operations) and float16 round to nearest even and expect
// a quiet value. `stream` writes past the cache: kLanes float32 values to an address that is a multiple of their size,
// or a whole line of the small types. prefetch and prefetch_to_write may do nothing, and `stream` may write through the
// cache.
// Doubles: kLanes float64 values; load from float32, broadcast, store, + - *.

constexpr int64_t kLineBytes = 64;
// Values per block: one cache line of bfloat16, two of float32.
constexpr int64_t kBlock = 32;
// 2 KiB of float32, half a page. Measured: 256 to 1024 differ by less than 3 %; no prefetch costs 10 to 15 %.
constexpr int64_t kPrefetchAhead = 512;

// Loads a gradient for arithmetic. Conversions of float16 differ in the payloads of NaNs, so these become the declared
// NaN.
template <class Gradient>
static inline Vector load_gradient(const Gradient* at) {
  return Vector::load(at);
}
static inline Vector load_gradient(const float16* at) { return quiet(Vector::load(at)); }

struct NoOut {};
template <class Out>
constexpr bool kWritten = true;
template <>
constexpr bool kWritten<NoOut> = false;

// --- rules: spillway.h defines each line by line. `step` takes kLanes values and returns the new parameters, which the
// caller also writes to `out`. Scalars are broadcast once per range.

// Where states are read and where they are written: the same arrays, or others. Moment: float, or bfloat16, which is
// widened when it is read and rounded when it is written.
template <bool kHasSecond, class MomentType>
struct States {
  using Moment = MomentType;
  static constexpr bool kWide = sizeof(Moment) == sizeof(float);
  float* p;
  Moment *m, *v;  // v: null without a second moment
  float* p_after;
  Moment *m_after, *v_after;
  bool past_cache;  // for writes of float32
  States at(int64_t i) const {
    return {p + i, m + i, kHasSecond ? v + i : nullptr, p_after + i, m_after + i, kHasSecond ? v_after + i : nullptr,
            past_cache};
  }
  bool in_place() const { return p == p_after; }
  // Whether whole lines are written, because the arrays begin at lines. These need not be read first, and nobody here
  // reads them next, unlike moments that stay in place.
  bool lines_after() const {
    if (m == m_after) return false;
    const uintptr_t moments = reinterpret_cast<uintptr_t>(m_after) | (kHasSecond ? reinterpret_cast<uintptr_t>(v_after) : 0);
    return (reinterpret_cast<uintptr_t>(p_after) | (kWide ? moments : 0)) % kLineBytes == 0;
  }
  void put(const Vector& value, float* to) const { past_cache ? value.stream(to) : value.store(to); }
  void put(const Vector& value, bfloat16* to) const { value.store(to); }
};

// AdamW, and Adam, whose weight decay is added to the gradient.
template <bool kDecaysApart, class Moment>
struct AdamRule {
  using At = States<true, Moment>;
  explicit AdamRule(const spillway_update_scalars& s)
      : gradient_scale(Vector::broadcast(s.gradient_scale)),
        decay(Vector::broadcast(kDecaysApart ? s.decay : s.weight_decay)),
        beta1(Vector::broadcast(s.beta1)),
        one_minus_beta1(Vector::broadcast(s.one_minus_beta1)),
        beta2(Vector::broadcast(s.beta2)),
        one_minus_beta2(Vector::broadcast(s.one_minus_beta2)),
        sqrt_bias_correction2(Vector::broadcast(s.sqrt_bias_correction2)),
        eps(Vector::broadcast(s.eps)),
        step_size(Vector::broadcast(s.step_size)) {}

  template <class Gradient>
  Vector step(const At& at, const Gradient* g_at) const {
    Vector g = gradient_scale * load_gradient(g_at);
    Vector before = Vector::load(at.p);
    if constexpr (kDecaysApart) {
      before = decay * before;
    } else {
      g = g + decay * before;
    }
    const Vector m = quiet(beta1 * Vector::load(at.m) + one_minus_beta1 * g);
    const Vector v = quiet(beta2 * Vector::load(at.v) + one_minus_beta2 * (g * g));
    const Vector denominator = sqrt(v) / sqrt_bias_correction2 + eps;
    const Vector p = quiet(before - step_size * (m / denominator));
    at.put(m, at.m_after);
    at.put(v, at.v_after);
    at.put(p, at.p_after);
    return p;
  }

  Vector gradient_scale;
  Vector decay;  // factor of the parameter, or the weight decay that is added to the gradient
  Vector beta1, one_minus_beta1, beta2, one_minus_beta2, sqrt_bias_correction2, eps, step_size;
};

template <class Moment>
struct SgdMomentumRule {
  using At = States<false, Moment>;
  explicit SgdMomentumRule(const spillway_update_scalars& s)
      : gradient_scale(Vector::broadcast(s.gradient_scale)),
        weight_decay(Vector::broadcast(s.weight_decay)),
        momentum(Vector::broadcast(s.momentum)),
        step_size(Vector::broadcast(s.step_size)) {}

  template <class Gradient>
  Vector step(const At& at, const Gradient* g_at) const {
    const Vector before = Vector::load(at.p);
    const Vector g = gradient_scale * load_gradient(g_at) + weight_decay * before;
    const Vector m = quiet(momentum * Vector::load(at.m) + g);
    const Vector p = quiet(before - step_size * m);
    at.put(m, at.m_after);
    at.put(p, at.p_after);
    return p;
  }

  Vector gradient_scale, weight_decay, momentum, step_size;
};

template <class Moment>
struct LionRule {
  using At = States<false, Moment>;
  explicit LionRule(const spillway_update_scalars& s)
      : gradient_scale(Vector::broadcast(s.gradient_scale)),
        decay(Vector::broadcast(s.decay)),
        beta1(Vector::broadcast(s.beta1)),
        one_minus_beta1(Vector::broadcast(s.one_minus_beta1)),
        beta2(Vector::broadcast(s.beta2)),
        one_minus_beta2(Vector::broadcast(s.one_minus_beta2)),
        step_size(Vector::broadcast(s.step_size)) {}

  template <class Gradient>
  Vector step(const At& at, const Gradient* g_at) const {
    const Vector g = gradient_scale * load_gradient(g_at);
    const Vector before = Vector::load(at.m);
    const Vector direction = sign(beta1 * before + one_minus_beta1 * g);
    const Vector p = quiet(decay * Vector::load(at.p) - step_size * direction);
    const Vector m = quiet(beta2 * before + one_minus_beta2 * g);
    at.put(m, at.m_after);
    at.put(p, at.p_after);
    return p;
  }

  Vector gradient_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size;
};

// --- one rule over an array

// Updates fewer values than lanes, in zero-padded copies: lanes are independent, so the bits are the same.
template <class Rule, class Gradient, class Out>
static void update_tail(const Rule& rule, const typename Rule::At& at, const Gradient* g, Out* out, int64_t n) {
  float p_pad[Vector::kLanes] = {};
  typename Rule::At::Moment m_pad[Vector::kLanes] = {}, v_pad[Vector::kLanes] = {};
  Gradient g_pad[Vector::kLanes] = {};
  for (int64_t i = 0; i < n; ++i) p_pad[i] = at.p[i], m_pad[i] = at.m[i], g_pad[i] = g[i];
  for (int64_t i = 0; at.v != nullptr && i < n; ++i) v_pad[i] = at.v[i];
  [[maybe_unused]] const Vector updated = rule.step({p_pad, m_pad, v_pad, p_pad, m_pad, v_pad, false}, g_pad);
  for (int64_t i = 0; i < n; ++i) at.p_after[i] = p_pad[i], at.m_after[i] = m_pad[i];
  for (int64_t i = 0; at.v != nullptr && i < n; ++i) at.v_after[i] = v_pad[i];
  if constexpr (kWritten<Out>) {
    Out out_pad[Vector::kLanes];
    updated.store(out_pad);
    for (int64_t i = 0; i < n; ++i) out[i] = out_pad[i];
  }
}

// Prefetches the block's lines of every array, kPrefetchAhead values ahead. Hardware prefetch stops at the end of a 4
// KiB page, which each of these arrays reaches every 1024 values, and it does not know that the lines will be written.
template <bool kHasSecond, class Moment, class Gradient>
static inline void prefetch_ahead(const States<kHasSecond, Moment>& at, const Gradient* g) {
  const bool past_cache = at.past_cache && at.kWide;
  for (int64_t i = kPrefetchAhead; i < kPrefetchAhead + kBlock; i += kLineBytes / int64_t{sizeof(float)}) {
    if (!at.in_place()) Vector::prefetch(at.p + i);
    if (!at.past_cache) Vector::prefetch_to_write(at.p_after + i);
  }
  for (int64_t i = kPrefetchAhead; i < kPrefetchAhead + kBlock; i += kLineBytes / int64_t{sizeof(Moment)}) {
    if (!at.in_place()) {
      Vector::prefetch(at.m + i);
      if constexpr (kHasSecond) Vector::prefetch(at.v + i);
    }
    if (!past_cache) {
      Vector::prefetch_to_write(at.m_after + i);
      if constexpr (kHasSecond) Vector::prefetch_to_write(at.v_after + i);
    }
  }
  for (int64_t i = kPrefetchAhead; i < kPrefetchAhead + kBlock; i += kLineBytes / int64_t{sizeof(Gradient)}) {
    Vector::prefetch(g + i);
  }
}

// kStream: `out` begins at a line, and blocks of it are written past the cache, because nobody here reads them again.
// So are states that are written to other arrays, if these begin at lines, too.
template <bool kStream, class Rule, class Gradient, class Out>
static void update_vectors(const Rule& rule, typename Rule::At at, const Gradient* g, Out* out, int64_t n) {
  int64_t i = 0;
  at.past_cache = !at.in_place() && at.lines_after();
  for (; i + kBlock <= n; i += kBlock) {
    prefetch_ahead(at.at(i), g + i);
    Vector updated[kBlock / Vector::kLanes];
    for (int64_t k = 0; k < kBlock; k += Vector::kLanes) {
      updated[k / Vector::kLanes] = rule.step(at.at(i + k), g + i + k);
    }
    if constexpr (kStream) {
      Vector::stream(updated, out + i);
    } else if constexpr (kWritten<Out>) {
      for (int64_t k = 0; k < kBlock; k += Vector::kLanes) updated[k / Vector::kLanes].store(out + i + k);
    }
  }
  at.past_cache = false;
  for (; i + Vector::kLanes <= n; i += Vector::kLanes) {
    [[maybe_unused]] const Vector updated = rule.step(at.at(i), g + i);
    if constexpr (kWritten<Out>) updated.store(out + i);
  }
  if (i < n) update_tail(rule, at.at(i), g + i, out == nullptr ? nullptr : out + i, n - i);
}

// For bfloat16 and float16 outputs: a head up to the first line, then streaming stores.
template <class Rule, class Gradient, class Out>
static void update_streaming(const Rule& rule, const typename Rule::At& at, const Gradient* g, Out* out, int64_t n) {
  const uint64_t to_line_bytes = -reinterpret_cast<uintptr_t>(out) % kLineBytes;
  const int64_t to_line = static_cast<int64_t>(to_line_bytes / sizeof(Out));
  const int64_t head = to_line < n ? to_line : n;
  if (head > 0) update_vectors<false>(rule, at, g, out, head);
  update_vectors<true>(rule, at.at(head), g + head, out + head, n - head);
}

template <class Rule, class Gradient, class Out>
static void update_range(const Rule& rule, const typename Rule::At& at, const Gradient* g, Out* out, int64_t n) {
  if constexpr (sizeof(Out) == sizeof(bfloat16)) {
    update_streaming(rule, at, g, out, n);
  } else {
    update_vectors<false>(rule, at, g, out, n);
  }
}

// --- moments of 8 bits: plain loops, which compilers turn into each instruction set's vectors

constexpr int64_t kScaleBytes = sizeof(float);
constexpr uint32_t kMagnitude = 0x7FFFFFFF, kInfinity = 0x7F800000, kQuietNan = 0x7FC00000;
constexpr uint32_t kLeastBucket = 0x33800000;  // 2^-24

static inline uint32_t bits_of(const float& x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Computes the n values of a block.
static void widen_block(const uint8_t* __restrict kept, const float* __restrict values, float* __restrict wide, int64_t n) {
  float scale;
  __builtin_memcpy(&scale, kept, sizeof scale);
  const uint8_t* __restrict codes = kept + kScaleBytes;
  for (int64_t i = 0; i < n; ++i) wide[i] = values[codes[i]] * scale;
}

static void narrow_block(const float* __restrict wide, const uint32_t* __restrict nearest, uint8_t* __restrict kept, int64_t n) {
  uint32_t largest = 0;  // magnitude: their bits have their order, and NaNs are beyond infinity
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(wide[i]) & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  uint8_t* __restrict codes = kept + kScaleBytes;
  if (largest >= kInfinity) {
    __builtin_memcpy(kept, &kQuietNan, sizeof kQuietNan);
    for (int64_t i = 0; i < n; ++i) codes[i] = 0;
    return;
  }
  __builtin_memcpy(kept, &largest, sizeof largest);
  float scale = 1.0f;
  if (largest != 0) __builtin_memcpy(&scale, &largest, sizeof scale);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_of(wide[i] / scale), magnitude = bits & kMagnitude;
    const uint32_t t = magnitude >= kLeastBucket ? magnitude - kLeastBucket + 0x10000 : magnitude != 0;
    const uint32_t negative = bits >> 31;
    const uint32_t low = (t & 0xFFFF) ^ (negative * 0xFFFF);
    codes[i] = static_cast<uint8_t>((nearest[(t >> 16) + negative * SPILLWAY_NUM_BUCKETS] + low) >> 16);
  }
}

// States whose moments are kept in blocks.
struct Blocks {
  float *p, *p_after;
  const uint8_t *m, *v;  // v: null without a second moment
  uint8_t *m_after, *v_after;
  const spillway_map* maps;
};

template <class Rule, class Gradient, class Out>
static void update_range(const Rule& rule, const Blocks& at, const Gradient* g, Out* out, int64_t n) {
  alignas(kLineBytes) float m[SPILLWAY_BLOCK_VALUES], v[SPILLWAY_BLOCK_VALUES];
  const bool has_second = at.v != nullptr;
  for (int64_t i = 0, kept = 0; i < n; i += SPILLWAY_BLOCK_VALUES, kept += SPILLWAY_BLOCK_VALUES + kScaleBytes) {
    const int64_t count = n - i < SPILLWAY_BLOCK_VALUES ? n - i : SPILLWAY_BLOCK_VALUES;
    widen_block(at.m + kept, at.maps[0].values, m, count);
    if (has_second) widen_block(at.v + kept, at.maps[1].values, v, count);
    float* second = has_second ? v : nullptr;
    const typename Rule::At wide = {at.p + i, m, second, at.p_after + i, m, second, false};
    update_range(rule, wide, g + i, out == nullptr ? nullptr : out + i, count);
    narrow_block(m, at.maps[0].nearest, at.m_after + kept, count);
    if (has_second) narrow_block(v, at.maps[1].nearest, at.v_after + kept, count);
  }
}

template <class Rule, class Source, class Gradient>
static void update_typed(const spillway_update_scalars& scalars, const Source& at, const Gradient* g, void* out,
                         int32_t out_type, int64_t n) {
  const Rule rule(scalars);
  if (out_type == SPILLWAY_BFLOAT16) {
    update_range(rule, at, g, static_cast<bfloat16*>(out), n);
  } else if (out_type == SPILLWAY_FLOAT16) {
    update_range(rule, at, g, static_cast<float16*>(out), n);
  } else if (out_type == SPILLWAY_FLOAT32) {
    update_range(rule, at, g, static_cast<float*>(out), n);
  } else {
    update_range(rule, at, g, static_cast<NoOut*>(nullptr), n);
  }
  Vector::end_streaming();
}

template <class Rule, class Source>
static void update_from(const spillway_update_scalars& scalars, const Source& at, const void* gradient,
                        int32_t gradient_type, void* out, int32_t out_type, int64_t n) {
  if (gradient_type == SPILLWAY_BFLOAT16) {
    update_typed<Rule>(scalars, at, static_cast<const bfloat16*>(gradient), out, out_type, n);
  } else if (gradient_type == SPILLWAY_FLOAT16) {
    update_typed<Rule>(scalars, at, static_cast<const float16*>(gradient), out, out_type, n);
  } else {
    update_typed<Rule>(scalars, at, static_cast<const float*>(gradient), out, out_type, n);
  }
}

template <class Rule>
static void update_by(const spillway_update_scalars& scalars, const spillway_states& before,
                      const spillway_states& after, const spillway_map* maps, const void* gradient,
                      int32_t gradient_type, void* out, int32_t out_type, int64_t n) {
  using Moment = typename Rule::At::Moment;
  if constexpr (Rule::At::kWide) {
    if (maps != nullptr) {
      const auto bytes = [](void* array) { return static_cast<uint8_t*>(array); };
      const Blocks at = {before.master,        after.master,         bytes(before.moment1), bytes(before.moment2),
                         bytes(after.moment1), bytes(after.moment2), maps};
      return update_from<Rule>(scalars, at, gradient, gradient_type, out, out_type, n);
    }
  }
  const auto moment = [](void* array) { return static_cast<Moment*>(array); };
  const typename Rule::At at = {before.master, moment(before.moment1), moment(before.moment2),
                                after.master,  moment(after.moment1),  moment(after.moment2), false};
  update_from<Rule>(scalars, at, gradient, gradient_type, out, out_type, n);
}

template <class Moment>
static void update_moments(int32_t rule, const spillway_update_scalars& scalars, const spillway_states& before,
                           const spillway_states& after, const spillway_map* maps, const void* gradient,
                           int32_t gradient_type, void* out, int32_t out_type, int64_t n) {
  switch (rule) {
    case SPILLWAY_ADAMW:
      return update_by<AdamRule<true, Moment>>(scalars, before, after, maps, gradient, gradient_type, out, out_type, n);
    case SPILLWAY_ADAM:
      return update_by<AdamRule<false, Moment>>(scalars, before, after, maps, gradient, gradient_type, out, out_type, n);
    case SPILLWAY_SGD_MOMENTUM:
      return update_by<SgdMomentumRule<Moment>>(scalars, before, after, maps, gradient, gradient_type, out, out_type, n);
    default:
      return update_by<LionRule<Moment>>(scalars, before, after, maps, gradient, gradient_type, out, out_type, n);
  }
}

static void update(int32_t rule, const spillway_update_scalars& scalars, const spillway_states& before,
                   const spillway_states& after, int32_t moment_type, const spillway_map* maps, const void* gradient,
                   int32_t gradient_type, void* out, int32_t out_type, int64_t n) {
  if (moment_type == SPILLWAY_BFLOAT16) {
    update_moments<bfloat16>(rule, scalars, before, after, nullptr, gradient, gradient_type, out, out_type, n);
  } else {  // blocks are widened to float32
    update_moments<float>(rule, scalars, before, after, moment_type == SPILLWAY_INT8 ? maps : nullptr, gradient,
                          gradient_type, out, out_type, n);
  }
}

template <class Gradient, bool kFirst>
static inline void accumulate_vector(float* sum_at, const Gradient* g_at) {
  const Vector g = load_gradient(g_at);
  if constexpr (kFirst) {
    g.store(sum_at);
  } else {
    quiet(Vector::load(sum_at) + g).store(sum_at);
  }
}

template <class Gradient, bool kFirst>
static void accumulate_typed(float* sum, const Gradient* g, int64_t n) {
  int64_t i = 0;
  for (; i + Vector::kLanes <= n; i += Vector::kLanes) accumulate_vector<Gradient, kFirst>(sum + i, g + i);
  float sum_pad[Vector::kLanes] = {};
  Gradient g_pad[Vector::kLanes] = {};
  for (int64_t k = i; k < n; ++k) sum_pad[k - i] = sum[k], g_pad[k - i] = g[k];
  accumulate_vector<Gradient, kFirst>(sum_pad, g_pad);
  for (int64_t k = i; k < n; ++k) sum[k] = sum_pad[k - i];
}

template <class Gradient>
static void accumulate_gradient(float* sum, const Gradient* g, bool first, int64_t n) {
  first ? accumulate_typed<Gradient, true>(sum, g, n) : accumulate_typed<Gradient, false>(sum, g, n);
}

static void accumulate(float* accumulator, const void* gradient, int32_t gradient_type, bool first, int64_t n) {
  if (gradient_type == SPILLWAY_BFLOAT16) {
    accumulate_gradient(accumulator, static_cast<const bfloat16*>(gradient), first, n);
  } else if (gradient_type == SPILLWAY_FLOAT16) {
    accumulate_gradient(accumulator, static_cast<const float16*>(gradient), first, n);
  } else {
    accumulate_gradient(accumulator, static_cast<const float*>(gradient), first, n);
  }
}

static inline uint32_t bits_of(const float* at) {
  uint32_t bits;
  __builtin_memcpy(&bits, at, sizeof bits);
  return bits;
}
static inline uint16_t bits_of(const bfloat16* at) { return at->bits; }

// Biased exponents of the largest magnitude and of the smallest one that is not zero. For a batch of zeros: 0 and
// kAllZero.
struct ExponentRange {
  static constexpr int32_t kAllZero = 256;
  int32_t largest, smallest;
};

// Uses integers of the values' own width, in a loop that compilers turn into vectors.
template <class Gradient>
static ExponentRange exponent_range(const Gradient* values) {
  using Bits = decltype(bits_of(values));
  constexpr int kMantissaBits = 8 * int{sizeof(Bits)} - 9;
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1, kNone = static_cast<Bits>(~Bits{0});
  Bits largest = 0, below_smallest = kNone;
  for (int64_t i = 0; i < kSquareBatch; ++i) {
    const Bits magnitude = bits_of(values + i) & kMagnitude;
    const Bits below = static_cast<Bits>(magnitude - 1);  // zero becomes the largest of all
    largest = magnitude > largest ? magnitude : largest;
    below_smallest = below < below_smallest ? below : below_smallest;
  }
  if (below_smallest == kNone) return {0, ExponentRange::kAllZero};
  return {static_cast<int32_t>(largest >> kMantissaBits), static_cast<int32_t>((below_smallest + 1u) >> kMantissaBits)};
}

constexpr int64_t kFloatsPerLine = kLineBytes / int64_t{sizeof(float)};
// The number of sums: they are independent, so that additions overlap, but together take at most one line of float32 at
// a time, so that lines are prefetched one by one: two at once (AVX-512, four sums) take twice as long.
static constexpr int kSums = Doubles::kLanes > 4 ? 16 / Doubles::kLanes : 4;

static double total(Doubles (&sums)[kSums]) {
  for (int k = 1; k < kSums; ++k) sums[0] = sums[0] + sums[k];
  double lanes[Doubles::kLanes], sum = 0;
  sums[0].store(lanes);
  for (int i = 0; i < Doubles::kLanes; ++i) sum += lanes[i];
  return sum;
}

// square_at(i): the squares of Doubles::kLanes values, from the i-th on.
//
// One exact float64 sum. The squares of 1024 magnitudes from 2^e to 2^(E + 1) add up to at most 2^(2E + 12). Squares of
// bfloat16 values are multiples of 2^(2e - 14), so the sum fits into 53 bits if E - e <= 13.
template <class SquareAt>
static SquareBatch sum_of_few_exponents(const SquareAt& square_at, int32_t exponent) {
  Doubles sums[kSums];
  for (Doubles& sum : sums) sum = Doubles::broadcast(0);
  for (int64_t i = 0; i < kSquareBatch; i += kSums * Doubles::kLanes) {
    for (int k = 0; k < kSums; ++k) sums[k] = sums[k] + square_at(i + k * Doubles::kLanes);
  }
  return {total(sums), 0, exponent};
}

// Two exact float64 sums. The squares of 1024 magnitudes below 2^(E + 1) add up to at most 2^(2E + 12). Adding and
// subtracting 1.5 * 2^(2E + 12) rounds a square to a multiple of 2^(2E - 40), so 1024 of these sum up exactly. The
// remainders are exact as well: each is at most 2^(2E - 41) and a multiple of 2^(2e - 46), where e is the smallest
// exponent, so 1024 of them are exact in float64's 53 bits if E - e <= 19. (Demmel and Hida 2003. The order does not
// matter, because no sum is rounded.)
template <class SquareAt>
static SquareBatch sum_of_many_exponents(const SquareAt& square_at, int32_t exponent) {
  const uint64_t rounder_bits = static_cast<uint64_t>(1023 + 2 * (exponent - 127) + 12) << 52 | uint64_t{1} << 51;
  double rounder;
  __builtin_memcpy(&rounder, &rounder_bits, sizeof rounder);
  const Doubles rounders = Doubles::broadcast(rounder);
  Doubles high[kSums], low[kSums];
  for (int k = 0; k < kSums; ++k) high[k] = low[k] = Doubles::broadcast(0);
  for (int64_t i = 0; i < kSquareBatch; i += kSums * Doubles::kLanes) {
    for (int k = 0; k < kSums; ++k) {
      const Doubles square = square_at(i + k * Doubles::kLanes);
      const Doubles rounded = (square + rounders) - rounders;
      high[k] = high[k] + rounded;
      low[k] = low[k] + (square - rounded);
    }
  }
  return {total(high), total(low), exponent};
}

static SquareBatch sum_of_squares(const float* values, ExponentRange range) {
  const auto square_at = [values](int64_t i) {
    if (i % kFloatsPerLine == 0) Vector::prefetch(values + 2 * kSquareBatch + i);
    const Doubles value = Doubles::load(values + i);
    return value * value;
  };
  return sum_of_many_exponents(square_at, range.largest);
}

// The square of a bfloat16 has 16 bits: float32 holds it exactly if it is neither denormal nor infinite.
static SquareBatch sum_of_squares(const bfloat16* values, ExponentRange range) {
  if (range.smallest < 64 || range.largest > 127 + 63) {
    float wide[kSquareBatch];
    for (int64_t i = 0; i < kSquareBatch; i += Vector::kLanes) Vector::load(values + i).store(wide + i);
    return sum_of_squares(wide, range);
  }
  float squares[kSquareBatch];
  for (int64_t i = 0; i < kSquareBatch; i += 2 * Vector::kLanes) {
    if (i % (2 * kFloatsPerLine) == 0) Vector::prefetch(values + 2 * kSquareBatch + i);
    Vector a, b;
    Vector::load_pairs(values + i, a, b);
    (a * a).store(squares + i);
    (b * b).store(squares + i + Vector::kLanes);
  }
  const auto square_at = [&squares](int64_t i) { return Doubles::load(squares + i); };
  return range.largest - range.smallest <= 13 ? sum_of_few_exponents(square_at, range.largest)
                                              : sum_of_many_exponents(square_at, range.largest);
}

template <class Gradient>
static bool square_batch_typed(SquareBatch& sum, const Gradient* values) {
  const ExponentRange range = exponent_range(values);
  if (range.smallest == ExponentRange::kAllZero) {
    sum = {0, 0, 127};
    return true;
  }
  // The lower bound keeps 2^(2 * exponent - 338) a multiple of 2^-298, the square of the smallest denormal.
  if (range.largest < 20 || range.largest > 254 || range.largest - range.smallest > 19) return false;
  sum = sum_of_squares(values, range);
  return true;
}

static bool square_batch(SquareBatch& sum, const void* values, int32_t type) {
  if (type == SPILLWAY_BFLOAT16) return square_batch_typed(sum, static_cast<const bfloat16*>(values));
  return square_batch_typed(sum, static_cast<const float*>(values));
}

const Elementwise kElementwise = {update, accumulate, square_batch};
