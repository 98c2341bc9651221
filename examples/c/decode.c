/* Append, plan and decode from C: DLTensors, a stream, errors as text.  No Python, no toolkit.
 *
 * Two sequences, 16 heads, pages of 64 tokens: 100 tokens of latents that are 1 and 2 in turn, and
 * an empty sequence.  A query of zeros attends to all tokens alike, so the results are known.
 * README.md beside this file says how to build it.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tvm/ffi/extra/c_env_api.h>

#include "append_kv_xbf16_ii32_sm90a.h"
#include "decode_etap_r16_p64_obf16_sm90a.h"
#include "plan_decode_sm90a.h"

enum { BATCH = 2, HEADS = 16, S_Q = 1, PAGE = 64, PAGES = 2, WIDTH = 2, TOKENS = 100 };
/* Work is cut into PARTS, one a multiprocessor; any number is right, the GPU's own is fast. */
enum { PARTS = 132, ITEMS = PARTS + BATCH, SLOTS = 2 * PARTS, ROWS = 16, TILE = 64, OVERHEAD = 6 };

/* ---- memory: any allocator will do; this one is the driver, opened at run time ---------------- */
static struct {
  int (*Init)(unsigned);
  int (*DevicePrimaryCtxRetain)(void **, int);
  int (*CtxSetCurrent)(void *);
  int (*StreamCreate)(void **, unsigned);
  int (*StreamSynchronize)(void *);
  int (*MemAlloc_v2)(unsigned long long *, size_t);
  int (*MemcpyHtoD_v2)(unsigned long long, const void *, size_t);
  int (*MemcpyDtoH_v2)(void *, unsigned long long, size_t);
  int (*GetErrorString)(int, const char **);
} cu;
static int have_driver;

static void need(int code, const char *what) {
  const char *words = "no description";
  if (!code) return;
  cu.GetErrorString(code, &words);
  fprintf(stderr, "%s: CUDA error %d: %s\n", what, code, words);
  exit(1);
}

/* A stream of device 0; NULL without a driver, which the first kernel reports better than we. */
static void *open_device(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY), *context = NULL, *stream = NULL;
  if (!driver) return NULL;
