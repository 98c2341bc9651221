/* Stand-in for the CUDA runtime calls of an object that nvcc made of CUDA C++.
 *
 * Takes the place of runtime.c, which it includes and which answers what both kinds of object ask: nvcc's host code registers
 * its kernels when the library is loaded and launches them by the address of a host function, with
 * one pointer a parameter.  Device memory is the caller's: there is no cudaMalloc here.
 */
#include "runtime.c"

typedef struct { unsigned x, y, z; } dim3_t;
typedef struct { const void *host; kernel_t kernel; } entry_t;

static entry_t *entries;
static int entry_count;

static kernel_t *kernel_of(const void *host) {
  int i;
  for (i = 0; i < entry_count; ++i)
    if (entries[i].host == host) return &entries[i].kernel;
  return NULL;
}

/* ---- registration: static constructors of the object ----------------------------------------- */
HIDDEN void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  (void)binary;
  return &handle;
}
HIDDEN void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
HIDDEN void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
HIDDEN char __cudaInitModule(void **handle) { (void)handle; return 1; }

HIDDEN void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                                   int limit, void *tid, void *bid, void *block, void *grid,
                                   int *warp) {
  entry_t *more = realloc(entries, (entry_count + 1) * sizeof *entries);
  (void)handle; (void)device; (void)limit; (void)tid; (void)bid; (void)block; (void)grid; (void)warp;
  if (!more) abort();
  entries = more;
  entries[entry_count].host = host;
  entries[entry_count].kernel.name = (char *)name; /* lives as long as the library */
  entries[entry_count++].kernel.max_dynamic_smem = 0;
}
/* Variables of the device: the interpreter places and initialises them by the PTX. */
HIDDEN void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext,
                              size_t size, int constant, int global) {
  (void)handle; (void)host; (void)device; (void)name; (void)ext; (void)size; (void)constant;
  (void)global;
}

/* ---- launches -------------------------------------------------------------------------------- */
static config_t pushed; /* what <<<>>> said; the generated stub of the kernel takes it */

HIDDEN unsigned __cudaPushCallConfiguration(dim3_t grid, dim3_t block, size_t smem, void *stream) {
  config_t c = {{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, smem, stream, NULL, 0};
  pushed = c;
  return 0;
}
HIDDEN int __cudaPopCallConfiguration(dim3_t *grid, dim3_t *block, size_t *smem, void *stream) {
  memcpy(grid, pushed.grid, sizeof *grid);
  memcpy(block, pushed.block, sizeof *block);
  *smem = pushed.dynamic_smem;
  *(void **)stream = pushed.stream;
  return OK;
}

static int last_error;

HIDDEN int cudaLaunchKernelExC(const config_t *c, const void *host, void **args) {
  kernel_t *k = kernel_of(host);
  last_error = k ? _cudaLaunchKernelEx(c, k, args) : ERR_INVALID_DEVICE_FUNCTION;
  return last_error;
}
HIDDEN int cudaLaunchKernel(const void *host, dim3_t grid, dim3_t block, void **args, size_t smem,
                            void *stream) {
  config_t c = {{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, smem, stream, NULL, 0};
  return cudaLaunchKernelExC(&c, host, args);
}
/* CUDA 13: stubs ask for a handle of the kernel first; here it is the host function itself. */
HIDDEN int __cudaGetKernel(void **kernel, const void *host) {
  *kernel = (void *)host;
  return OK;
}
HIDDEN int __cudaLaunchKernel(void *kernel, dim3_t grid, dim3_t block, void **args, size_t smem,
                              void *stream) {
  return cudaLaunchKernel(kernel, grid, block, args, smem, stream);
}
HIDDEN int cudaFuncSetAttribute(const void *host, int attribute, int value) {
  kernel_t *k = kernel_of(host);
  return last_error = k ? set_attribute(k, attribute, value) : ERR_INVALID_DEVICE_FUNCTION;
}

/* ---- errors, the device, the driver's entry points ------------------------------------------- */
HIDDEN int cudaPeekAtLastError(void) { return last_error; }
HIDDEN int cudaGetLastError(void) {
  int code = last_error;
  last_error = OK;
  return code;
}
HIDDEN const char *cudaGetErrorName(int code) { return code ? "cudaError" : "cudaSuccess"; }
HIDDEN const char *cudaGetErrorString(int code) {
  static char text[64];
  snprintf(text, sizeof text, code ? "softgpu: CUDA error %d" : "no error", code);
  return text;
}
HIDDEN int cudaDeviceSynchronize(void) { return OK; }
HIDDEN int cudaStreamSynchronize(void *stream) { (void)stream; return OK; }
HIDDEN int cudaGetDevice(int *device) { return _cudaGetDevice(device); }
HIDDEN int cudaSetDevice(int device) { return _cudaSetDevice(device); }
HIDDEN int cudaGetDeviceCount(int *count) { return _cudaGetDeviceCount(count); }
HIDDEN int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  return _cudaDeviceGetAttribute(value, attribute, device);
}
HIDDEN int cudaDriverGetVersion(int *version) { *version = 13000; return OK; }
HIDDEN int cudaRuntimeGetVersion(int *version) { *version = 13000; return OK; }

HIDDEN int cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version,
                                            unsigned long long flags, int *status) {
  int known = !strcmp(name, "cuTensorMapEncodeTiled");
  (void)version; (void)flags;
  *entry = known ? (void *)_cuTensorMapEncodeTiled : NULL;
  if (status) *status = known ? 0 : 1; /* success, symbol not found */
  return OK;
}
HIDDEN int cudaGetDriverEntryPoint(const char *name, void **entry, unsigned long long flags,
                                   int *status) {
  return cudaGetDriverEntryPointByVersion(name, entry, 0, flags, status);
}
HIDDEN int cuTensorMapEncodeTiled(uint64_t map[16], int type, unsigned rank, uint64_t address,
                                  const uint64_t *extent, const uint64_t *stride,
                                  const uint32_t *box, const uint32_t *element_stride,
                                  int interleave, int swizzle, int promotion, int fill) {
  return _cuTensorMapEncodeTiled(map, type, rank, address, extent, stride, box, element_stride,
                                 interleave, swizzle, promotion, fill);
}
