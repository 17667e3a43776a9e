// Every instruction set gives the scalar bits, at every length and alignment, and writes nothing outside its arrays.
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "spillway.h"

namespace {

constexpr float kGuard = 7.0f;
constexpr int64_t kMargin = 40;

template <class T>
struct Guarded {
  Guarded(int64_t n, int64_t offset)
      : buffer(static_cast<size_t>(n + 2 * kMargin), T(kGuard)), begin(kMargin + offset), n(n) {}
  T* data() { return buffer.data() + begin; }
  bool intact() const {
    for (int64_t i = 0; i < static_cast<int64_t>(buffer.size()); ++i) {
      if ((i < begin || i >= begin + n) && buffer[static_cast<size_t>(i)] != T(kGuard)) return false;
    }
    return true;
  }
  bool operator==(const Guarded& other) const {
    return std::memcmp(buffer.data(), other.buffer.data(), buffer.size() * sizeof(T)) == 0;
  }
  std::vector<T> buffer;
  int64_t begin, n;
};

struct Arrays {
  Arrays(int64_t n, int64_t offset, uint32_t seed)
      : p(n, offset), m(n, (offset + 1) % 32), v(n, (offset + 2) % 32), g(n, (offset + 3) % 32),
        out16(n, offset), out32(n, offset) {
    std::mt19937 random(seed);
    for (float* array : {p.data(), m.data(), v.data(), g.data()}) {
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = random();  // any float32: denormals, infinities and NaNs too
        std::memcpy(array + i, &bits, sizeof bits);
      }
    }
  }
  Guarded<float> p, m, v, g;
  Guarded<uint16_t> out16;
  Guarded<float> out32;

  void step(int32_t rule, int32_t gradient_type, int32_t out_type, int32_t isa, int32_t num_threads) {
    const spillway_update_scalars scalars = {0.37f, 0.99997f, 0.01f, 0.9f, 0.9f, 0.1f, 0.95f, 0.05f, 0.22f, 1e-8f, 3e-3f};
    void* out = out_type == SPILLWAY_BFLOAT16 ? static_cast<void*>(out16.data()) : out32.data();
    CHECK(spillway_update(rule, &scalars, p.data(), m.data(), v.data(), g.data(), gradient_type, out, out_type, p.n, isa,
                          num_threads) == SPILLWAY_OK);
  }
  bool operator==(const Arrays& o) const { return p == o.p && m == o.m && v == o.v && out16 == o.out16 && out32 == o.out32; }
  bool intact() const { return p.intact() && m.intact() && v.intact() && out16.intact() && out32.intact(); }
};

void compare(int64_t n, int64_t offset, int32_t isa, int32_t num_threads) {
  for (int32_t gradient_type : {SPILLWAY_FLOAT32, SPILLWAY_BFLOAT16}) {
    for (int32_t rule : {SPILLWAY_ADAMW, SPILLWAY_ADAM, SPILLWAY_SGD_MOMENTUM, SPILLWAY_LION}) {
      for (int32_t out_type : {SPILLWAY_FLOAT32, SPILLWAY_BFLOAT16, SPILLWAY_NONE}) {
        Arrays plain(n, offset, 1), vectors(n, offset, 1);
        plain.step(rule, gradient_type, out_type, SPILLWAY_ISA_SCALAR, 1);
        vectors.step(rule, gradient_type, out_type, isa, num_threads);
        CHECK(plain == vectors);
        CHECK(vectors.intact());
      }
    }
    for (int32_t first : {0, 1}) {
      Arrays plain(n, offset, 2), vectors(n, offset, 2);
      CHECK(!spillway_accumulate(plain.p.data(), plain.g.data(), gradient_type, first, n, SPILLWAY_ISA_SCALAR, 1));
      CHECK(!spillway_accumulate(vectors.p.data(), vectors.g.data(), gradient_type, first, n, isa, num_threads));
      CHECK(plain == vectors);
      CHECK(vectors.intact());
    }
  }
}

int32_t update(int32_t rule, float* moment2, int32_t gradient_type, int32_t out_type, int64_t n, int32_t isa) {
  const spillway_update_scalars scalars = {};
  float p[1] = {}, m[1] = {}, g[1] = {};
  return spillway_update(rule, &scalars, p, m, moment2, g, gradient_type, nullptr, out_type, n, isa, 1);
}

void test_arguments_are_checked() {
  const spillway_update_scalars scalars = {};
  float v[1] = {7.0f};
  for (int32_t rule : {0, 5}) CHECK(update(rule, v, 1, 0, 1, 0) == SPILLWAY_BAD_ARGUMENT);
  for (int32_t rule : {SPILLWAY_ADAMW, SPILLWAY_ADAM}) {
    CHECK(update(rule, v, 1, 0, 1, 0) == SPILLWAY_OK);
    CHECK(update(rule, nullptr, 1, 0, 1, 0) == SPILLWAY_BAD_ARGUMENT);
  }
  v[0] = 7.0f;
  for (int32_t rule : {SPILLWAY_SGD_MOMENTUM, SPILLWAY_LION}) {
    CHECK(update(rule, nullptr, 1, 0, 1, 0) == SPILLWAY_OK);
    CHECK(update(rule, v, 1, 0, 1, 0) == SPILLWAY_OK);
    CHECK(v[0] == 7.0f);
  }
  CHECK(update(SPILLWAY_ADAMW, v, 9, 0, 1, 0) == SPILLWAY_BAD_ARGUMENT);
  CHECK(update(SPILLWAY_ADAMW, v, 1, 2, 1, 0) == SPILLWAY_BAD_ARGUMENT);
  CHECK(update(SPILLWAY_ADAMW, v, 1, 0, -1, 0) == SPILLWAY_BAD_ARGUMENT);
  CHECK(update(SPILLWAY_ADAMW, v, 1, 0, 1, 99) == SPILLWAY_ISA_UNAVAILABLE);
  CHECK(spillway_update(1, &scalars, nullptr, nullptr, nullptr, nullptr, 1, nullptr, 0, 0, 0, 1) == SPILLWAY_OK);
}

}  // namespace

int main() {
  test_arguments_are_checked();
  for (int32_t isa : {SPILLWAY_ISA_AUTO, SPILLWAY_ISA_SCALAR, SPILLWAY_ISA_AVX2, SPILLWAY_ISA_AVX512, SPILLWAY_ISA_NEON}) {
    if (!spillway_isa_available(isa)) {
      std::printf("instruction set %d: not on this machine, skipped\n", isa);
      continue;
    }
    for (int64_t n = 0; n < 50; ++n) {
      for (int64_t offset : {0, 1, 31}) compare(n, offset, isa, 1);
    }
    compare(2 * 65536 + 17, 1, isa, 3);
    std::printf("instruction set %d: the scalar bits\n", isa);
  }
}
