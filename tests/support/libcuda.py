"""A stand-in for libcuda, in C: it answers the dozen driver calls of launch.c and prints them."""

from __future__ import annotations

DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#define CASE(name) (getenv("FAKE") && !strcmp(getenv("FAKE"), name))
#define PART(word) (getenv("FAKE") && strstr(getenv("FAKE"), word))
typedef struct {
  unsigned grid[3], block[3], smem;
  void *stream, *attrs;
  unsigned n;
} config;
static _Thread_local int context_set; /* a context is current for one thread */
__attribute__((constructor)) static void begin(void) { context_set = PART("current") ? 1 : 0; }
int cuInit(unsigned f) { (void)f; return 0; }
int cuDriverGetVersion(int *v) { *v = CASE("old") ? 12040 : 13000; return 0; }
int cuGetErrorName(int c, const char **s) { (void)c; *s = "CUDA_ERROR_FAKE"; return 0; }
int cuGetErrorString(int c, const char **s) { (void)c; *s = "as asked"; return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
  int right = CASE("image") || ((CASE("other") || CASE("full")) && d == 0);
  *v = a == 75 ? (right ? 9 : 8) : a == 76 ? (right ? 0 : d) : 232448;
  return 0;
}
int cuCtxGetDevice(int *d) { *d = context_set - 1; return context_set ? 0 : 201; }
static int launches; /* "contexts": a new one of the device for each, as if it had been reset */
static long context_id(void) { return context_set + (PART("contexts") ? 16 * launches : 0); }
int cuCtxGetId(void *c, unsigned long long *id) {
  (void)c;
  *id = (unsigned long long)context_id();
  return context_set ? 0 : 201;
}
int cuCtxSetCurrent(void *c) {
  context_set = (int)(long)c;
  if (c) printf("device %d\n", context_set - 1);
  else printf("no device\n");
  return 0;
}
int cuDevicePrimaryCtxRetain(void **c, int d) {
  *c = (void *)(long)(d + 1);
  printf("context on %d\n", d);
  return PART("memory") ? 2 : 0;
}
int cuStreamCreate(void **s, unsigned f) { (void)f; *s = (void *)0x55; return 0; }
int cuStreamSynchronize(void *s) { printf("wait for %p\n", s); return 0; }
int cuMemAlloc_v2(unsigned long long *p, size_t n) {
  void *made = NULL;
  const int code = posix_memalign(&made, 256, n);
  *p = (unsigned long long)made;
  return code;
}
int cuMemcpyHtoD_v2(unsigned long long to, const void *from, size_t n) {
  memcpy((void *)to, from, n);
  return 0;
}
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t n) {
  memcpy(to, (const void *)from, n);
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
  static _Thread_local int current = 0; /* global: whoever captures, unsafe calls fail */
  int old = current;
  current = *mode;
  *mode = old;
  printf("capture mode %d\n", current);
  return 0;
}
int cuLibraryLoadData(void **l, const void *data, void *a, void *b, unsigned n, void *c, void *d,
                      unsigned m) {
  (void)data; (void)a; (void)b; (void)n; (void)c; (void)d; (void)m;
  *l = (void *)1;
  printf("load\n");
  if (CASE("slow")) nanosleep(&(struct timespec){0, 50000000}, NULL);
  return CASE("old") || CASE("image") ? 200 : 0;
}
int cuLibraryUnload(void *l) { (void)l; printf("unload\n"); return 0; }
int cuLibraryGetKernel(void **k, void *l, const char *name) {
  (void)l;
  *k = (void *)2;
  return strncmp(name, "kernel_cutlass", 14) ? 500 : 0;
}
int cuKernelGetFunction(void **f, void *k) {
  if (CASE("kernels")) return 801;
  *f = (void *)(0x100000L | (long)k << 16 | context_id());
  printf("function on %d\n", context_set - 1);
  return 0;
}
int cuKernelGetAttribute(int *v, int a, void *k, int d) {
  (void)a; (void)k;
  *v = 0;
  if (CASE("full") && d == 1) return 2;
  return CASE("arch") || (PART("half") && d == 0) || (CASE("other") && d == 1) ? 209 : 0;
}
int cuKernelSetAttribute(int a, int v, void *k, int d) {
  (void)k;
  printf("attribute %d = %d on %d\n", a, v, d);
  return 0;
}
int cuLaunchKernelEx(const config *c, void *k, void **args, void **extra) {
  const long here = 0x100000L | 2 << 16 | context_id();
  (void)extra;
  if (PART("stream")) { /* which is another context's: it takes kernels, not this one's functions */
    if ((long)k != 2) return 400;
  } else if ((long)k != (CASE("kernels") ? 2 : here)) {
    return 400; /* not this context's function */
  }
  ++launches;
  printf("launch %u %u %u | %u %u %u | %u | stream %p | attributes %u | tokens %p\n", c->grid[0],
         c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->smem, c->stream, c->n,
         *(void **)args[0]);
  if (PART("slow")) nanosleep(&(struct timespec){0, 2000000}, NULL);
  if (CASE("full") || CASE("other")) return context_set == 2 ? 1 : 0;
  return CASE("launch") || PART("failing") ? 701 : 0;
}
"""
