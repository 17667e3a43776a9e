// Every instruction set gives the scalar bits, at every length and alignment, and writes nothing outside its arrays.
#include <algorithm>
#include <cstring>
#include <new>
#include <random>
#include <vector>

#include "check.h"
#include "spillway.h"

namespace {

constexpr float kGuard = 7.0f;
constexpr int64_t kMargin = 64;

// Memory that begins at a line, so that offset 0 does, too.
template <class T>
struct OfLines {
  using value_type = T;
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
  void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t(64)); }
  bool operator==(const OfLines&) const { return true; }
  bool operator!=(const OfLines&) const { return false; }
};

template <class T>
struct Guarded {
  Guarded(int64_t n, int64_t offset)
      : buffer(static_cast<size_t>(n + 2 * kMargin), T(kGuard)), begin(kMargin + offset), n(n) {}
  T* data() { return buffer.data() + begin; }
  bool intact() const {
    const auto is_guard = [](T value) { return value == T(kGuard); };
    return std::all_of(buffer.begin(), buffer.begin() + begin, is_guard) &&
           std::all_of(buffer.begin() + begin + n, buffer.end(), is_guard);
  }
  bool operator==(const Guarded& other) const {
    return std::memcmp(buffer.data(), other.buffer.data(), buffer.size() * sizeof(T)) == 0;
  }
  std::vector<T, OfLines<T>> buffer;
  int64_t begin, n;
};

// Random bits, for which the instruction sets must agree, too.
struct AnyMap {
  explicit AnyMap(uint32_t seed) : values(256), nearest(2 * SPILLWAY_NUM_BUCKETS) {
    std::mt19937 random(seed);
    for (float& value : values) value = static_cast<float>(static_cast<int32_t>(random())) / 2147483648.0f;
    for (uint32_t& entry : nearest) entry = (random() % 256) << 16 | random() % 0x10000;
  }
  std::vector<float> values;
  std::vector<uint32_t> nearest;
};
const AnyMap kFirst(3), kSecond(4);
const spillway_map kMaps[2] = {{kFirst.values.data(), kFirst.nearest.data()}, {kSecond.values.data(), kSecond.nearest.data()}};

int64_t kept_bytes(int64_t n) { return n + 4 * ((n + SPILLWAY_BLOCK_VALUES - 1) / SPILLWAY_BLOCK_VALUES); }

