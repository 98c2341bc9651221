/* What an exported CuTe DSL object asks of its surroundings, on top of the CUDA driver alone.
 *
 * The host half of an object (argument checks, TMA descriptors, launch geometry) calls a dozen
 * functions that the DSL names after the CUDA runtime.  Each is a few lines over libcuda, which
 * every machine with a driver has, so a variant is one small library: no CUDA runtime, no DSL
 * runtime, no toolkit at link time.  libcuda is opened at the first launch, not at load: argument
 * errors are reported on machines without a GPU too.
 *
 * Linked into ONE shared library together with the object; only the object's entry stays visible,
 * so many variants live in a process without sharing state.  Constants and layouts follow the CUDA
 * driver API reference (cuda.h), names and argument orders what the object was compiled against.
 *
 * Build with -DSNAPMLA_ARCH="\"sm_90a\"" -DSNAPMLA_TOOLKIT=13 (what the object was compiled for).
 */
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define HIDDEN __attribute__((visibility("hidden")))

/* glibc 2.34 moved these into libc; the old names keep the library loadable on older systems. */
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#endif
extern void *dlopen(const char *name, int flags);
extern void *dlsym(void *handle, const char *name);
enum { LAZY = 1 };

enum {
  OK = 0,
  NO_DRIVER = 35,         /* cudaErrorInsufficientDriver */
  INVALID_CONTEXT = 201,  /* no context is current in this thread */
  INVALID_IMAGE = 200,
  INVALID_HANDLE = 400,
  NO_BINARY = 209,        /* no code for this GPU */
  UNSUPPORTED_PTX = 222,
  CAPABILITY_MAJOR = 75,  /* device attributes */
  CAPABILITY_MINOR = 76,
  CAPTURE_RELAXED = 2,    /* CU_STREAM_CAPTURE_MODE_RELAXED */
};
enum { MAX_DEVICES = 64, MAX_KERNELS = 8, MAX_CONTEXTS = 16 };

/* cudaLaunchConfig_t, as the object fills it in; its attributes have the driver's layout. */
typedef struct {
  uint32_t grid[3], block[3];
  size_t dynamic_smem;
  void *stream;
  void *attributes;
  uint32_t attribute_count;
} runtime_config;

/* CUlaunchConfig */
typedef struct {
  uint32_t grid[3], block[3];
  uint32_t dynamic_smem;
  void *stream;
  void *attributes;
  uint32_t attribute_count;
} driver_config;

/* ---- the driver ------------------------------------------------------------------------------ */
static struct {
  int (*Init)(unsigned);
  int (*DriverGetVersion)(int *);
  int (*GetErrorName)(int, const char **);
  int (*GetErrorString)(int, const char **);
  int (*DeviceGetCount)(int *);
  int (*DeviceGetAttribute)(int *, int, int);
  int (*CtxGetDevice)(int *);
  int (*CtxGetId)(void *, unsigned long long *);
  int (*CtxSetCurrent)(void *);
  int (*DevicePrimaryCtxRetain)(void **, int);
  int (*LibraryLoadData)(void **, const void *, void *, void *, unsigned, void *, void *, unsigned);
  int (*LibraryUnload)(void *);
  int (*LibraryGetKernel)(void **, void *, const char *);
  int (*KernelGetFunction)(void **, void *);
  int (*KernelGetAttribute)(int *, int, void *, int);
  int (*KernelSetAttribute)(int, int, void *, int);
  int (*LaunchKernelEx)(const driver_config *, void *, void **, void **);
  int (*ThreadExchangeStreamCaptureMode)(int *);
} cu;

static int lock_word, driver_state; /* driver_state: 0 not tried, 1 there, 2 missing */
static void *contexts[MAX_DEVICES];
static int load_failures[MAX_DEVICES]; /* why the kernels are not on a device, OK if they are */
/* Where a launch failed: the object has restored the caller's device by when it asks for words. */
static __thread int failed_device = -1;

static void lock(void) {
  while (__atomic_exchange_n(&lock_word, 1, __ATOMIC_ACQUIRE)) sched_yield();
}
static void unlock(void) { __atomic_store_n(&lock_word, 0, __ATOMIC_RELEASE); }

