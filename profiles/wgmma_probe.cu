// Runs wgmma.mma_async on operands read from files and writes the fp32 accumulators, bit for bit.
//
// It answers one question: how does Hopper's tensor core round when it accumulates?  The model in
// softgpu/tensor_core.py was fitted to this program's output; profiles/record_wgmma.py makes the
// operands, runs it and compares.
//
//   nvcc -O2 -gencode=arch=compute_90a,code=sm_90a -o wgmma_probe wgmma_probe.cu
//   wgmma_probe KIND TILES A B ACC OUT
//
// KIND: fp8x1, fp8x16, bf16x1, bf16x4, f16x1, qk (16 fp8 steps, then 4 bf16 steps), fp8x1n8 (n = 8),
//       fp8x1rs (A from registers).  One step is 32 bytes of K: 32 e4m3 or 16 bf16/f16 numbers.
// A: TILES x 64 x (32 * steps) bytes, B: TILES x N x (32 * steps) bytes (K contiguous in both),
// ACC, OUT: TILES x 64 x N float.  N is 64 unless KIND says otherwise.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cuda_runtime.h>

#define CHECK(expr)                                                                      \
  do {                                                                                   \
    cudaError_t err_ = (expr);                                                           \
    if (err_ != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s: %s\n", #expr, cudaGetErrorString(err_));                 \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)

constexpr int kRows = 64;
constexpr int kStepBytes = 32;

// K-major, no swizzle: 8 x 16-byte core matrices of 128 contiguous bytes.  Within one step the two
// core matrices of a row group are 128 bytes apart (leading), row groups 256 bytes (stride).
__device__ uint64_t make_desc(const void* smem) {
  uint64_t addr = static_cast<uint64_t>(__cvta_generic_to_shared(smem));
  return ((addr & 0x3ffff) >> 4) | (uint64_t(128 >> 4) << 16) | (uint64_t(256 >> 4) << 32);
}

#define ACC4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC32(d)                                                                         \
  ACC4(d, 0), ACC4(d, 4), ACC4(d, 8), ACC4(d, 12), ACC4(d, 16), ACC4(d, 20), ACC4(d, 24), ACC4(d, 28)
#define REGS32                                                                           \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,"  \
  "%23,%24,%25,%26,%27,%28,%29,%30,%31}"

enum class Kind { kFp8, kBf16, kF16 };

template <Kind kind>
__device__ void mma_ss(float (&d)[32], uint64_t a, uint64_t b) {
  if constexpr (kind == Kind::kFp8) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " REGS32 ", %32, %33, 1, 1, 1;"
                 : ACC32(d) : "l"(a), "l"(b));
  } else if constexpr (kind == Kind::kBf16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " REGS32 ", %32, %33, 1, 1, 1, 0, 0;"
                 : ACC32(d) : "l"(a), "l"(b));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " REGS32 ", %32, %33, 1, 1, 1, 0, 0;"
                 : ACC32(d) : "l"(a), "l"(b));
  }
}

__device__ void mma_ss_n8(float (&d)[4], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, %4, %5, 1, 1, 1;"
               : ACC4(d, 0) : "l"(a), "l"(b));
}

__device__ void mma_rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " REGS32
               ", {%32,%33,%34,%35}, %36, 1, 1, 1;"
               : ACC32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Copies rows x 32*steps bytes into one 32-byte-wide core-matrix tile per step.
__device__ void stage(uint8_t* smem, const uint8_t* gmem, int rows, int steps) {
  int chunks = steps * 2;
  for (int i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
    int row = i / chunks, chunk = i % chunks, step = chunk / 2, half = chunk % 2;
    uint8_t* dst = smem + step * rows * kStepBytes + ((row / 8) * 2 + half) * 128 + (row % 8) * 16;
    *reinterpret_cast<uint4*>(dst) =
        *reinterpret_cast<const uint4*>(gmem + size_t(row) * chunks * 16 + chunk * 16);
  }
}