struct Arrays {
  Arrays(int64_t n, int64_t offset, uint32_t seed)
      : p(n, offset), m(n, (offset + 1) % 32), v(n, (offset + 2) % 32), g(n, (offset + 3) % 32),
        m16(n, (offset + 1) % 32), v16(n, (offset + 2) % 32), out16(n, offset), out32(n, offset), new_p(n, offset),
        new_m(n, offset), new_v(n, offset), new_m16(n, offset), new_v16(n, offset), m8(kept_bytes(n), (offset + 1) % 32),
        v8(kept_bytes(n), (offset + 2) % 32), new_m8(kept_bytes(n), offset), new_v8(kept_bytes(n), offset) {
    std::mt19937 random(seed);
    for (float* array : {p.data(), m.data(), v.data(), g.data()}) {
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = random();  // any float32: denormals, infinities and NaNs too
        std::memcpy(array + i, &bits, sizeof bits);
      }
    }
    for (uint16_t* array : {m16.data(), v16.data()}) {
      for (int64_t i = 0; i < n; ++i) array[i] = static_cast<uint16_t>(random());
    }
    for (uint8_t* array : {m8.data(), v8.data()}) {  // scales of every kind, too
      for (int64_t i = 0; i < kept_bytes(n); ++i) array[i] = static_cast<uint8_t>(random());
    }
  }
  Guarded<float> p, m, v, g;
  Guarded<uint16_t> m16, v16, out16;
  Guarded<float> out32;
  Guarded<float> new_p, new_m, new_v;
  Guarded<uint16_t> new_m16, new_v16;
  Guarded<uint8_t> m8, v8, new_m8, new_v8;

  void step(int32_t rule, int32_t moment_type, int32_t gradient_type, int32_t out_type, int32_t isa, int32_t num_threads,
            bool in_place) {
    const spillway_update_scalars scalars = {0.37f, 0.99997f, 0.01f, 0.9f, 0.9f, 0.1f, 0.95f, 0.05f, 0.22f, 1e-8f, 3e-3f};
    void* out = out_type == SPILLWAY_FLOAT32 ? static_cast<void*>(out32.data()) : out16.data();
    spillway_states before = {p.data(), m.data(), v.data()}, elsewhere = {new_p.data(), new_m.data(), new_v.data()};
    if (moment_type == SPILLWAY_BFLOAT16) {
      before = {p.data(), m16.data(), v16.data()}, elsewhere = {new_p.data(), new_m16.data(), new_v16.data()};
    }
    if (moment_type == SPILLWAY_INT8) {
      before = {p.data(), m8.data(), v8.data()}, elsewhere = {new_p.data(), new_m8.data(), new_v8.data()};
    }
    CHECK(spillway_update(rule, &scalars, &before, in_place ? &before : &elsewhere, moment_type, kMaps, g.data(),
                          gradient_type, out, out_type, p.n, isa, num_threads) == SPILLWAY_OK);
  }
  bool states_are(const Arrays& o) const {
    return p == o.p && m == o.m && v == o.v && m16 == o.m16 && v16 == o.v16 && m8 == o.m8 && v8 == o.v8;
  }
  bool operator==(const Arrays& o) const { return states_are(o) && out16 == o.out16 && out32 == o.out32; }
  // Whether an update to other arrays wrote what `o` has after one in place, and left its own states unchanged.
  bool made_elsewhere(const Arrays& o, const Arrays& untouched, int32_t moment_type, bool has_second) const {
    const bool half = moment_type == SPILLWAY_BFLOAT16, bytes = moment_type == SPILLWAY_INT8;
    const bool made_m = bytes ? same(new_m8, o.m8) : half ? same(new_m16, o.m16) : same(new_m, o.m);
    const bool same_v = bytes ? same(new_v8, o.v8) : half ? same(new_v16, o.v16) : same(new_v, o.v);
    const bool made_v = !has_second || same_v;
    return states_are(untouched) && same(new_p, o.p) && made_m && made_v && out16 == o.out16 && out32 == o.out32;
  }
  bool intact() const {
    return p.intact() && m.intact() && v.intact() && m16.intact() && v16.intact() && out16.intact() && out32.intact() &&
           new_p.intact() && new_m.intact() && new_v.intact() && new_m16.intact() && new_v16.intact() && m8.intact() &&
           v8.intact() && new_m8.intact() && new_v8.intact();
  }
  // Compares the arrays themselves, wherever they begin.
  template <class T>
  static bool same(const Guarded<T>& a, const Guarded<T>& b) {
    return std::memcmp(&a.buffer[static_cast<size_t>(a.begin)], &b.buffer[static_cast<size_t>(b.begin)],
                       static_cast<size_t>(a.n) * sizeof(T)) == 0;
  }
};

void compare(int64_t n, int64_t offset, int32_t isa, int32_t num_threads) {
  const Arrays before(n, offset, 1);
  for (int32_t gradient_type : {SPILLWAY_FLOAT32, SPILLWAY_BFLOAT16, SPILLWAY_FLOAT16}) {
    for (int32_t rule : {SPILLWAY_ADAMW, SPILLWAY_ADAM, SPILLWAY_SGD_MOMENTUM, SPILLWAY_LION}) {
      for (int32_t out_type : {SPILLWAY_FLOAT32, SPILLWAY_BFLOAT16, SPILLWAY_FLOAT16, SPILLWAY_NONE}) {
        const bool has_second = rule == SPILLWAY_ADAMW || rule == SPILLWAY_ADAM;
        for (int32_t moment_type : {SPILLWAY_FLOAT32, SPILLWAY_BFLOAT16, SPILLWAY_INT8}) {
          // Threads divide pieces whatever these hold, so a quarter of the cases of one thread suffices, with every
          // pair of values in it.
          if (num_threads > 1 && (gradient_type + rule + out_type + moment_type) % 4 != 0) continue;
          Arrays plain = before, vectors = before, elsewhere = before;
          plain.step(rule, moment_type, gradient_type, out_type, SPILLWAY_ISA_SCALAR, 1, true);
          vectors.step(rule, moment_type, gradient_type, out_type, isa, num_threads, true);
          CHECK(plain == vectors);
          CHECK(vectors.intact());
          elsewhere.step(rule, moment_type, gradient_type, out_type, isa, num_threads, false);
          CHECK(elsewhere.made_elsewhere(plain, before, moment_type, has_second));
          CHECK(elsewhere.intact());
        }
      }
    }
    for (int32_t first : {0, 1}) {
      Arrays plain = before, vectors = before;
      CHECK(!spillway_accumulate(plain.p.data(), plain.g.data(), gradient_type, first, n, SPILLWAY_ISA_SCALAR, 1));
      CHECK(!spillway_accumulate(vectors.p.data(), vectors.g.data(), gradient_type, first, n, isa, num_threads));
      CHECK(plain == vectors);
      CHECK(vectors.intact());
    }
  }
}

