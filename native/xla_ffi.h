// The part of XLA's FFI that a handler here uses, in C++ of our own: building needs no jaxlib.
// Binary interface 0.3; what is used of it is the same from 0.1 (jaxlib 0.6) to 0.4 (0.11). A test compares
// sizes, offsets and numbers with the header that jaxlib comes with.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pq::xla {

inline constexpr int kMajor = 0, kMinor = 3;

// Every structure begins with its size, by which newer ones are told from older ones.
struct Extension {
  size_t size;
  int type;
  Extension* next;
};
inline constexpr int kMetadata = 1;  // a type of Extension

struct Version {
  size_t size;
  Extension* extensions;
  int major, minor;
};

struct Error;
struct ErrorArgs {
  size_t size;
  Extension* extensions;
  const char* message;
  int code;
};
inline constexpr int kInvalidArgument = 3, kNotFound = 5, kFailedPrecondition = 9, kInternal = 13;

struct Context;
struct StreamArgs {
  size_t size;
  Extension* extensions;
  Context* context;
  void* stream;  // out
};

struct Api {
  size_t size;
  Extension* extensions;
  Version version;
  const void* internal;
  Error* (*create_error)(ErrorArgs*);
  void* error_message;
  void* destroy_error;
  void* register_handler;
  Error* (*get_stream)(StreamArgs*);
};

inline constexpr int kU8 = 6, kS64 = 5, kF16 = 10, kF32 = 11, kBF16 = 16;  // dtypes

struct Buffer {
  size_t size;
  Extension* extensions;
  int dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};
inline constexpr int kBuffer = 1;  // a type of an operand, and of a result

struct Text {
  const char* data;
  size_t size;
};

struct Array {
  int dtype;
  size_t size;
  void* data;
};
inline constexpr int kArray = 1, kText = 4;  // types of an attribute

struct Buffers {  // operands or results
  size_t size;
  Extension* extensions;
  int64_t count;
  int* types;
  void** each;
};

struct Attributes {  // in the order of their names
  size_t size;
  Extension* extensions;
  int64_t count;
  int* types;
  Text** names;
  void** each;
};

inline constexpr int kInitialize = 2, kExecute = 3;  // stages

struct Frame {
  size_t size;
  Extension* extensions;
  const Api* api;
  Context* context;
  int stage;
  Buffers operands;
  Buffers results;
  Attributes attributes;
  void* future;
};

inline constexpr uint32_t kCommandBufferCompatible = 1;  // a trait

struct Metadata {
  size_t size;
  Version version;
  uint32_t traits;
};

struct MetadataRequest {
  Extension extension;
  Metadata* metadata;
};

using Handler = Error*(Frame*);

}  // namespace pq::xla
