// CUDA C++ for tests/softgpu/test_cuda.py: kernels of our own, with their host code, as nvcc
// compiles them.  Every `flaw` other than 0 leaves one synchronisation out.
#include <cstdint>
#include <cstring>
#include <cooperative_groups.h>
#include <cuda.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#define ASM(...) asm volatile(__VA_ARGS__)

// ---- a GEMM of a cluster of two: D = A B^T, bf16 to f32 -----------------------------------------
// CTA r computes columns 64 r to 64 r + 63.  It loads its 64 rows of B, and half of A's 128 rows
// for both.  One warp of four issues; all load D from tensor memory, 32 lanes each.
// Shared memory: A 16 KB, B 8 KB (rows of 128 bytes, 128-byte swizzle), two mbarriers.
constexpr int kRows = 128, kColumns = 64, kDepth = 64, kTile = 64 * kDepth * 2;
constexpr int kShared = 3 * kTile + 1024;

__device__ void wait(uint32_t bar, uint32_t parity) {
  ASM("{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%0], %1; @!P bra W; }"
      :: "r"(bar), "r"(parity) : "memory");
}
__device__ void load(uint32_t to, const CUtensorMap *map, int row, uint32_t bar, uint16_t ctas) {
  ASM("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
      :: "r"(to), "l"(map), "r"(0), "r"(row), "r"(bar), "h"(ctas) : "memory");
}
__device__ uint64_t operand(uint32_t at) {  // K-major, swizzle of 128 bytes, groups of 8 rows
  return uint64_t(at >> 4) | 1ull << 16 | uint64_t(1024 >> 4) << 32 | 1ull << 46 | 2ull << 61;
}

