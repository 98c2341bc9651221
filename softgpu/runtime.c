/* Stand-in for the CUDA runtime calls an exported CuTe DSL object makes.
 *
 * The host half of such an object (argument checks, TMA descriptors, launch geometry) is ordinary
 * x86 code.  This file answers its few CUDA calls and hands every launch to a callback, so that
 * the kernel can be interpreted on the CPU.  It is linked into ONE shared object together with the
 * exported .o; every symbol but softgpu_set_callback is hidden, so two such objects in one process
 * never see each other's state.
 *
 * Build: cc -shared -fPIC -fvisibility=hidden -Wl,-Bsymbolic kernel.o runtime.c -ltvm_ffi
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HIDDEN __attribute__((visibility("hidden")))
#define PUBLIC __attribute__((visibility("default")))

enum { OK = 0, ERR_INVALID_VALUE = 1, ERR_INVALID_DEVICE_FUNCTION = 98, ERR_LAUNCH_FAILURE = 719 };

/* cudaLaunchAttribute: id, padding to 8 bytes, a union of 64 bytes. */
typedef struct { uint32_t id, pad; union { uint32_t u[16]; char bytes[64]; } value; } attribute_t;

/* cudaLaunchConfig_t */
typedef struct {
  uint32_t grid[3], block[3];
  size_t dynamic_smem;
  void *stream;
  const attribute_t *attributes;
  unsigned attribute_count;
} config_t;

/* What the Python side receives; keep in step with runtime.py:_Launch. */
typedef struct {
  const char *kernel;
  uint32_t grid[3], block[3], cluster[3];
  uint32_t pdl, cooperative, attribute_count;
  uint64_t dynamic_smem, max_dynamic_smem, stream;
  void **params;
} launch_t;

typedef struct { char *name; int max_dynamic_smem; } kernel_t;

static int (*launch_callback)(const launch_t *);

PUBLIC void softgpu_set_callback(int (*f)(const launch_t *)) { launch_callback = f; }

/* ---- library and kernel handles -------------------------------------------------------------- */
HIDDEN int cuda_dialect_init_library_once(void **lib, int (*init)(void **),
                                          int (*load)(void **, int),
                                          void (*raise)(const char *kind, const char *message)) {
  void *fresh = NULL;
  char text[96];
  int code;
  if (*lib) return OK;
  code = init(&fresh);
  if (code == OK && load) code = load(&fresh, 0);
  if (code != OK) {
    snprintf(text, sizeof text, "softgpu: the kernel library cannot be loaded, CUDA error %d", code);
    if (raise) raise("RuntimeError", text);
    return -1;
  }
  *lib = fresh;
  return OK;
}
HIDDEN void cuda_dialect_unload_library_once(void **lib) { *lib = NULL; }

HIDDEN int _cudaLibraryLoadData(void **lib, const void *data, void *a, void *b, unsigned n, void *c,
                                void *d, unsigned m) {
  (void)a; (void)b; (void)n; (void)c; (void)d; (void)m;
  *lib = (void *)data;
  return OK;
}
HIDDEN int _cudaLibraryUnload(void *lib) { (void)lib; return OK; }

HIDDEN int _cudaLibraryGetKernel(void **kernel, void *lib, const char *name) {
  kernel_t *k = calloc(1, sizeof *k);
  (void)lib;
  if (!k) return ERR_INVALID_VALUE;
  k->name = malloc(strlen(name) + 1);
  if (!k->name) return ERR_INVALID_VALUE;
  strcpy(k->name, name);
  *kernel = k;
  return OK;
}

/* ---- devices and attributes: one H200, or a B200 if so asked --------------------------------- */
static int capability = 90;

PUBLIC void softgpu_set_capability(int c) { capability = c; }

HIDDEN int _cudaGetDevice(int *device) { *device = 0; return OK; }
HIDDEN int _cudaSetDevice(int device) { return device == 0 ? OK : ERR_INVALID_VALUE; }
HIDDEN int _cudaGetDeviceCount(int *count) { *count = 1; return OK; }
HIDDEN int _cudaGetLastError(void) { return OK; }
HIDDEN int _cudaDeviceSynchronize(void) { return OK; }
HIDDEN int _cudaStreamSynchronize(void *stream) { (void)stream; return OK; }
HIDDEN int _cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }

HIDDEN int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case 1: *value = 1024; break;      /* max threads per block */
    case 8: *value = 49152; break;     /* shared memory per block without opt-in */
    case 10: *value = 32; break;       /* warp size */
    case 12: *value = 65536; break;    /* registers per block */
    case 16: *value = capability >= 100 ? 148 : 132; break; /* multiprocessors */
    case 39: *value = 2048; break;     /* threads per multiprocessor */
    case 75: *value = capability / 10; break; /* compute capability */
    case 76: *value = capability % 10; break;
    case 81: *value = 233472; break;   /* shared memory per multiprocessor */
    case 97: *value = 232448; break;   /* shared memory per block, opt-in */
    case 111: *value = 1024; break;    /* shared memory reserved per block */
    case 120: *value = 1; break;       /* cluster launch */
    default:
      fprintf(stderr, "softgpu: device attribute %d is not modelled\n", attribute);
      return ERR_INVALID_VALUE;
  }
  return OK;
}
HIDDEN int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  (void)attribute; (void)kernel; (void)device;
  *value = 0; /* static shared memory and the like: the interpreter places it itself */
  return OK;
}
static int set_attribute(void *kernel, int attribute, int value) {
  if (attribute == 8) { /* max dynamic shared memory */
    if (value > 232448) return ERR_INVALID_VALUE;
    ((kernel_t *)kernel)->max_dynamic_smem = value;
  }
  return OK;
}
HIDDEN int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
  return set_attribute(kernel, attribute, value);
}
HIDDEN int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  (void)device;
  return set_attribute(kernel, attribute, value);
}

