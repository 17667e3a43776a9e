// A test is a program: it exits with 0, or reports which check failed and exits with 1.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(fact)                                                          \
  do {                                                                       \
    if (!(fact)) {                                                           \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #fact); \
      std::exit(1);                                                          \
    }                                                                        \
  } while (false)
