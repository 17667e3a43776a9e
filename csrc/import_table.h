// Where a loaded library calls functions of another: its import table.
#pragma once

namespace spillway {

// Has the library whose file name begins with `library` call `function` in place of `name`, from now on. The number of
// its references that changed; 0 where it is not loaded, does not import `name`, is not an ELF file of this kind, or
// where the system refused to change one of them (others may call `function` then: it must serve them as `name` does).
int redirect_import(const char* library, const char* name, void* function);

}  // namespace spillway
