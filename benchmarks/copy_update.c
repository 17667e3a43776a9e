/* The most that memory allows an update: reads and writes the arrays of one AdamW step once, with almost no arithmetic.
 * A parameter takes 14 bytes in (three float32, one 16-bit) and 14 bytes out. `plain` is the loop as anyone would write
 * it. `streaming` writes the 16-bit array past the cache and prefetches, as our kernel does. The threads take ranges in
 * turn, as ours do. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { RANGE = 1 << 16, MAX_THREADS = 256 };

struct arrays {
  float *p, *m, *v;
  const uint16_t* g;
  uint16_t* out;
  int64_t n;
  int streaming;
  _Atomic int64_t next;
};

static void plain(float* restrict p, float* restrict m, float* restrict v, const uint16_t* restrict g,
                  uint16_t* restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    p[i] += 1.0f;
    m[i] += 1.0f;
    v[i] += 1.0f;
    out[i] = g[i];
  }
}

static void streaming(float* restrict p, float* restrict m, float* restrict v, const uint16_t* restrict g,
                      uint16_t* restrict out, int64_t n) {
#if defined(__SSE2__)
  for (int64_t i = 0; i + 32 <= n; i += 32) {
    for (int64_t k = 512; k < 544; k += 16) {
      __builtin_prefetch(p + i + k, 1);
      __builtin_prefetch(m + i + k, 1);
      __builtin_prefetch(v + i + k, 1);
    }
    __builtin_prefetch(g + i + 512);
    for (int64_t k = i; k < i + 32; ++k) p[k] += 1.0f;
    for (int64_t k = i; k < i + 32; ++k) m[k] += 1.0f;
    for (int64_t k = i; k < i + 32; ++k) v[k] += 1.0f;
    for (int64_t k = i; k < i + 32; k += 8) {
      _mm_stream_si128((__m128i*)(out + k), _mm_loadu_si128((const __m128i*)(g + k)));
    }
  }
  _mm_sfence();
#else
  plain(p, m, v, g, out, n);
#endif
}

static void* run(void* pointer) {
  struct arrays* a = pointer;
  for (int64_t i; (i = atomic_fetch_add(&a->next, RANGE)) < a->n;) {
    const int64_t n = a->n - i < RANGE ? a->n - i : RANGE;
    (a->streaming ? streaming : plain)(a->p + i, a->m + i, a->v + i, a->g + i, a->out + i, n);
  }
  return 0;
}

/* `n` must be a multiple of 32, and every array must begin at a cache line. */
void copy_update(float* p, float* m, float* v, const uint16_t* g, uint16_t* out, int64_t n, int32_t is_streaming,
                 int32_t num_threads) {
  struct arrays a = {p, m, v, g, out, n, is_streaming, 0};
  pthread_t threads[MAX_THREADS];
  int started = 0;
  while (started < num_threads - 1 && started < MAX_THREADS && !pthread_create(&threads[started], 0, run, &a)) ++started;
  run(&a);
  for (int i = 0; i < started; ++i) pthread_join(threads[i], 0);
}