/* ---- launches -------------------------------------------------------------------------------- */
HIDDEN int _cudaLaunchKernelEx(const config_t *c, void *kernel, void **args) {
  const kernel_t *k = kernel;
  launch_t l;
  unsigned i;
  memset(&l, 0, sizeof l);
  l.kernel = k->name;
  memcpy(l.grid, c->grid, sizeof l.grid);
  memcpy(l.block, c->block, sizeof l.block);
  l.cluster[0] = l.cluster[1] = l.cluster[2] = 1;
  l.dynamic_smem = c->dynamic_smem;
  l.max_dynamic_smem = (uint64_t)k->max_dynamic_smem;
  l.stream = (uint64_t)(uintptr_t)c->stream;
  l.attribute_count = c->attribute_count;
  l.params = args;
  for (i = 0; i < c->attribute_count; ++i) {
    const attribute_t *a = &c->attributes[i];
    if (a->id == 4) memcpy(l.cluster, a->value.u, sizeof l.cluster);
    else if (a->id == 6) l.pdl = a->value.u[0];
    else if (a->id == 2) l.cooperative = a->value.u[0];
  }
  return launch_callback ? launch_callback(&l) : ERR_LAUNCH_FAILURE;
}

HIDDEN int _cudaLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                             unsigned by, unsigned bz, void **args, size_t smem, void *stream) {
  config_t c = {{gx, gy, gz}, {bx, by, bz}, smem, stream, NULL, 0};
  return _cudaLaunchKernelEx(&c, kernel, args);
}

/* ---- tensor maps ----------------------------------------------------------------------------- */
/* CUtensorMapDataType -> the map's element type; -1 where that is not known. */
static const signed char element_code[13] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, -1, -1, -1};

/* The tiled format that ops/tma.py decodes: strides in 16 bytes, extents and boxes less one. */
HIDDEN int _cuTensorMapEncodeTiled(uint64_t map[16], int type, unsigned rank, uint64_t address,
                                   const uint64_t *extent, const uint64_t *stride,
                                   const uint32_t *box, const uint32_t *element_stride,
                                   int interleave, int swizzle, int promotion, int fill) {
  uint64_t e[5] = {0}, s[4] = {0}, b[5] = {0};
  unsigned i;
  (void)promotion; (void)fill;
  if (type < 0 || type > 12 || element_code[type] < 0 || rank < 1 || rank > 5 || interleave ||
      swizzle < 0 || swizzle > 3 || address % 16)
    return ERR_INVALID_VALUE;
  for (i = 0; i < rank; ++i) {
    if (!extent[i] || extent[i] > 1ull << 32 || !box[i] || box[i] > 256 || element_stride[i] != 1)
      return ERR_INVALID_VALUE;
    e[i] = extent[i] - 1;
    b[i] = box[i] - 1;
    if (i + 1 == rank) break;
    if (stride[i] % 16 || stride[i] >= 1ull << 36) return ERR_INVALID_VALUE;
    s[i] = stride[i] / 16;
  }
  memset(map, 0, 128);
  map[0] = address;
  map[1] = 2 | (uint64_t)(rank - 1) << 4 | (uint64_t)element_code[type] << 7 |
           (uint64_t)swizzle << 13 | 1 << 18 | s[0] << 32;
  map[2] = s[1] | s[2] << 32;
  map[3] = s[3];
  map[4] = e[0] | e[1] << 32;
  map[5] = e[2] | e[3] << 32;
  map[6] = e[4] | b[0] << 56;
  map[7] = b[1] | b[2] << 8 | b[3] << 16 | b[4] << 24;
  return OK;
}

/* ---- errors ---------------------------------------------------------------------------------- */
HIDDEN void cuda_dialect_assert_success(int code) {
  if (!code) return;
  fprintf(stderr, "softgpu: a CUDA call of the host code failed with error %d\n", code);
  abort();
}

/* Called by the object when a launch failed; `raise` is TVMFFIErrorSetRaisedFromCStrParts. */
HIDDEN void CuteDSLRT_TVMFFISetRaisedCudaError(
    void (*raise)(const char *kind, const char **parts, int32_t count), int code) {
  char text[64];
  const char *parts[1] = {text};
  if (!raise) return;
  snprintf(text, sizeof text, "softgpu: CUDA error %d", code);
  raise("RuntimeError", parts, 1);
}
