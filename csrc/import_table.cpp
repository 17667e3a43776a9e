#include "import_table.h"

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace spillway {
namespace {

#if defined(__x86_64__)
constexpr uint32_t kSlot = R_X86_64_JUMP_SLOT, kData = R_X86_64_GLOB_DAT;
#else
constexpr uint32_t kSlot = R_AARCH64_JUMP_SLOT, kData = R_AARCH64_GLOB_DAT;
#endif

struct Wanted {
  const char *library, *name;
  void* function;
  int changed, rejected;
};

struct Table {
  const ElfW(Rela) * entries;
  size_t count;
};

// Tables that are bound at start (RELRO) are read-only; they are made writable for this one store.
bool store(void** slot, void* function, bool is_read_only) {
  const uintptr_t page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) / page_bytes * page_bytes);
  if (is_read_only && mprotect(page, page_bytes, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(slot, function, __ATOMIC_RELEASE);
  if (is_read_only) mprotect(page, page_bytes, PROT_READ);
  return true;
}

bool is_relro(const dl_phdr_info& info, const void* address) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address) - info.dlpi_addr;
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const auto& header = info.dlpi_phdr[i];
    if (header.p_type == PT_GNU_RELRO && at - header.p_vaddr < header.p_memsz) return true;
  }
  return false;
}

void change(const dl_phdr_info& info, const ElfW(Dyn) * dynamic, Wanted& wanted) {
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  Table slots{}, data{};
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    const uintptr_t value = dynamic->d_un.d_ptr;  // the loader has relocated these to addresses
    if (dynamic->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(value);
    if (dynamic->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(value);
    if (dynamic->d_tag == DT_JMPREL) slots.entries = reinterpret_cast<const ElfW(Rela)*>(value);
    if (dynamic->d_tag == DT_PLTRELSZ) slots.count = value / sizeof(ElfW(Rela));
    if (dynamic->d_tag == DT_RELA) data.entries = reinterpret_cast<const ElfW(Rela)*>(value);
    if (dynamic->d_tag == DT_RELASZ) data.count = value / sizeof(ElfW(Rela));
  }
  if (symbols == nullptr || names == nullptr) return;
  for (const Table& table : {slots, data}) {
    for (size_t i = 0; table.entries != nullptr && i < table.count; ++i) {
      const auto& entry = table.entries[i];
      const auto kind = static_cast<uint32_t>(ELF64_R_TYPE(entry.r_info));
      if (kind != kSlot && kind != kData) continue;
      if (std::strcmp(names + symbols[ELF64_R_SYM(entry.r_info)].st_name, wanted.name) != 0) continue;
      auto** slot = reinterpret_cast<void**>(info.dlpi_addr + entry.r_offset);
      ++(store(slot, wanted.function, is_relro(info, slot)) ? wanted.changed : wanted.rejected);
    }
  }
}

int visit(dl_phdr_info* info, size_t, void* context) {
  auto& wanted = *static_cast<Wanted*>(context);
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* file = slash != nullptr ? slash + 1 : info->dlpi_name;
  if (std::strncmp(file, wanted.library, std::strlen(wanted.library)) != 0) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_DYNAMIC) continue;
    change(*info, reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + header.p_vaddr), wanted);
  }
  return 0;
}

}  // namespace

int redirect_import(const char* library, const char* name, void* function) {
  Wanted wanted{library, name, function, 0, 0};
  dl_iterate_phdr(visit, &wanted);
  return wanted.rejected > 0 ? 0 : wanted.changed;
}

}  // namespace spillway

#else

namespace spillway {

int redirect_import(const char*, const char*, void*) { return 0; }

}  // namespace spillway

#endif
