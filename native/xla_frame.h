// What handlers of XLA's custom calls share: their attributes, and how they fail.
#pragma once

#include <atomic>
#include <cstring>
#include <exception>
#include <string>

#include "xla_ffi.h"

namespace pq::xla {

// A failure, as a sentence for XLA; nothing where there is none.
struct Failure {
  int code = 0;
  std::string message;
};

inline Failure refuse(const char* message) { return {kInvalidArgument, message}; }

#define PQ_TRY(expression) \
  if (pq::xla::Failure failed = (expression); failed.code != 0) return failed

struct Numbers {
  const int64_t* data = nullptr;
  size_t size = 0;
  int64_t operator[](size_t i) const { return data[i]; }
};

inline bool is_named(const Text* name, const char* wanted) {
  return name != nullptr && name->data != nullptr && name->size == std::strlen(wanted) &&
         std::memcmp(name->data, wanted, name->size) == 0;
}

inline bool is_readable(const Attributes& given) {
  return given.count >= 0 && (given.count == 0 || (given.types && given.names && given.each));
}

// An attribute of int64; false where it is none.
inline bool read_numbers(const Attributes& given, int64_t i, Numbers* out) {
  if (given.types[i] != kArray || given.each[i] == nullptr) return false;
  const auto* array = static_cast<const Array*>(given.each[i]);
  if (array->dtype != kS64 || (array->size > 0 && array->data == nullptr)) return false;
  *out = {static_cast<const int64_t*>(array->data), array->size};
  return true;
}

// A buffer by its number, operands first; null where there is none.
inline const Buffer* buffer_of(const Frame& frame, int64_t number) {
  const int64_t operands = frame.operands.count > 0 ? frame.operands.count : 0;
  const Buffers& side = number < operands ? frame.operands : frame.results;
  const int64_t i = number < operands ? number : number - operands;
  if (number < 0 || i >= side.count || side.types == nullptr || side.each == nullptr ||
      side.types[i] != kBuffer)
    return nullptr;
  return static_cast<const Buffer*>(side.each[i]);
}

// The minor version of XLA's FFI, for one that does not tell it.
inline std::atomic<int> minor_of_xla{kMinor};

inline Error* error_of(const Api* api, const Failure& failed) {
  ErrorArgs args{sizeof args, nullptr, failed.message.c_str(), failed.code};
  return api->create_error(&args);
}

inline bool answer_metadata(const Frame& frame, uint32_t traits) {
  Extension* first = frame.extensions;
  if (first == nullptr || first->type != kMetadata) return false;
  auto* asked = reinterpret_cast<MetadataRequest*>(first)->metadata;
  if (asked == nullptr) return true;
  // All minor versions have what is used here, and XLA wants its own. Older ones do not tell theirs.
  const bool tells = frame.api != nullptr && frame.api->version.major == kMajor;
  asked->version.major = kMajor;
  asked->version.minor = tells ? frame.api->version.minor : minor_of_xla.load();
  asked->traits = traits;
  return true;
}

// A handler around what it does: `body` of a frame of a version that is known, returns what XLA is told.
template <class Body>
Error* handle(Frame* frame, uint32_t traits, const Body& body) {
  if (frame == nullptr || answer_metadata(*frame, traits)) return nullptr;
  const Api* api = frame->api;
  if (api == nullptr || api->create_error == nullptr) return nullptr;  // nothing can be said
  if (frame->size < offsetof(Frame, future) || api->size < sizeof(Api) ||
      api->version.major != kMajor)
    return error_of(api, {kFailedPrecondition,
                          "This XLA speaks another version of its FFI than polyquant's compiled part."});
  try {
    return body(*frame);
  } catch (const std::exception& error) {
    return error_of(api, {kInternal, error.what()});
  }
}

}  // namespace pq::xla
