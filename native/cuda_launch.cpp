#include "cuda_launch.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace pq {
namespace {

// -- the driver -------------------------------------------------------------------------------

using Status = int;  // CUresult

struct LaunchAttribute {  // CUlaunchAttribute
  int kind;
  char padding[4];
  union {
    char room[64];
    unsigned cluster[3];
    int early;
  };
};

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};

constexpr int kCluster = 4;         // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr int kEarly = 6;           // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr Status kNoDriver = 34;    // CUDA_ERROR_STUB_LIBRARY
constexpr int kMostShared = 8;      // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int kBfloat16 = 9;        // CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
constexpr int kSwizzle128 = 3;      // CU_TENSOR_MAP_SWIZZLE_128B
constexpr int kPromoteTo256 = 3;    // CU_TENSOR_MAP_L2_PROMOTION_L2_256B
constexpr size_t kMapBytes = 128, kMapAlignment = 64;

// What is called of libcuda.so.1, which is there wherever a GPU is.
struct Driver {
  Status (*error_name)(Status, const char**);
  Status (*library_load)(void**, const void*, int*, void**, unsigned, int*, void**, unsigned);
  Status (*library_kernel)(void**, void*, const char*);
  Status (*kernel_function)(void**, void*);
  Status (*kernel_attribute)(int, int, void*, int);
  Status (*stream_context)(void*, void**);
  Status (*push_context)(void*);
  Status (*pop_context)(void**);
  Status (*context_device)(int*);
  Status (*tensor_map)(void*, int, unsigned, void*, const uint64_t*, const uint64_t*,
                       const unsigned*, const unsigned*, int, int, int, int);
  Status (*launch)(const LaunchConfig*, void*, void**, void**);
  bool is_whole;
};

const Driver& driver() {
  static const Driver found = [] {
    Driver made{};
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return made;
    made.is_whole = true;
    auto find = [&](auto& function, const char* name) {
      void* symbol = dlsym(library, name);
      made.is_whole = made.is_whole && symbol != nullptr;
      std::memcpy(&function, &symbol, sizeof symbol);
    };
    find(made.error_name, "cuGetErrorName");
    find(made.library_load, "cuLibraryLoadData");
    find(made.library_kernel, "cuLibraryGetKernel");
    find(made.kernel_function, "cuKernelGetFunction");
    find(made.kernel_attribute, "cuKernelSetAttribute");
    find(made.stream_context, "cuStreamGetCtx");
    find(made.push_context, "cuCtxPushCurrent_v2");
    find(made.pop_context, "cuCtxPopCurrent_v2");
    find(made.context_device, "cuCtxGetDevice");
    find(made.tensor_map, "cuTensorMapEncodeTiled");
    find(made.launch, "cuLaunchKernelEx");
    return made;
  }();
  return found;
}

// -- errors -----------------------------------------------------------------------------------

using xla::Failure, xla::Numbers, xla::refuse;

Failure check(Status status, const char* call) {
  if (status == 0) return {};
  const char* name = nullptr;
  if (driver().error_name(status, &name) != 0 || name == nullptr) name = "an unknown error";
  return {xla::kInternal, std::string(call) + " of the CUDA driver answered " + name + "."};
}

// -- kernels ----------------------------------------------------------------------------------

struct Kernel {
  std::string code, function;
  size_t argument;
  void* loaded = nullptr;  // CUkernel: of no context
  std::unordered_map<int, int> shared;  // bytes asked for, by device
};

struct Kept {
  std::mutex mutex;
  std::unordered_map<std::string, std::unique_ptr<Kernel>> kernels;
};

Kept& kept() {
  static Kept* made = new Kept;  // XLA's threads may outlive static objects
  return *made;
}

// The kernel of a digest, ready to be launched in the current context.
Failure find_kernel(const std::string& digest, int shared, size_t argument, void** function) {
  Kept& all = kept();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto found = all.kernels.find(digest);
  if (found == all.kernels.end())
    return {xla::kNotFound,
            "The CUDA kernel " + digest.substr(0, 16) +
                "... of this program is not known in this process. polyquant compiles it where "
                "the product is traced: trace and compile the program here."};
  Kernel& kernel = *found->second;
  if (argument != kernel.argument) return refuse("The kernel's argument is of another size.");
  const Driver& cuda = driver();
  if (kernel.loaded == nullptr) {
    void* library = nullptr;
    PQ_TRY(check(cuda.library_load(&library, kernel.code.data(), nullptr, nullptr, 0, nullptr,
                                   nullptr, 0),
                 "cuLibraryLoadData"));
    PQ_TRY(check(cuda.library_kernel(&kernel.loaded, library, kernel.function.c_str()),
                 "cuLibraryGetKernel"));
  }
  int device = 0;
  PQ_TRY(check(cuda.context_device(&device), "cuCtxGetDevice"));
  auto asked = kernel.shared.find(device);
  if (asked == kernel.shared.end() || asked->second < shared) {
    void* now = nullptr;  // loads it here: at its launch a graph may be recorded
    PQ_TRY(check(cuda.kernel_function(&now, kernel.loaded), "cuKernelGetFunction"));
    PQ_TRY(check(cuda.kernel_attribute(kMostShared, shared, kernel.loaded, device),
                 "cuKernelSetAttribute"));
    kernel.shared[device] = shared;
  }
  *function = kernel.loaded;
  return {};
}