static int open_driver(void) {
  void *lib = dlopen("libcuda.so.1", LAZY);
  if (!lib) return NO_DRIVER;
#define FIND(name) \
  if (!(*(void **)&cu.name = dlsym(lib, "cu" #name))) return NO_DRIVER
  FIND(Init); FIND(DriverGetVersion); FIND(GetErrorName); FIND(GetErrorString);
  FIND(DeviceGetCount); FIND(DeviceGetAttribute); FIND(CtxGetDevice); FIND(CtxGetId);
  FIND(CtxSetCurrent);
  FIND(DevicePrimaryCtxRetain); FIND(LibraryLoadData); FIND(LibraryUnload);
  FIND(LibraryGetKernel); FIND(KernelGetFunction); FIND(KernelGetAttribute);
  FIND(KernelSetAttribute); FIND(LaunchKernelEx); FIND(ThreadExchangeStreamCaptureMode);
#undef FIND
  return cu.Init(0);
}

/* Call with the lock held. */
static int need_driver(void) {
  int code = OK;
  if (driver_state == 1) return OK;
  code = open_driver();
  driver_state = code == OK ? 1 : 2;
  return code;
}

/* ---- devices --------------------------------------------------------------------------------- */
/* An object asks for the device, sets that of its tensors if it is another, launches, and sets the
 * first one again.  A thread that has not used CUDA yet has none: naming device 0, as the CUDA
 * runtime does, would put a context, hundreds of megabytes, on a GPU that nobody asked for.  NONE
 * equals no tensor's device, so the launch gets its context, and after it the thread has none. */
enum { NONE = -1 };

HIDDEN int _cudaSetDevice(int device) {
  int code;
  if (device == NONE) return cu.CtxSetCurrent(NULL);
  if (device < 0 || device >= MAX_DEVICES) return 101; /* invalid device */
  if (!__atomic_load_n(&contexts[device], __ATOMIC_ACQUIRE)) {
    void *context = NULL;
    if ((code = cu.DevicePrimaryCtxRetain(&context, device))) return failed_device = device, code;
    __atomic_store_n(&contexts[device], context, __ATOMIC_RELEASE);
  }
  return cu.CtxSetCurrent(contexts[device]);
}

HIDDEN int _cudaGetDevice(int *device) {
  const int code = cu.CtxGetDevice(device);
  if (code != INVALID_CONTEXT) return code;
  *device = NONE;
  return OK;
}

HIDDEN int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  return cu.DeviceGetAttribute(value, attribute, device);
}

/* ---- library and kernels --------------------------------------------------------------------- */
HIDDEN int _cudaLibraryLoadData(void **lib, const void *data, void *a, void *b, unsigned n, void *c,
                                void *d, unsigned m) {
  return cu.LibraryLoadData(lib, data, a, b, n, c, d, m);
}
/* The library's kernels, and what they are in a context once they were launched there: launching a
 * kernel, the driver looks that up every time, which takes it 0.3 us.  An entry is written once, its
 * context last; no two contexts of a process have the same number, not even one after the other. */
static void *kernels[MAX_KERNELS];
static struct {
  unsigned long long context;
  void *function;
} functions[MAX_KERNELS][MAX_CONTEXTS];
static int kernel_count;

HIDDEN int _cudaLibraryGetKernel(void **kernel, void *lib, const char *name) {
  const int code = cu.LibraryGetKernel(kernel, lib, name);
  if (code == OK && kernel_count < MAX_KERNELS) kernels[kernel_count++] = *kernel;
  return code;
}

/* The kernel as it is in the current context; itself where that is not known. */
static void *function_of(void *kernel) {
  unsigned long long context = 0, seen = 1;
  void *function = NULL;
  int i = 0, n = 0;
  while (i < kernel_count && kernels[i] != kernel) ++i;
  if (i == kernel_count || cu.CtxGetId(NULL, &context) || !context) return kernel;
  for (; n < MAX_CONTEXTS && seen; ++n) {
    seen = __atomic_load_n(&functions[i][n].context, __ATOMIC_ACQUIRE);
    if (seen == context) return functions[i][n].function;
  }
  if (cu.KernelGetFunction(&function, kernel)) return kernel;
  lock();
  for (n = 0; n < MAX_CONTEXTS && functions[i][n].context; ++n)
    if (functions[i][n].context == context) break;
  if (n < MAX_CONTEXTS && !functions[i][n].context) {
    functions[i][n].function = function;
    __atomic_store_n(&functions[i][n].context, context, __ATOMIC_RELEASE);
  }
  unlock();
  return function;
}
HIDDEN int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  return cu.KernelGetAttribute(value, attribute, kernel, device);
}
HIDDEN int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  return cu.KernelSetAttribute(attribute, value, kernel, device);
}
HIDDEN int _cudaFuncSetAttribute(void *kernel, int attribute, int value) {
  int device = 0, code = _cudaGetDevice(&device);
  return code ? code : cu.KernelSetAttribute(attribute, value, kernel, device);
}
HIDDEN int _cudaLaunchKernelEx(const runtime_config *c, void *kernel, void **args) {
  const driver_config d = {
      {c->grid[0], c->grid[1], c->grid[2]}, {c->block[0], c->block[1], c->block[2]},
      (uint32_t)c->dynamic_smem, c->stream, c->attributes, c->attribute_count,
  };
  void *const function = function_of(kernel);
  int code = cu.LaunchKernelEx(&d, function, args, NULL);
  if (function != kernel && (code == INVALID_HANDLE || code == INVALID_CONTEXT))
    code = cu.LaunchKernelEx(&d, kernel, args, NULL); /* a stream of another context */
  if (code) cu.CtxGetDevice(&failed_device);
  return code;
}

