// The floating-point environment of the declared arithmetic, for the lifetime of a scope.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace spillway {

// Round to nearest even, denormals kept, exceptions masked. A caller (torch.set_flush_denormal, a library built with
// -ffast-math) may have set flush-to-zero, which would change bits. The end of the scope restores the caller's mode.
class FloatMode {
 public:
  FloatMode() : saved_(read()) { write(kDeclared); }
  ~FloatMode() { write(saved_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__SSE2__)
  using Word = uint32_t;
  static constexpr Word kDeclared = 0x1F80;
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kDeclared = 0;
  static Word read() {
    Word word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { __asm__ volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = uint32_t;
  static constexpr Word kDeclared = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif
  const Word saved_;
};

}  // namespace spillway