int32_t update(int32_t rule, float* moment2, int32_t gradient_type, int32_t out_type, int64_t n, int32_t isa,
               int32_t moment_type = SPILLWAY_FLOAT32, const spillway_map* maps = nullptr) {
  const spillway_update_scalars scalars = {};
  float p[1] = {}, m[1] = {}, g[1] = {};
  const spillway_states states = {p, m, moment2};
  return spillway_update(rule, &scalars, &states, &states, moment_type, maps, g, gradient_type, nullptr, out_type, n, isa,
                         1);
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
  for (int32_t type : {0, 3, 9}) CHECK(update(SPILLWAY_ADAMW, v, 1, 0, 1, 0, type) == SPILLWAY_BAD_ARGUMENT);
  CHECK(update(SPILLWAY_ADAMW, v, 1, 2, 1, 0) == SPILLWAY_BAD_ARGUMENT);
  CHECK(update(SPILLWAY_ADAMW, v, 1, 0, -1, 0) == SPILLWAY_BAD_ARGUMENT);
  CHECK(update(SPILLWAY_ADAMW, v, 1, 0, 1, 99) == SPILLWAY_ISA_UNAVAILABLE);
  const spillway_states none = {};
  const auto of_none = [&](const spillway_states* before, const spillway_states* after) {
    return spillway_update(1, &scalars, before, after, 1, nullptr, nullptr, 1, nullptr, 0, 0, 0, 1);
  };
  CHECK(of_none(&none, &none) == SPILLWAY_OK);
  CHECK(of_none(&none, nullptr) == SPILLWAY_BAD_ARGUMENT);
  CHECK(of_none(nullptr, &none) == SPILLWAY_BAD_ARGUMENT);
  const spillway_map half[2] = {kMaps[0], {kMaps[1].values, nullptr}};
  float blocks[2] = {};
  CHECK(update(SPILLWAY_ADAMW, blocks, 1, 0, 0, 0, SPILLWAY_INT8, kMaps) == SPILLWAY_OK);
  CHECK(update(SPILLWAY_ADAMW, blocks, 1, 0, 0, 0, SPILLWAY_INT8, half) == SPILLWAY_BAD_ARGUMENT);
  CHECK(update(SPILLWAY_ADAMW, blocks, 1, 0, 0, 0, SPILLWAY_INT8) == SPILLWAY_BAD_ARGUMENT);
  CHECK(update(SPILLWAY_LION, nullptr, 1, 0, 0, 0, SPILLWAY_INT8, half) == SPILLWAY_OK);
}

}  // namespace

int main() {
  test_arguments_are_checked();
  for (int32_t isa : {SPILLWAY_ISA_AUTO, SPILLWAY_ISA_SCALAR, SPILLWAY_ISA_AVX2, SPILLWAY_ISA_AVX512, SPILLWAY_ISA_NEON}) {
    if (!spillway_isa_available(isa)) {
      std::printf("instruction set %d: not on this machine, skipped\n", isa);
      continue;
    }
    if (isa == SPILLWAY_ISA_AUTO) {
      compare(49, 1, isa, 3);  // one of the others
      continue;
    }
#if !defined(__SANITIZE_THREAD__)  // in one thread the sanitizer has nothing to find, and all lengths take minutes
    for (int64_t n = 0; n < 50; ++n) {
      for (int64_t offset : {0, 1, 31}) compare(n, offset, isa, 1);
    }
    for (int64_t n : {255, 256, 257, 513}) compare(n, 1, isa, 1);
#endif
    compare(2 * 65536 + 17, 1, isa, 3);
    std::printf("instruction set %d: the scalar bits\n", isa);
  }
}
