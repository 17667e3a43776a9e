// Included by elementwise_<isa>.cpp inside `namespace spillway::<isa>`, after its Vector. No include guard and no other
// header's inline function in here: a function shared between the files could be kept by the linker in its AVX-512
// form for every machine.
//
// Vector: kLanes float32 values; load, store, stream, broadcast, + - * /, sqrt, and quiet (NaN -> 0x7FC00000), each
// operation rounded once. Its bfloat16 store rounds to nearest even by integer arithmetic and expects a quiet value.

struct NoOut {};
template <class Out>
constexpr bool kWritten = true;
template <>
constexpr bool kWritten<NoOut> = false;

struct AdamWVectors {
  explicit AdamWVectors(const spillway_adamw_scalars& s)
      : gradient_scale(Vector::broadcast(s.gradient_scale)),
        decay(Vector::broadcast(s.decay)),
        beta1(Vector::broadcast(s.beta1)),
        one_minus_beta1(Vector::broadcast(s.one_minus_beta1)),
        beta2(Vector::broadcast(s.beta2)),
        one_minus_beta2(Vector::broadcast(s.one_minus_beta2)),
        sqrt_bias_correction2(Vector::broadcast(s.sqrt_bias_correction2)),
        eps(Vector::broadcast(s.eps)),
        step_size(Vector::broadcast(s.step_size)) {}
  Vector gradient_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, sqrt_bias_correction2, eps, step_size;
};

// kLanes values at once. Streaming stores write `out` past the cache: nobody here reads it again.
template <class Gradient, class Out, bool kStream>
static inline void adamw_vector(const AdamWVectors& c, float* p_at, float* m_at, float* v_at, const Gradient* g_at,
                                Out* out_at) {
  const Vector g = c.gradient_scale * Vector::load(g_at);
  const Vector decayed = c.decay * Vector::load(p_at);
  const Vector m = quiet(c.beta1 * Vector::load(m_at) + c.one_minus_beta1 * g);
  const Vector v = quiet(c.beta2 * Vector::load(v_at) + c.one_minus_beta2 * (g * g));
  const Vector denominator = sqrt(v) / c.sqrt_bias_correction2 + c.eps;
  const Vector p = quiet(decayed - c.step_size * (m / denominator));
  m.store(m_at);
  v.store(v_at);
  p.store(p_at);
  if constexpr (kStream) {
    p.stream(out_at);
  } else if constexpr (kWritten<Out>) {
    p.store(out_at);
  }
}

// Fewer values than lanes, through zero-padded copies: lanes are independent, so their bits are the same.
template <class Gradient, class Out>
static void adamw_tail(const AdamWVectors& c, float* p, float* m, float* v, const Gradient* g, Out* out, int64_t n) {
  float p_pad[Vector::kLanes] = {}, m_pad[Vector::kLanes] = {}, v_pad[Vector::kLanes] = {};
  Gradient g_pad[Vector::kLanes] = {};
  Out out_pad[Vector::kLanes] = {};
  for (int64_t i = 0; i < n; ++i) p_pad[i] = p[i], m_pad[i] = m[i], v_pad[i] = v[i], g_pad[i] = g[i];
  adamw_vector<Gradient, Out, false>(c, p_pad, m_pad, v_pad, g_pad, out_pad);
  for (int64_t i = 0; i < n; ++i) p[i] = p_pad[i], m[i] = m_pad[i], v[i] = v_pad[i];
  if constexpr (kWritten<Out>) {
    for (int64_t i = 0; i < n; ++i) out[i] = out_pad[i];
  }
}

template <class Gradient, class Out, bool kStream>
static void adamw_vectors(const AdamWVectors& c, float* p, float* m, float* v, const Gradient* g, Out* out, int64_t n) {
  int64_t i = 0;
  for (; i + Vector::kLanes <= n; i += Vector::kLanes) {
    adamw_vector<Gradient, Out, kStream>(c, p + i, m + i, v + i, g + i, out == nullptr ? nullptr : out + i);
  }
  if (i < n) adamw_tail(c, p + i, m + i, v + i, g + i, out == nullptr ? nullptr : out + i, n - i);
}

template <class Gradient, class Out>
static void adamw_typed(const spillway_adamw_scalars& scalars, float* p, float* m, float* v, const Gradient* g, Out* out,
                        int64_t n) {
  const AdamWVectors c(scalars);
  adamw_vectors<Gradient, Out, false>(c, p, m, v, g, out, n);
}

// bfloat16 out: a head up to the first streamable address, then streaming stores.
template <class Gradient>
static void adamw_streaming(const spillway_adamw_scalars& scalars, float* p, float* m, float* v, const Gradient* g,
                            bfloat16* out, int64_t n) {
  const AdamWVectors c(scalars);
  const uint64_t to_aligned_bytes = -reinterpret_cast<uintptr_t>(out) % Vector::kStreamBytes;
  const int64_t to_aligned = static_cast<int64_t>(to_aligned_bytes / sizeof(bfloat16));
  const int64_t head = to_aligned < n ? to_aligned : n;
  if (head > 0) adamw_vectors<Gradient, bfloat16, false>(c, p, m, v, g, out, head);
  adamw_vectors<Gradient, bfloat16, true>(c, p + head, m + head, v + head, g + head, out + head, n - head);
  Vector::end_streaming();
}

template <class Gradient>
static void adamw_gradient(const spillway_adamw_scalars& scalars, float* p, float* m, float* v, const Gradient* g,
                           void* out, int32_t out_type, int64_t n) {
  if (out_type == SPILLWAY_BFLOAT16) {
    adamw_streaming(scalars, p, m, v, g, static_cast<bfloat16*>(out), n);
  } else if (out_type == SPILLWAY_FLOAT32) {
    adamw_typed(scalars, p, m, v, g, static_cast<float*>(out), n);
  } else {
    adamw_typed<Gradient, NoOut>(scalars, p, m, v, g, nullptr, n);
  }
}

static void adamw(const spillway_adamw_scalars& scalars, float* p, float* m, float* v, const void* gradient,
                  int32_t gradient_type, void* out, int32_t out_type, int64_t n) {
  if (gradient_type == SPILLWAY_BFLOAT16) {
    adamw_gradient(scalars, p, m, v, static_cast<const bfloat16*>(gradient), out, out_type, n);
  } else {
    adamw_gradient(scalars, p, m, v, static_cast<const float*>(gradient), out, out_type, n);
  }
}

template <class Gradient, bool kFirst>
static inline void accumulate_vector(float* sum_at, const Gradient* g_at) {
  const Vector g = Vector::load(g_at);
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
  } else {
    accumulate_gradient(accumulator, static_cast<const float*>(gradient), first, n);
  }
}

const Elementwise kElementwise = {adamw, accumulate};