template <int N, int STEPS8, int STEPS16, Kind kind16, bool RS>
__global__ void __launch_bounds__(128) probe(const uint8_t* a, const uint8_t* b, const float* acc, float* out) {
  extern __shared__ __align__(1024) uint8_t smem[];
  constexpr int kSteps = STEPS8 + STEPS16;
  constexpr int kRegs = N / 2;
  uint8_t* s_a = smem;
  uint8_t* s_b = smem + kRows * kStepBytes * kSteps;
  size_t tile = blockIdx.x;
  stage(s_a, a + tile * kRows * kStepBytes * kSteps, kRows, kSteps);
  stage(s_b, b + tile * N * kStepBytes * kSteps, N, kSteps);
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto offset = [&](int i) {
    int row = warp * 16 + lane / 4 + 8 * ((i / 2) % 2), col = (i / 4) * 8 + (lane % 4) * 2 + i % 2;
    return tile * kRows * N + size_t(row) * N + col;
  };
  float d[kRegs];
#pragma unroll
  for (int i = 0; i < kRegs; ++i) d[i] = acc[offset(i)];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  uint32_t frag[4];
  if constexpr (RS) {
    const uint8_t* row = a + tile * kRows * kStepBytes + (warp * 16 + lane / 4) * kStepBytes + (lane % 4) * 4;
    for (int i = 0; i < 4; ++i) {
      frag[i] = *reinterpret_cast<const uint32_t*>(row + (i % 2) * 8 * kStepBytes + (i / 2) * 16);
    }
  }
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    uint64_t da = make_desc(s_a + s * kRows * kStepBytes), db = make_desc(s_b + s * N * kStepBytes);
    if constexpr (RS) {
      mma_rs(d, frag, db);
    } else if constexpr (N == 8) {
      mma_ss_n8(d, da, db);
    } else if (s < STEPS8) {
      mma_ss<Kind::kFp8>(d, da, db);
    } else {
      mma_ss<kind16>(d, da, db);
    }
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < kRegs; ++i) out[offset(i)] = d[i];
}

std::vector<uint8_t> read_file(const char* path, size_t bytes) {
  std::vector<uint8_t> data(bytes);
  FILE* f = std::fopen(path, "rb");
  if (!f || std::fread(data.data(), 1, bytes, f) != bytes) {
    std::fprintf(stderr, "%s: cannot read %zu bytes\n", path, bytes);
    std::exit(1);
  }
  std::fclose(f);
  return data;
}

template <int N, int STEPS8, int STEPS16, Kind kind16, bool RS>
void run(size_t tiles, char** paths) {
  constexpr int kSteps = STEPS8 + STEPS16;
  constexpr size_t kABytes = size_t(kRows) * kStepBytes * kSteps, kBBytes = size_t(N) * kStepBytes * kSteps;
  constexpr size_t kAccBytes = size_t(kRows) * N * sizeof(float);
  std::vector<uint8_t> host[3] = {read_file(paths[0], tiles * kABytes), read_file(paths[1], tiles * kBBytes),
                                  read_file(paths[2], tiles * kAccBytes)};
  void* dev[4];
  for (int i = 0; i < 3; ++i) {
    CHECK(cudaMalloc(&dev[i], host[i].size()));
    CHECK(cudaMemcpy(dev[i], host[i].data(), host[i].size(), cudaMemcpyHostToDevice));
  }
  CHECK(cudaMalloc(&dev[3], tiles * kAccBytes));
  CHECK(cudaMemset(dev[3], 0xff, tiles * kAccBytes));
  auto kernel = probe<N, STEPS8, STEPS16, kind16, RS>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kABytes + kBBytes));
  kernel<<<tiles, 128, kABytes + kBBytes>>>(static_cast<uint8_t*>(dev[0]), static_cast<uint8_t*>(dev[1]),
                                           static_cast<float*>(dev[2]), static_cast<float*>(dev[3]));
  CHECK(cudaGetLastError());
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(host[2].data(), dev[3], tiles * kAccBytes, cudaMemcpyDeviceToHost));
  FILE* f = std::fopen(paths[3], "wb");
  if (!f || std::fwrite(host[2].data(), 1, host[2].size(), f) != host[2].size()) {
    std::fprintf(stderr, "%s: cannot write\n", paths[3]);
    std::exit(1);
  }
  std::fclose(f);
}

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: %s KIND TILES A B ACC OUT\n", argv[0]);
    return 2;
  }
  const char* kind = argv[1];
  size_t tiles = std::strtoull(argv[2], nullptr, 10);
  char** paths = argv + 3;
  if (!std::strcmp(kind, "fp8x1")) run<64, 1, 0, Kind::kBf16, false>(tiles, paths);
  else if (!std::strcmp(kind, "fp8x1rs")) run<64, 1, 0, Kind::kBf16, true>(tiles, paths);
  else if (!std::strcmp(kind, "fp8x1n8")) run<8, 1, 0, Kind::kBf16, false>(tiles, paths);
  else if (!std::strcmp(kind, "fp8x16")) run<64, 16, 0, Kind::kBf16, false>(tiles, paths);
  else if (!std::strcmp(kind, "bf16x1")) run<64, 0, 1, Kind::kBf16, false>(tiles, paths);
  else if (!std::strcmp(kind, "bf16x4")) run<64, 0, 4, Kind::kBf16, false>(tiles, paths);
  else if (!std::strcmp(kind, "f16x1")) run<64, 0, 1, Kind::kF16, false>(tiles, paths);
  else if (!std::strcmp(kind, "qk")) run<64, 16, 4, Kind::kBf16, false>(tiles, paths);
  else {
    std::fprintf(stderr, "KIND: unknown %s\n", kind);
    return 2;
  }
  return 0;
}