// -- what XLA hands over ----------------------------------------------------------------------

struct Launch {
  std::string kernel;
  Numbers launch, argument, places, maps;
};

constexpr size_t kMostArgument = 4096 / 8;  // of a kernel, in int64
constexpr size_t kMostMaps = 2, kOfMap = 8;  // tensor maps of a launch, numbers of each

Failure read(const xla::Attributes& given, Launch* out) {
  const std::pair<const char*, Numbers*> wanted[] = {{"launch", &out->launch},
                                                     {"argument", &out->argument},
                                                     {"places", &out->places},
                                                     {"maps", &out->maps}};
  if (!xla::is_readable(given)) return refuse("The custom call's attributes are not readable.");
  int found = 0;
  for (int64_t i = 0; i < given.count; ++i) {
    const void* each = given.each[i];
    if (each == nullptr) return refuse("An attribute of the custom call is missing.");
    if (xla::is_named(given.names[i], "kernel") && given.types[i] == xla::kText) {
      const auto* text = static_cast<const xla::Text*>(each);
      if (text->data != nullptr) out->kernel.assign(text->data, text->size), ++found;
    }
    for (auto [name, numbers] : wanted)
      found += xla::is_named(given.names[i], name) && xla::read_numbers(given, i, numbers);
  }
  if (found != 5) return refuse("The custom call takes kernel, launch, argument, places and maps.");
  if (out->launch.size != 8 || out->argument.size == 0 || out->argument.size > kMostArgument ||
      out->places.size % 2 != 0 || out->maps.size % kOfMap != 0 || out->maps.size > kMostMaps * kOfMap)
    return refuse("An attribute of the custom call has the wrong number of numbers.");
  for (size_t i = 0; i < 8; ++i)
    if (out->launch[i] < (i < 7) || out->launch[i] > INT32_MAX)
      return refuse("The custom call's launch is out of range.");
  return {};
}

// The address of a buffer by its number, operands first.
Failure address_of(const xla::Frame& frame, int64_t number, void** out) {
  const xla::Buffer* buffer = xla::buffer_of(frame, number);
  if (buffer == nullptr) return refuse("The custom call names a buffer that it has not.");
  *out = buffer->data;
  if (reinterpret_cast<uintptr_t>(*out) % 16 != 0)
    return {xla::kFailedPrecondition, "A buffer of the product does not begin at whole 16 bytes."};
  return {};
}

// The argument, with the addresses of buffers in their places.
Failure fill(const xla::Frame& frame, const Launch& given, unsigned char* argument) {
  const int64_t bytes = static_cast<int64_t>(given.argument.size) * 8;
  std::memcpy(argument, given.argument.data, bytes);
  void* address = nullptr;
  for (size_t i = 0; i < given.places.size; i += 2) {
    const int64_t offset = given.places[i];
    if (offset < 0 || offset % 8 != 0 || offset > bytes - 8)
      return refuse("A buffer's place lies outside of the kernel's argument.");
    PQ_TRY(address_of(frame, given.places[i + 1], &address));
    std::memcpy(argument + offset, &address, 8);
  }
  return {};
}

// A tensor map, which the driver makes.
struct Map {
  int64_t offset;
  void* address;
  uint64_t extents[3], strides[2];
  unsigned box[3];
};

// `first`: of its numbers.
Failure read_map(const xla::Frame& frame, const Launch& given, size_t first, Map* out) {
  int64_t map[kOfMap];
  for (size_t i = 0; i < kOfMap; ++i) map[i] = given.maps[first + i];
  const int64_t bytes = static_cast<int64_t>(given.argument.size) * 8;
  if (map[0] < 0 || map[0] % int64_t{kMapAlignment} != 0 || map[0] > bytes - int64_t{kMapBytes})
    return refuse("The tensor map lies outside of the kernel's argument.");
  for (size_t i = 2; i < 8; ++i)
    if (map[i] < 1 || (map[i] > INT32_MAX && i < 5) || (map[i] > 256 && i == 7))
      return refuse("A number of the tensor map is out of range.");
  PQ_TRY(address_of(frame, map[1], &out->address));
  out->offset = map[0];
  for (int i = 0; i < 3; ++i) out->extents[i] = static_cast<uint64_t>(map[2 + i]);
  for (int i = 0; i < 2; ++i) out->strides[i] = static_cast<uint64_t>(map[5 + i]);
  out->box[0] = 64, out->box[1] = static_cast<unsigned>(map[7]), out->box[2] = 1;
  return {};
}