__global__ void __launch_bounds__(128) gemm(const __grid_constant__ CUtensorMap a,
                                            const __grid_constant__ CUtensorMap b, float *d,
                                            int flaw) {
  extern __shared__ __align__(1024) unsigned char dynamic[];
  __shared__ uint64_t bars[2];
  __shared__ uint32_t where;
  uint32_t tiles = (uint32_t(__cvta_generic_to_shared(dynamic)) + 1023) & ~1023u;
  uint32_t landed = uint32_t(__cvta_generic_to_shared(bars)), done = landed + 8;
  uint32_t warp = threadIdx.x / 32, rank = cooperative_groups::this_cluster().block_rank();
  if (threadIdx.x == 0) {
    ASM("mbarrier.init.shared.b64 [%0], 1; mbarrier.init.shared.b64 [%1], 1;"
        "fence.mbarrier_init.release.cluster;" :: "r"(landed), "r"(done) : "memory");
    ASM("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(landed), "r"(3 * kTile));
  }
  if (warp == 0) {
    ASM("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 64;"
        :: "r"(uint32_t(__cvta_generic_to_shared(&where))) : "memory");
    ASM("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
  }
  ASM("tcgen05.fence::before_thread_sync;");
  if (flaw != 3) cooperative_groups::this_cluster().sync();
  else __syncthreads();  // the other CTA's mbarrier may not be initialised yet
  ASM("tcgen05.fence::after_thread_sync;");
  uint32_t columns = where;
  if (threadIdx.x == 0) {
    load(tiles + rank * kTile, &a, 64 * rank, landed, 3);
    load(tiles + 2 * kTile, &b, 64 * rank, landed, uint16_t(1 << rank));
    if (flaw != 1) wait(landed, 0);
    uint32_t form = 1 << 4 | 1 << 7 | 1 << 10 | (kColumns / 8) << 17 | (kRows / 16) << 24;
    for (int k = 0; k < kDepth / 16; ++k)
      ASM("{ .reg .pred P; setp.ne.u32 P, %4, 0;"
          "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, P; }"
          :: "r"(columns), "l"(operand(tiles + 32 * k)), "l"(operand(tiles + 2 * kTile + 32 * k)),
             "r"(form), "r"(k) : "memory");
    ASM("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
        :: "r"(done) : "memory");
  }
  __syncwarp();
  if (flaw != 2 || threadIdx.x < 32) wait(done, 0);
  ASM("tcgen05.fence::after_thread_sync;");
  uint32_t row = threadIdx.x;
  for (int at = 0; at < kColumns; at += 8) {
    uint32_t r[8];
    ASM("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]),
          "=r"(r[7]) : "r"(columns + (warp << 21) + at));
    ASM("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    float *out = d + row * 2 * kColumns + rank * kColumns + at;
    for (int i = 0; i < 8; ++i) out[i] = __uint_as_float(r[i]);
  }
  ASM("tcgen05.fence::before_thread_sync;");
  cooperative_groups::this_cluster().sync();
  ASM("tcgen05.fence::after_thread_sync;");
  if (warp == 0) ASM("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 64;" :: "r"(columns));
}

static decltype(&cuTensorMapEncodeTiled) encoder() {
  void *entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                   &found);
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
}
static int rows_of_128_bytes(CUtensorMap *map, CUtensorMapDataType type, int element, void *data,
                             int rows, int box_rows) {
  cuuint64_t extent[2] = {cuuint64_t(128 / element), cuuint64_t(rows)}, stride[1] = {128};
  cuuint32_t box[2] = {cuuint32_t(128 / element), cuuint32_t(box_rows)}, step[2] = {1, 1};
  return encoder()(map, type, 2, data, extent, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

extern "C" int run_gemm(void *a, void *b, float *d, int flaw) {
  CUtensorMap map_a, map_b;
  if (rows_of_128_bytes(&map_a, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, a, kRows, 64)) return 1;
  if (rows_of_128_bytes(&map_b, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, b, 2 * kColumns, 64)) return 1;
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute cluster[1];
  cluster[0].id = cudaLaunchAttributeClusterDimension;
  cluster[0].val.clusterDim.x = 2, cluster[0].val.clusterDim.y = cluster[0].val.clusterDim.z = 1;
  config.gridDim = dim3(2), config.blockDim = dim3(128), config.dynamicSmemBytes = kShared;
  config.attrs = cluster, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, gemm, map_a, map_b, d, flaw);
}

// ---- four rows of 8-byte elements, gathered ------------------------------------------------------
__global__ void gather(const __grid_constant__ CUtensorMap map, unsigned char *out, int4 rows) {
  __shared__ __align__(1024) unsigned char tile[4 * 128];
  __shared__ uint64_t bar;
  uint32_t at = uint32_t(__cvta_generic_to_shared(&bar));
  if (threadIdx.x == 0) {
    ASM("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;"
        "mbarrier.arrive.expect_tx.shared.b64 _, [%0], 512;" :: "r"(at) : "memory");
    ASM("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
        :: "r"(uint32_t(__cvta_generic_to_shared(tile))), "l"(&map), "r"(0), "r"(rows.x),
           "r"(rows.y), "r"(rows.z), "r"(rows.w), "r"(at) : "memory");
  }
  __syncthreads();
  wait(at, 0);
  for (int i = threadIdx.x; i < 4 * 128; i += 32) out[i] = tile[i ^ (i / 128 % 8 * 16)];
}
extern "C" int run_gather(void *data, int count, unsigned char *out, int x, int y, int z, int w) {
  CUtensorMap map;
  if (rows_of_128_bytes(&map, CU_TENSOR_MAP_DATA_TYPE_INT64, 8, data, count, 1)) return 1;
  gather<<<1, 32>>>(map, out, make_int4(x, y, z, w));
  return cudaGetLastError();
}

// ---- barriers by threads, clusters by declaration ------------------------------------------------
// Lane 7 of each warp stores and comes to the barrier on a path of its own.
__global__ void __launch_bounds__(64) by_threads(int *out, int flaw) {
  __shared__ int word[2];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 7) {
    word[warp] = 100 + warp;
    if (flaw == 1) ASM("barrier.sync 2, 64;" ::: "memory");
    else if (flaw == 2) ASM("bar.sync 1, 64;" ::: "memory");
    else ASM("barrier.sync 1, 64;" ::: "memory");
    out[threadIdx.x] = -1;
  } else {
    ASM("barrier.sync 1, 64;" ::: "memory");
    out[threadIdx.x] = word[warp ^ 1];
  }
}
extern "C" int run_by_threads(int *out, int flaw) {
  by_threads<<<1, 64>>>(out, flaw);
  return cudaGetLastError();
}

// Each CTA adds its dynamic array to that of the next one, through the array's bulk addition, and
// reads the other's sum.
__device__ int factor = 3;
__global__ void __cluster_dims__(2, 1, 1) ring(const float *in, float *total, float *out, int n,
                                               int flaw) {
  extern __shared__ __align__(16) float values[];
  auto cluster = cooperative_groups::this_cluster();
  for (int i = threadIdx.x; i < n; i += blockDim.x)
    values[i] = factor * in[blockIdx.x * n + i];
  if (flaw != 1) ASM("fence.proxy.async;" ::: "memory");
  if (flaw == 2) __syncthreads();
  else cluster.sync();
  const float *other = cluster.map_shared_rank(values, cluster.block_rank() ^ 1);
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[blockIdx.x * n + i] = other[i];
  if (threadIdx.x == 0) {
    ASM("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
        :: "l"(total), "r"(uint32_t(__cvta_generic_to_shared(values))), "r"(4 * n) : "memory");
  }
  cluster.sync();
}
extern "C" int run_ring(const float *in, float *total, float *out, int n, int limit, int flaw) {
  if (cudaFuncSetAttribute(ring, cudaFuncAttributeMaxDynamicSharedMemorySize, limit)) return 98;
  ring<<<4, 64, limit>>>(in, total, out, n, flaw);
  return cudaGetLastError();
}

// ---- exponents: the device's instruction, and what NVIDIA's header computes on a host ------------
template <cudaRoundMode rounding, __nv_saturation_t saturate>
__host__ __device__ unsigned short code(float2 x) {
  return __nv_cvt_float2_to_e8m0x2(x, saturate, rounding);
}
__host__ __device__ void all_codes(float2 x, unsigned short *to) {
  to[0] = code<cudaRoundZero, __NV_NOSAT>(x);
  to[1] = code<cudaRoundZero, __NV_SATFINITE>(x);
  to[2] = code<cudaRoundPosInf, __NV_NOSAT>(x);
  to[3] = code<cudaRoundPosInf, __NV_SATFINITE>(x);
  __nv_bfloat162_raw back = __nv_cvt_e8m0x2_to_bf162raw(to[3]);
  to[4] = back.x, to[5] = back.y;
}
__global__ void exponents(const float2 *x, unsigned short *out, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) all_codes(x[i], out + 6 * i);
}
extern "C" int run_exponents(const float2 *x, unsigned short *device, unsigned short *host, int n) {
  for (int i = 0; i < n; ++i) all_codes(x[i], host + 6 * i);
  exponents<<<1, 128>>>(x, device, n);
  return cudaGetLastError();
}

extern "C" int device_facts(int *out) {
  cudaDeviceGetAttribute(out, cudaDevAttrMultiProcessorCount, 0);
  return cudaDeviceGetAttribute(out + 1, cudaDevAttrComputeCapabilityMajor, 0);
}
extern "C" int no_such_entry(void) {
  void *entry;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuCtxCreate", &entry, 12000, cudaEnableDefault, &found);
  return entry || found != cudaDriverEntryPointSymbolNotFound;
}
extern "C" int fails(void) { return cudaErrorInvalidValue; }