/* ---- errors ---------------------------------------------------------------------------------- */
static void describe(char *text, size_t size, int code, int device) {
  const char *name = "unknown", *words = "no description";
  int driver = 0, major = 0, minor = 0;
  char have[16], where[64] = "";
  if (driver_state != 1 && code == NO_DRIVER) {
    snprintf(text, size, "libcuda.so.1 cannot be used: there is no NVIDIA driver here, or one "
             "older than CUDA 12");
    return;
  }
  if (cu.DriverGetVersion) cu.DriverGetVersion(&driver);
  if (driver && driver / 1000 < SNAPMLA_TOOLKIT) {
    snprintf(text, size, "this variant was built with CUDA %d and the driver supports CUDA %d.%d: "
             "update the driver, or build with `make precompile CUDA=%d`",
             SNAPMLA_TOOLKIT, driver / 1000, driver % 1000 / 10, driver / 1000);
    return;
  }
  if (device >= 0 && device < MAX_DEVICES && load_failures[device]) {
    code = load_failures[device];
    snprintf(where, sizeof where, "the kernel could not be loaded on device %d: ", device);
  }
  if (code == NO_BINARY || code == INVALID_IMAGE || code == UNSUPPORTED_PTX) {
    cu.DeviceGetAttribute(&major, CAPABILITY_MAJOR, device);
    cu.DeviceGetAttribute(&minor, CAPABILITY_MINOR, device);
    snprintf(have, sizeof have, "sm_%d%d", major, minor);
    if (strncmp(have, SNAPMLA_ARCH, strlen(have))) {
      snprintf(text, size, "this variant was built for %s and device %d is %s", SNAPMLA_ARCH,
               device, have);
      return;
    }
  }
  if (cu.GetErrorName) cu.GetErrorName(code, &name);
  if (cu.GetErrorString) cu.GetErrorString(code, &words);
  snprintf(text, size, "%sCUDA error %d (%s): %s", where, code, name, words);
}

/* Called by the object when a launch failed; `raise` is TVMFFIErrorSetRaisedFromCStrParts. */
HIDDEN void CuteDSLRT_TVMFFISetRaisedCudaError(
    void (*raise)(const char *kind, const char **parts, int32_t count), int code) {
  char text[320];
  const char *parts[1] = {text};
  int device = 0;
  if (!raise) return;
  if (failed_device >= 0) device = failed_device;
  else if (cu.CtxGetDevice) cu.CtxGetDevice(&device);
  failed_device = -1;
  describe(text, sizeof text, code, device);
  raise("RuntimeError", parts, 1);
}

/* ---- once per library ------------------------------------------------------------------------ */
/* Loads the kernels on every device; a device they are not for is skipped, unless all are. */
static int load_everywhere(void **lib, int (*init)(void **), int (*load)(void **, int),
                           int *device) {
  int count = 0, loaded = 0, failure = OK, i, code;
  memset(load_failures, 0, sizeof load_failures);
  memset(functions, 0, sizeof functions);
  kernel_count = 0;
  if ((code = init(lib)) || (code = cu.DeviceGetCount(&count))) return code;
  for (i = 0; load && i < count; ++i) {
    code = load(lib, i);
    if (i < MAX_DEVICES) load_failures[i] = code;
    if (code == OK) ++loaded;
    else if (failure == OK) failure = code, *device = i;
  }
  if (!load || loaded || !count) return OK;
  cu.LibraryUnload(*lib);
  return failure;
}

/* The first call of a variant may fall into the capture of a graph, this thread's or another's;
 * loading is no part of the graph, and the driver allows it to a thread in relaxed mode only. */
static int load_all(void **lib, int (*init)(void **), int (*load)(void **, int), int *device) {
  int mode = CAPTURE_RELAXED, code = need_driver();
  *device = 0;
  if (code || (code = cu.ThreadExchangeStreamCaptureMode(&mode))) return code;
  code = load_everywhere(lib, init, load, device);
  cu.ThreadExchangeStreamCaptureMode(&mode);
  return code;
}

HIDDEN int cuda_dialect_init_library_once(void **slot, int (*init)(void **),
                                          int (*load)(void **, int),
                                          void (*raise)(const char *kind, const char *message)) {
  void *lib = NULL;
  int code = OK, device = 0;
  char text[320];
  if (__atomic_load_n(slot, __ATOMIC_ACQUIRE)) return OK;
  lock();
  if (!*slot) {
    code = load_all(&lib, init, load, &device);
    if (code == OK) __atomic_store_n(slot, lib, __ATOMIC_RELEASE);
    else describe(text, sizeof text, code, device);
  }
  unlock();
  if (code == OK) return OK;
  if (raise) raise("RuntimeError", text);
  return -1;
}

/* Runs when the library is unloaded, which may be after the driver has shut down: nothing to do
 * then that the end of the process does not do. */
HIDDEN void cuda_dialect_unload_library_once(void **slot) { *slot = NULL; }