// The context of a stream is the current one for as long as this lives.
struct Entered {
  explicit Entered(void* context) : is_in(driver().push_context(context) == 0) {}
  ~Entered() {
    void* left = nullptr;
    if (is_in) driver().pop_context(&left);
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  bool is_in;
};

Failure run(const xla::Frame& frame, const Launch& given, void* stream) {
  const bool is_launch = frame.stage != xla::kInitialize;
  alignas(kMapAlignment) unsigned char argument[kMostArgument * 8];
  Map maps[kMostMaps];
  const size_t count = given.maps.size / kOfMap;
  if (is_launch) {
    PQ_TRY(fill(frame, given, argument));
    for (size_t i = 0; i < count; ++i)
      PQ_TRY(read_map(frame, given, i * kOfMap, &maps[i]));
  }
  const Driver& cuda = driver();
  if (!cuda.is_whole)
    return {xla::kFailedPrecondition,
            "libcuda.so.1 of CUDA 12 or newer is not on this machine, so that no CUDA kernel runs."};
  void* context = nullptr;
  PQ_TRY(check(cuda.stream_context(stream, &context), "cuStreamGetCtx"));
  Entered entered(context);
  if (!entered.is_in) return {xla::kInternal, "The stream's CUDA context cannot be entered."};
  const Numbers& each = given.launch;
  const int shared = static_cast<int>(each[7]);
  void* function = nullptr;
  PQ_TRY(find_kernel(given.kernel, shared, given.argument.size * 8, &function));
  if (!is_launch) return {};
  for (size_t i = 0; i < count; ++i) {
    const Map& map = maps[i];
    const unsigned ones[3] = {1, 1, 1};
    PQ_TRY(check(cuda.tensor_map(argument + map.offset, kBfloat16, 3, map.address, map.extents,
                                 map.strides, map.box, ones, 0, kSwizzle128, kPromoteTo256, 0),
                 "cuTensorMapEncodeTiled"));
  }
  CudaLaunch launch{};
  for (int i = 0; i < 3; ++i) launch.blocks[i] = static_cast<unsigned>(each[i]);
  for (int i = 0; i < 3; ++i) launch.cluster[i] = static_cast<unsigned>(each[3 + i]);
  launch.threads = static_cast<unsigned>(each[6]), launch.shared = static_cast<unsigned>(shared);
  return check(enqueue(launch, function, stream, argument), "cuLaunchKernelEx");
}

}  // namespace

int enqueue(const CudaLaunch& given, void* function, void* stream, void* argument) {
  if (!driver().is_whole) return kNoDriver;
  LaunchConfig config{};
  std::copy_n(given.blocks, 3, config.grid);
  config.block[0] = given.threads, config.block[1] = config.block[2] = 1;
  config.shared = given.shared;
  config.stream = stream;
  LaunchAttribute attributes[2] = {};
  if (given.cluster[0] > 1 || given.cluster[1] > 1 || given.cluster[2] > 1) {
    LaunchAttribute& each = attributes[config.count++];
    each.kind = kCluster;
    std::copy_n(given.cluster, 3, each.cluster);
  }
  if (given.early) {
    LaunchAttribute& each = attributes[config.count++];
    each.kind = kEarly, each.early = 1;
  }
  config.attributes = attributes;
  void* arguments[] = {argument};
  return driver().launch(&config, function, arguments, nullptr);
}

void keep_cuda_kernel(const std::string& digest, std::string code, std::string function,
                      size_t argument) {
  auto made = std::make_unique<Kernel>();
  made->code = std::move(code);
  made->function = std::move(function);
  made->argument = argument;
  Kept& all = kept();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.kernels.try_emplace(digest, std::move(made));
}

xla::Error* cuda_launch(xla::Frame* frame) {
  return xla::handle(frame, xla::kCommandBufferCompatible, [](const xla::Frame& frame) {
    Launch given;
    Failure failed = read(frame.attributes, &given);
    xla::StreamArgs stream{sizeof stream, nullptr, frame.context, nullptr};
    if (failed.code == 0) {
      if (xla::Error* error = frame.api->get_stream(&stream)) return error;  // XLA's own
      failed = run(frame, given, stream.stream);
    }
    return failed.code == 0 ? nullptr : xla::error_of(frame.api, failed);
  });
}

}  // namespace pq
