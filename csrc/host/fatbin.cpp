#include "host/fatbin.h"

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

namespace msa {
namespace {

// A fat binary is a header and entries, each a header and a payload (PTX or an ELF cubin).
struct FatbinHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t header_bytes;
  uint64_t bytes;  // of all entries
};
constexpr uint32_t kMagic = 0xBA55ED50;

struct EntryHeader {
  uint16_t kind;
  uint16_t version;
  uint32_t header_bytes;
  uint64_t payload_bytes;
  uint32_t unused[3];
  uint32_t arch;  // e.g. 90
  uint32_t unused2[2];
  uint64_t flags;
};
constexpr uint16_t kElfEntry = 2;
constexpr uint64_t kArchSpecific = 1 << 20;    // sm_90a
constexpr uint64_t kFamilySpecific = 1 << 21;  // sm_100f

std::vector<char> own_file() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&built_archs), &info) == 0) return {};
  std::ifstream file(info.dli_fname, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <class T>
T read(const std::vector<char>& bytes, size_t offset) {
  T value{};
  if (offset + sizeof(T) <= bytes.size()) std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

}  // namespace

std::vector<std::string> built_archs() {
  const std::vector<char> bytes = own_file();
  std::map<uint32_t, std::string> archs;
  for (size_t offset = 0; offset + sizeof(FatbinHeader) <= bytes.size(); offset += 8) {
    const auto header = read<FatbinHeader>(bytes, offset);
    if (header.magic != kMagic || header.version != 1 ||
        header.header_bytes != sizeof(FatbinHeader)) {
      continue;
    }
    const size_t end = offset + header.header_bytes + header.bytes;
    for (size_t at = offset + header.header_bytes; at + sizeof(EntryHeader) <= end;) {
      const auto entry = read<EntryHeader>(bytes, at);
      if (entry.header_bytes < sizeof(EntryHeader)) break;
      if (entry.kind == kElfEntry) {
        const char* suffix = entry.flags & kArchSpecific     ? "a"
                             : entry.flags & kFamilySpecific ? "f"
                                                             : "";
        archs[entry.arch] = std::to_string(entry.arch) + suffix;
      }
      at += entry.header_bytes + entry.payload_bytes;
    }
  }
  std::vector<std::string> names;
  for (const auto& [arch, name] : archs) names.push_back(name);
  return names;
}

}  // namespace msa
