// Stands in for FlashMLA-ETAP's library where there is no GPU: the two functions that
// profiles.peer_libraries.FlashMlaEtap calls, as plain attention over host memory.  Results stay NaN
// unless metadata and splits are those of a plan for as many requests and parts.

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { PAGE = 64, D = 576, D_V = 512, META = 8, MOST_TOKENS = 1024 };

enum { BF16 = 0, FP16 = 1 };

static float widened(uint16_t x, int dtype) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    if (dtype == FP16) {  // finite ones
        const int exponent = x >> 10 & 31, fraction = x & 1023;
        value = exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24);
        return x >> 15 ? -value : value;
    }
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t rounded(float value, int dtype) {  // to nearest, ties to even
    uint32_t bits;
    if (dtype == FP16) {  // below 65520
        int exponent;
        frexpf(value, &exponent);
        const int step = exponent - 11 < -24 ? -24 : exponent - 11;
        const int units = (int)rintf(ldexpf(fabsf(value), -step));
        return (uint16_t)((signbit(value) ? 1 << 15 : 0) + ((step + 24) << 10) + units);
    }
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void flashmla_etap_plan(
    const int *lengths, int b, int parts, int *metadata, int *splits, void *stream
) {
    (void)stream;
    for (int i = 0; i < parts * META; ++i) metadata[i] = parts;
    splits[0] = 0;
    for (int i = 0; i < b; ++i) splits[i + 1] = splits[i] + lengths[i];
}

void flashmla_etap_decode(
    int dtype, const uint16_t *q, const uint16_t *cache, const int *lengths, const int *table,
    int64_t table_stride, int b, int s_q, int h, float scale, const int *metadata, int parts,
    const int *splits, uint16_t *out, float *lse, float *out_accum, float *lse_accum, void *stream
) {
    (void)stream;
    if ((dtype != BF16 && dtype != FP16) || metadata[parts * META - 1] != parts) return;
    const int64_t partial_rows = (int64_t)(b + parts) * s_q * h;
    memset(out_accum, 0, partial_rows * D_V * sizeof(float));
    memset(lse_accum, 0, partial_rows * sizeof(float));
    for (int64_t row = 0; row < (int64_t)b * s_q * h; ++row) {
        const int request = row / (s_q * h), token = row / h % s_q;
        const int length = splits[request + 1] - splits[request];
        const int seen = length - (s_q - 1 - token);
        if (length != lengths[request] || length > MOST_TOKENS || seen < 1) continue;
        const uint16_t *rows[MOST_TOKENS];
        double p[MOST_TOKENS], top = -INFINITY, sum = 0;
        for (int t = 0; t < seen; ++t) {
            rows[t] = cache + ((int64_t)table[request * table_stride + t / PAGE] * PAGE + t % PAGE) * D;
            p[t] = 0;
            for (int i = 0; i < D; ++i)
                p[t] += widened(q[row * D + i], dtype) * widened(rows[t][i], dtype);
            p[t] *= scale;
            if (p[t] > top) top = p[t];
        }
        for (int t = 0; t < seen; ++t) sum += p[t] = exp(p[t] - top);
        for (int i = 0; i < D_V; ++i) {
            double total = 0;
            for (int t = 0; t < seen; ++t) total += p[t] * widened(rows[t][i], dtype);
            out[row * D_V + i] = rounded(total / sum, dtype);
        }
        lse[row] = top + log(sum);
    }
}