#define FIND(name)                                                   \
  if (!(*(void **)&cu.name = dlsym(driver, "cu" #name))) {           \
    fprintf(stderr, "libcuda.so.1 lacks cu" #name "\n");             \
    exit(1);                                                         \
  }
  FIND(Init) FIND(DevicePrimaryCtxRetain) FIND(CtxSetCurrent) FIND(StreamCreate)
  FIND(StreamSynchronize) FIND(MemAlloc_v2) FIND(MemcpyHtoD_v2) FIND(MemcpyDtoH_v2)
  FIND(GetErrorString)
#undef FIND
  need(cu.Init(0), "the driver");
  need(cu.DevicePrimaryCtxRetain(&context, 0), "device 0");
  need(cu.CtxSetCurrent(context), "device 0");
  need(cu.StreamCreate(&stream, 0), "a stream");
  have_driver = 1;
  return stream;
}

/* ---- tensors ----------------------------------------------------------------------------------- */
typedef struct {
  DLTensor dl; /* what kernels take */
  int64_t shape[4], strides[4];
  size_t bytes;
} tensor;

static const DLDataType U8 = {kDLUInt, 8, 1}, I32 = {kDLInt, 32, 1};
static const DLDataType BF16 = {kDLBfloat, 16, 1}, F32 = {kDLFloat, 32, 1},
                        F16 = {kDLFloat, 16, 1};

/* A contiguous tensor on device 0, filled from `from`, or with zeros if that is NULL. */
static DLTensor *make(tensor *t, DLDataType type, int ndim, const int64_t *shape, const void *from) {
  unsigned long long address = 0;
  void *zeros = NULL;
  int i;
  t->bytes = type.bits / 8;
  for (i = ndim - 1; i >= 0; --i) {
    t->shape[i] = shape[i];
    t->strides[i] = i == ndim - 1 ? 1 : t->strides[i + 1] * shape[i + 1];
    t->bytes *= (size_t)shape[i];
  }
  if (have_driver && t->bytes) {
    need(cu.MemAlloc_v2(&address, t->bytes), "memory");
    if (!from && !(zeros = calloc(1, t->bytes))) exit(1);
    need(cu.MemcpyHtoD_v2(address, from ? from : zeros, t->bytes), "a copy");
    free(zeros);
  }
  memset(&t->dl, 0, sizeof t->dl);
  t->dl.data = (void *)(uintptr_t)address;
  t->dl.device.device_type = kDLCUDA;
  t->dl.ndim = ndim;
  t->dl.dtype = type;
  t->dl.shape = t->shape;
  t->dl.strides = t->strides;
  return &t->dl;
}
#define MAKE(t, type, ndim, from, ...) make(&t, type, ndim, (const int64_t[]){__VA_ARGS__}, from)

static void fetch(const tensor *t, void *to) {
  need(cu.MemcpyDtoH_v2(to, (unsigned long long)(uintptr_t)t->dl.data, t->bytes), "a copy");
}

/* ---- errors ------------------------------------------------------------------------------------ */
/* What a call returns is 0, or there is an error object with a kind and one sentence. */
static void check(int code, const char *what) {
  TVMFFIObjectHandle error = NULL;
  const TVMFFIErrorCell *cell;
  if (!code) return;
  TVMFFIErrorMoveFromRaised(&error);
  cell = (const TVMFFIErrorCell *)((const char *)error + sizeof(TVMFFIObject));
  fprintf(stderr, "%s: %.*s: %.*s\n", what, (int)cell->kind.size, cell->kind.data,
          (int)cell->message.size, cell->message.data);
  TVMFFIObjectDecRef(error);
  exit(1);
}

static float from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

int main(void) {
  static uint16_t latents[TOKENS][512], out_bits[BATCH][HEADS][512];
  static float ones[BATCH * HEADS], lse_host[BATCH][HEADS];
  static int32_t slots[TOKENS];
  const int32_t lengths_host[BATCH] = {TOKENS, 0}, pages[BATCH][WIDTH] = {{0, 1}, {0, 0}};
  tensor content, rope, scale, c_kv, k_rope, slot_mapping;        /* cache, new tokens */
  tensor lengths, table, items, parts, splits, planned;           /* work list */
  tensor queries, limits, units, unit_begin, row_limits, offsets; /* empty: see below */
  tensor q_nope, q_rope, q_scale, out, lse, o_accum, lse_accum;   /* decode */
  void *stream = open_device();
  int i, j;

  for (i = 0; i < TOKENS; ++i) {
    slots[i] = i; /* page * 64 + place in the page */
    for (j = 0; j < 512; ++j) latents[i][j] = i % 2 ? 0x4000 : 0x3f80; /* 2 and 1 */
  }
  for (i = 0; i < BATCH * HEADS; ++i) ones[i] = 1;

  /* Kernels launch on the stream that is current for their tensors' device in this thread. */
  TVMFFIEnvSetStream(kDLCUDA, 0, stream, NULL);

  check(snapmla_append_kv_xbf16_ii32_sm90a(
            MAKE(content, U8, 3, NULL, PAGES, PAGE, 512),
            MAKE(rope, BF16, 3, NULL, PAGES, PAGE, 64), MAKE(scale, F32, 2, NULL, PAGES, PAGE),
            MAKE(c_kv, BF16, 2, latents, TOKENS, 512), MAKE(k_rope, BF16, 2, NULL, TOKENS, 64),
            MAKE(slot_mapping, I32, 1, slots, TOKENS)),
        "append");

  /* All sequences have S_Q query tokens, and all their rows are scheduled together: no queries of
   * different length, no limits of their own, no table of units of rows. */
  check(snapmla_plan_decode_sm90a(
            MAKE(lengths, I32, 1, lengths_host, BATCH), MAKE(queries, I32, 1, NULL, 0),
            MAKE(limits, I32, 1, NULL, 0), MAKE(items, I32, 2, NULL, ITEMS, 8),
            MAKE(parts, I32, 1, NULL, PARTS + 1), MAKE(splits, I32, 1, NULL, BATCH + 1),
            MAKE(planned, I32, 1, NULL, BATCH), MAKE(units, I32, 2, NULL, 0, 2),
            MAKE(unit_begin, I32, 1, NULL, 0), MAKE(row_limits, I32, 1, NULL, 0), WIDTH * PAGE,
            TILE, OVERHEAD, /* fixed splits */ 0, /* longest item, stretches */ 0, 1,
            /* ns of a tile, of reading one: as measured for 16 rows */ 870, 10, HEADS, S_Q, ROWS,
            /* causal */ 1),
        "plan");

  check(snapmla_decode_etap_r16_p64_obf16_sm90a(
            MAKE(q_nope, U8, 4, NULL, BATCH, S_Q, HEADS, 512),
            MAKE(q_rope, BF16, 4, NULL, BATCH, S_Q, HEADS, 64),
            MAKE(q_scale, F32, 3, ones, BATCH, S_Q, HEADS), &content.dl, &rope.dl, &scale.dl,
            MAKE(table, I32, 2, pages, BATCH, WIDTH), &lengths.dl, &items.dl, &parts.dl,
            &splits.dl, &units.dl, &row_limits.dl, MAKE(offsets, I32, 1, NULL, 0),
            MAKE(out, BF16, 4, NULL, BATCH, S_Q, HEADS, 512),
            MAKE(lse, F32, 3, NULL, BATCH, HEADS, S_Q),
            MAKE(o_accum, F16, 3, NULL, SLOTS, ROWS, 528), MAKE(lse_accum, F32, 2, NULL, SLOTS, ROWS),
            1 / sqrt(192), /* causal */ 1, /* natural logarithm */ log(2), /* empty rows */ -INFINITY,
            /* may split */ 1, /* no witness: offsets are empty */ 0),
        "decode");

  need(cu.StreamSynchronize(stream), "the kernels");
  fetch(&out, out_bits);
  fetch(&lse, lse_host);
  printf("out %.3f, lse %.4f; empty: out %.0f, lse %.0f\n", from_bf16(out_bits[0][3][7]),
         lse_host[0][3], from_bf16(out_bits[1][3][7]), lse_host[1][3]);
  return 0;
}
