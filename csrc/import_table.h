// The import table of a loaded library, through which it calls functions of other libraries.
#pragma once

namespace spillway {

// Makes the library whose file name begins with `library` call `function` in place of `name` from now on. Returns how
// many of its references changed. Returns 0 if it is not loaded, does not import `name`, is not an ELF file of this
// kind, or if the system would not change one of them (other references may call `function` then, so it must serve
// them as `name` does).
int redirect_import(const char* library, const char* name, void* function);

}  // namespace spillway
