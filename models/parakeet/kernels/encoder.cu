// Parakeet's encoder: what lies between its matrix products, and the products of few rows.
//
// Each kernel's one parameter is a structure of 64-bit words, of which ``Arguments`` in fused.py is the other half: word
// by word in the order in which the kernel takes them. Rows are frames, B · T of them, elements of a row lie together.
// A row of ``n_frames`` frames is the buffer's own; what lies behind is padding, which no own frame may see.
#include "sizes.h"
#include "warp.cuh"

struct Arguments {
    u64 word[N_ARGUMENTS];
    template <typename T>
    __device__ __forceinline__ T* at(int i) const { return (T*)word[i]; }
    __device__ __forceinline__ int number(int i) const { return (int)word[i]; }
    __device__ __forceinline__ float real(int i) const { return __uint_as_float((u32)word[i]); }
};

#define KERNEL(name, n_threads, n_blocks) \
    extern "C" __global__ void __launch_bounds__(n_threads, n_blocks) name(const __grid_constant__ Arguments a)

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
__device__ __forceinline__ int halved(int n) { return (n - 1) / 2 + 1; }  // frames behind a stride of 2

// ---------------------------------------------------------------------- products of few rows

// y[rows, n] = x[rows, k] · w[n, k]ᵀ. A block has COLUMNS · 8 columns and 256 · CHUNKS of k, which its 8 warps share; it
// asks for all of its weights before it waits for x. Elements 8 t to 8 t + 7 of each 32 of k are one 16-byte piece of
// lane t: the order in which k is summed does not matter, as long as it is the same for x and w.
#define PRODUCT_WARPS 8
#define PRODUCT_ROWS 32  // at a time
#define SUM 0    // float32, one part for each piece of k: parts[piece][rows][n]
#define PLAIN 1  // bfloat16
#define SILU 2

template <int COLUMNS, int CHUNKS, int TO>
__device__ __forceinline__ void product(const Arguments& a) {
    constexpr int WIDTH = COLUMNS * 8, STRIDE = WIDTH + 8;  // the 8 keep rows apart in the banks
    DYNAMIC_SHARED(shared);
    const u16 *x = a.at<const u16>(0), *w = a.at<const u16>(1);
    const int rows = a.number(3), n = a.number(4), k = a.number(5);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int column = blockIdx.x * WIDTH, k0 = (blockIdx.y * PRODUCT_WARPS + warp) * CHUNKS * 32 + t * 8;
    uint4* weights = shared + warp * (CHUNKS * COLUMNS * 32) + lane;
    float* sums = (float*)(shared + PRODUCT_WARPS * CHUNKS * COLUMNS * 32);

#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            copy_ahead(weights + (c * COLUMNS + j) * 32, w + (u64)(column + j * 8 + g) * k + k0 + c * 32);
    let_next_begin();
    wait_for_input();

#pragma unroll 1
    for (int first = 0; first < rows; first += PRODUCT_ROWS) {
        uint4 piece[CHUNKS][4];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = first + g + i * 8;
                piece[c][i] = make_uint4(0, 0, 0, 0);
                if (row < rows) piece[c][i] = *(const uint4*)(x + (u64)row * k + k0 + c * 32);
            }
        if (first == 0) wait_for_copies();
        float d[2][COLUMNS][4] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const uint4 b = weights[(c * COLUMNS + j) * 32];
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    const uint4 low = piece[c][m * 2], high = piece[c][m * 2 + 1];
                    mma(d[m][j], low.x, high.x, low.y, high.y, b.x, b.y);
                    mma(d[m][j], low.z, high.z, low.w, high.w, b.z, b.w);
                }
            }
        if (first != 0) __syncthreads();  // the last rows' sums have been read
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                float* to = sums + (warp * PRODUCT_ROWS + m * 16 + g) * STRIDE + j * 8 + t * 2;
                *(float2*)to = make_float2(d[m][j][0], d[m][j][1]);
                *(float2*)(to + 8 * STRIDE) = make_float2(d[m][j][2], d[m][j][3]);
            }
        __syncthreads();
        for (int i = threadIdx.x; i < PRODUCT_ROWS * COLUMNS * 2; i += PRODUCT_WARPS * 32) {
            const int row = i / (COLUMNS * 2), at = i % (COLUMNS * 2) * 4;
            if (first + row >= rows) break;
            float4 y = *(const float4*)(sums + row * STRIDE + at);
#pragma unroll
            for (int other = 1; other < PRODUCT_WARPS; other++) {
                const float4 more = *(const float4*)(sums + (other * PRODUCT_ROWS + row) * STRIDE + at);
                y.x += more.x, y.y += more.y, y.z += more.z, y.w += more.w;
            }
            const u64 to = (u64)(first + row) * n + column + at;
            if (TO == SUM) {
                *(float4*)(a.at<float>(2) + (u64)blockIdx.y * rows * n + to) = y;
            } else {
                if (TO == SILU)
                    y.x *= sigmoid(y.x), y.y *= sigmoid(y.y), y.z *= sigmoid(y.z), y.w *= sigmoid(y.w);
                *(uint2*)(a.at<u16>(2) + to) = make_uint2(pack_bf16(y.x, y.y), pack_bf16(y.z, y.w));
            }
        }
    }
}

#define DEFINE_PRODUCT(columns, chunks, to) \
    KERNEL(product_##columns##_##chunks##_##to, PRODUCT_WARPS * 32, 2) { product<columns, chunks, to>(a); }
PRODUCTS(DEFINE_PRODUCT)

// x · sigmoid(x) in place, of bfloat16s in pieces of 8
KERNEL(silu, 256, 1) {
    uint4* x = a.at<uint4>(0);
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    let_next_begin();
    wait_for_input();
    if (i >= a.word[1]) return;
    uint4 v = x[i];
    u32* word = (u32*)&v;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float low = low_bf16(word[j]), high = high_bf16(word[j]);
        word[j] = pack_bf16(low * sigmoid(low), high * sigmoid(high));
    }
    x[i] = v;
}

// ---------------------------------------------------------------------- residual and norms

__device__ __forceinline__ float sum_of_block(float x, float* shared) {
    constexpr int WARPS = (D_MODEL / 4 + 31) / 32;
    x = sum_of_warp(x);
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += shared[warp];
    return sum;
}

__device__ __forceinline__ float4 normed(float4 x, const float* scale, const float* offset, float (*shared)[32]) {
    const float mean = sum_of_block((x.x + x.y) + (x.z + x.w), shared[0]) * (1.0f / D_MODEL);
    x = make_float4(x.x - mean, x.y - mean, x.z - mean, x.w - mean);
    const float squares = (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
    const float rate = rsqrtf(sum_of_block(squares, shared[1]) * (1.0f / D_MODEL) + 1e-5f);
    const float4 s = *(const float4*)scale, o = *(const float4*)offset;
    return make_float4(x.x * rate * s.x + o.x, x.y * rate * s.y + o.y, x.z * rate * s.z + o.z, x.w * rate * s.w + o.w);
}

// A row's residual, if there is one, plus ``factor`` times the sum of the parts of what a product made of it and a bias,
// if there is one. If the block ends here, normed and the residual anew; and what the next product takes: normed.
template <bool PARTS_ARE_FLOATS>
__device__ __forceinline__ void advance(const Arguments& a) {
    __shared__ float shared[4][32];
    const int element = threadIdx.x * 4, n_parts = a.number(3), rows = a.number(11);
    const u64 at = (u64)blockIdx.x * D_MODEL + element;
    let_next_begin();
    wait_for_input();
    float4 y = make_float4(0, 0, 0, 0), x = y;
    if (PARTS_ARE_FLOATS) {
        for (int part = 0; part < n_parts; part++) {
            const float4 more = *(const float4*)(a.at<const float>(2) + (u64)part * rows * D_MODEL + at);
            y.x += more.x, y.y += more.y, y.z += more.z, y.w += more.w;
        }
    } else {
        const uint2 pairs = *(const uint2*)(a.at<const u16>(2) + at);
        y = make_float4(low_bf16(pairs.x), high_bf16(pairs.x), low_bf16(pairs.y), high_bf16(pairs.y));
    }
    if (a.word[0]) x = *(const float4*)(a.at<const float>(0) + at);
    if (a.word[5]) {
        const float4 bias = *(const float4*)(a.at<const float>(5) + element);
        y.x += bias.x, y.y += bias.y, y.z += bias.z, y.w += bias.w;
    }
    const float factor = a.real(4);
    x.x += factor * y.x, x.y += factor * y.y, x.z += factor * y.z, x.w += factor * y.w;
    if (a.word[6]) x = normed(x, a.at<const float>(6) + element, a.at<const float>(7) + element, shared);
    *(float4*)(a.at<float>(1) + at) = x;
    if (a.word[8]) x = normed(x, a.at<const float>(8) + element, a.at<const float>(9) + element, shared + 2);
    *(uint2*)(a.at<u16>(10) + at) = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
}
KERNEL(advance_floats, D_MODEL / 4, 1) { advance<true>(a); }
KERNEL(advance_bf16, D_MODEL / 4, 1) { advance<false>(a); }

// ---------------------------------------------------------------------- attention by content and distance

// A block has 16 queries of one head; its warps take 16 keys at a time in turn, and their results are joined at the end.
// Scores by distance are products of the queries with 31 rows of the distances' keys, which begin one row later for each
// query less: they are read back from shared memory along the diagonal.
#define ATTEND_WARPS 4
#define DIAGONAL_STRIDE 41  // odd rows of 32 and some, so that neither writing nor reading meets in the banks

__device__ __forceinline__ u32 with_bias(u32 pair, u32 bias) {
    return pack_bf16(low_bf16(pair) + low_bf16(bias), high_bf16(pair) + high_bf16(bias));
}
__device__ __forceinline__ uint4 with_bias(uint4 q, uint4 bias) {
    return make_uint4(with_bias(q.x, bias.x), with_bias(q.y, bias.y), with_bias(q.z, bias.z), with_bias(q.w, bias.w));
}
__device__ __forceinline__ void multiply(float (&d)[4], uint4 low, uint4 high, uint4 b) {
    mma(d, low.x, high.x, low.y, high.y, b.x, b.y);
    mma(d, low.z, high.z, low.w, high.w, b.z, b.w);
}

KERNEL(attend, ATTEND_WARPS * 32, 1) {
    constexpr int CHUNKS = HEAD_SIZE / 32, OWN = HEAD_SIZE / 8;  // OWN: elements of a value that a lane has
    __shared__ float diagonal[ATTEND_WARPS][16][DIAGONAL_STRIDE];
    __shared__ float tops[ATTEND_WARPS][16], weights[ATTEND_WARPS][16];
    __shared__ float4 mixed[ATTEND_WARPS][16][HEAD_SIZE / 4];  // first the queries with u and with v, [2][CHUNKS][2][32]
    static_assert(CHUNKS <= ATTEND_WARPS && sizeof(mixed) >= 4 * CHUNKS * 32 * 16, "the queries have no room");
    uint4* by_content = (uint4*)mixed + threadIdx.x % 32;
    uint4* by_distance = by_content + CHUNKS * 2 * 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int i0 = blockIdx.x * 16, head = blockIdx.y, n_frames = a.number(6), middle = a.number(7) - 1;
    const int left = a.number(8), right = a.number(9);
    const u16* qkv = a.at<const u16>(0) + (u64)blockIdx.z * n_frames * (3 * D_MODEL) + head * HEAD_SIZE;
    const u16* distances = a.at<const u16>(3) + head * HEAD_SIZE + t * 8;
    const float scale = rsqrtf((float)HEAD_SIZE) * 1.4426950408889634f;  // of powers of 2
    let_next_begin();
    wait_for_input();
    const int n_own = a.at<const int>(4)[blockIdx.z];

    if (warp < CHUNKS) {
        const int element = head * HEAD_SIZE + warp * 32 + t * 8;
        const uint4 u = *(const uint4*)(a.at<const u16>(1) + element), v = *(const uint4*)(a.at<const u16>(2) + element);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int i = i0 + g + m * 8;
            uint4 q = make_uint4(0, 0, 0, 0);
            if (i < n_frames) q = *(const uint4*)(qkv + (u64)i * (3 * D_MODEL) + warp * 32 + t * 8);
            by_content[(warp * 2 + m) * 32] = with_bias(q, u);
            by_distance[(warp * 2 + m) * 32] = with_bias(q, v);
        }
    }
    __syncthreads();

    float sums[OWN][4] = {}, top[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, weight[2] = {0, 0};
#pragma unroll 1
    for (int j0 = warp * 16; j0 < n_own; j0 += ATTEND_WARPS * 16) {
        uint4 value[4][OWN / 8];  // of keys 2t, 2t + 1, 2t + 8, 2t + 9: OWN elements from g · OWN on
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int j = j0 + t * 2 + i % 2 + i / 2 * 8;
#pragma unroll
            for (int o = 0; o < OWN / 8; o++) {
                value[i][o] = make_uint4(0, 0, 0, 0);
                if (j < n_own)
                    value[i][o] = *(const uint4*)(qkv + (u64)j * (3 * D_MODEL) + 2 * D_MODEL + g * OWN + o * 8);
            }
        }
        float score[2][4] = {}, far[4][4] = {};
        const int row0 = middle - i0 - 15 + j0 + g;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const uint4 low_u = by_content[c * 64], high_u = by_content[c * 64 + 32];
            const uint4 low_v = by_distance[c * 64], high_v = by_distance[c * 64 + 32];
#pragma unroll
            for (int s = 0; s < 2; s++) {
                const int j = j0 + s * 8 + g;
                uint4 key = make_uint4(0, 0, 0, 0);
                if (j < n_own) key = *(const uint4*)(qkv + (u64)j * (3 * D_MODEL) + D_MODEL + c * 32 + t * 8);
                multiply(score[s], low_u, high_u, key);
            }
#pragma unroll
            for (int s = 0; s < 4; s++) {
                const int row = min(max(row0 + s * 8, 0), 2 * middle);
                const uint4 key = *(const uint4*)(distances + (u64)row * D_MODEL + c * 32);
                multiply(far[s], low_v, high_v, key);
            }
        }
        __syncwarp();  // the last keys' scores have been read
#pragma unroll
        for (int s = 0; s < 4; s++)
#pragma unroll
            for (int i = 0; i < 4; i++) diagonal[warp][g + i / 2 * 8][s * 8 + t * 2 + i % 2] = far[s][i];
        __syncwarp();
        float high[2] = {top[0], top[1]};
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int query = g + i / 2 * 8, key = s * 8 + t * 2 + i % 2, ahead = j0 + key - i0 - query;
                const bool seen = j0 + key < n_own && ahead >= -left && ahead <= right;
                const float sum = (score[s][i] + diagonal[warp][query][15 - query + key]) * scale;
                score[s][i] = seen ? sum : NEGATIVE_INFINITY;
                high[i / 2] = fmaxf(high[i / 2], score[s][i]);
            }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            high[m] = largest_of_4(high[m]);
            const float base = high[m] == NEGATIVE_INFINITY ? 0.0f : high[m], shrink = exp2f(top[m] - base);
            top[m] = high[m];
            weight[m] *= shrink;
#pragma unroll
            for (int s = 0; s < 2; s++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    score[s][m * 2 + i] = exp2f(score[s][m * 2 + i] - base);
                    weight[m] += score[s][m * 2 + i];
                }
#pragma unroll
            for (int o = 0; o < OWN; o++) sums[o][m * 2] *= shrink, sums[o][m * 2 + 1] *= shrink;
        }
        const u32 p0 = pack_bf16(score[0][0], score[0][1]), p1 = pack_bf16(score[0][2], score[0][3]);
        const u32 p2 = pack_bf16(score[1][0], score[1][1]), p3 = pack_bf16(score[1][2], score[1][3]);
#pragma unroll
        for (int o = 0; o < OWN / 2; o++) {  // two elements, each of two neighbouring keys, for one product each
            u32 word[4];
#pragma unroll
            for (int i = 0; i < 4; i++) word[i] = ((const u32*)&value[i][o / 4])[o % 4];
            mma(sums[o * 2], p0, p1, p2, p3, __byte_perm(word[0], word[1], 0x5410), __byte_perm(word[2], word[3], 0x5410));
            mma(sums[o * 2 + 1], p0, p1, p2, p3, __byte_perm(word[0], word[1], 0x7632),
                __byte_perm(word[2], word[3], 0x7632));
        }
    }

    __syncthreads();  // the queries have been read
    // Element o of column 2t of a product is element 2t · OWN + o of the head, of column 2t + 1 that OWN further. The
    // pieces of a row of 2 · OWN elements change places by ``turn``, else all lanes would meet in the same banks.
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int row = g + m * 8, turn = (t + 4 * g) & (OWN / 2 - 1);
        weight[m] = sum_of_4(weight[m]);
        if (t == 0) tops[warp][row] = top[m], weights[warp][row] = weight[m];
#pragma unroll
        for (int piece = 0; piece < OWN / 2; piece++) {
            const int o = piece % (OWN / 4) * 4, i = m * 2 + piece / (OWN / 4);
            mixed[warp][row][t * (OWN / 2) + (piece ^ turn)] =
                make_float4(sums[o][i], sums[o + 1][i], sums[o + 2][i], sums[o + 3][i]);
        }
    }
    __syncthreads();
    const int row = threadIdx.x / 8, part = threadIdx.x % 8;  // OWN elements each
    float high = NEGATIVE_INFINITY, total = 0, share[ATTEND_WARPS];
#pragma unroll
    for (int w = 0; w < ATTEND_WARPS; w++) high = fmaxf(high, tops[w][row]);
#pragma unroll
    for (int w = 0; w < ATTEND_WARPS; w++) {
        share[w] = high == NEGATIVE_INFINITY ? 0.0f : exp2f(tops[w][row] - high);
        total += share[w] * weights[w][row];
    }
    const float inverse = total > 0 ? 1.0f / total : 0.0f;
    if (i0 + row >= n_frames) return;
    u16* to = a.at<u16>(5) + ((u64)blockIdx.z * n_frames + i0 + row) * D_MODEL + head * HEAD_SIZE + part * OWN;
    const int turn = (part / 2 + 4 * row) & (OWN / 2 - 1);
#pragma unroll
    for (int piece = 0; piece < OWN / 4; piece++) {
        float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < ATTEND_WARPS; w++) {
            const float4 more = mixed[w][row][part / 2 * (OWN / 2) + ((part % 2 * (OWN / 4) + piece) ^ turn)];
            y.x += share[w] * more.x, y.y += share[w] * more.y, y.z += share[w] * more.z, y.w += share[w] * more.w;
        }
        *(uint2*)(to + piece * 4) =
            make_uint2(pack_bf16(y.x * inverse, y.y * inverse), pack_bf16(y.z * inverse, y.w * inverse));
    }
}

// ---------------------------------------------------------------------- the convolution module's middle

// Gate, depthwise convolution over time with the batch norm in it, SiLU. A thread has two channels and some frames.
#define CONVOLVE_THREADS 128
#define CONVOLVE_FRAMES 4

KERNEL(convolve, CONVOLVE_THREADS, 1) {
    constexpr int REACH = CONV_KERNEL / 2;
    const int channel = (blockIdx.x * CONVOLVE_THREADS + threadIdx.x) * 2, n_frames = a.number(5);
    const int first = blockIdx.y * CONVOLVE_FRAMES;
    if (channel >= D_MODEL) return;
    float2 tap[CONV_KERNEL], sum[CONVOLVE_FRAMES];
#pragma unroll
    for (int i = 0; i < CONV_KERNEL; i++) tap[i] = *(const float2*)(a.at<const float>(1) + i * D_MODEL + channel);
#pragma unroll
    for (int i = 0; i < CONVOLVE_FRAMES; i++) sum[i] = *(const float2*)(a.at<const float>(2) + channel);
    let_next_begin();
    wait_for_input();
    const int n_own = a.at<const int>(3)[blockIdx.z];
    const u16* x = a.at<const u16>(0) + (u64)blockIdx.z * n_frames * (2 * D_MODEL) + channel;
    u32 value[CONVOLVE_FRAMES + 2 * REACH], gate[CONVOLVE_FRAMES + 2 * REACH];
#pragma unroll
    for (int i = 0; i < CONVOLVE_FRAMES + 2 * REACH; i++) {
        const int frame = first + i - REACH;
        const bool own = frame >= 0 && frame < n_own;
        value[i] = own ? *(const u32*)(x + (u64)frame * (2 * D_MODEL)) : 0;
        gate[i] = own ? *(const u32*)(x + (u64)frame * (2 * D_MODEL) + D_MODEL) : 0;
    }
#pragma unroll
    for (int i = 0; i < CONVOLVE_FRAMES + 2 * REACH; i++) {
        const float low = low_bf16(value[i]) * sigmoid(low_bf16(gate[i]));
        const float high = high_bf16(value[i]) * sigmoid(high_bf16(gate[i]));
#pragma unroll
        for (int o = 0; o < CONVOLVE_FRAMES; o++)
            if (i - o >= 0 && i - o < CONV_KERNEL) sum[o].x += tap[i - o].x * low, sum[o].y += tap[i - o].y * high;
    }
    u16* to = a.at<u16>(4) + ((u64)blockIdx.z * n_frames + first) * D_MODEL + channel;
#pragma unroll
    for (int o = 0; o < CONVOLVE_FRAMES; o++)
        if (first + o < n_frames)
            *(u32*)(to + o * D_MODEL) = pack_bf16(sum[o].x * sigmoid(sum[o].x), sum[o].y * sigmoid(sum[o].y));
}

// ---------------------------------------------------------------------- subsampling

// The first convolution, ReLU, and the depthwise one behind it: [B, M, N_MELS] float32 → [B, T2, N_MELS / 4, CHANNELS].
// A thread has one channel, a block some columns of one row; a column's right neighbour is the next one's left.
#define STRIDE_COLUMNS 8

KERNEL(first_strides, CHANNELS, 1) {
    constexpr int WIDE = STRIDE_COLUMNS * 4 + 3;
    __shared__ float patch[7][WIDE + 1];
    const int channel = threadIdx.x, row = blockIdx.x, column = blockIdx.y * STRIDE_COLUMNS, n_mel_rows = a.number(7);
    float w[9], v[9];
#pragma unroll
    for (int i = 0; i < 9; i++)
        w[i] = a.at<const float>(1)[i * CHANNELS + channel], v[i] = a.at<const float>(3)[i * CHANNELS + channel];
    const float w_bias = a.at<const float>(2)[channel], v_bias = a.at<const float>(4)[channel];
    let_next_begin();
    wait_for_input();
    const int n_mel = a.at<const int>(5)[blockIdx.z], n_first = halved(n_mel), n_second = halved(n_first);
    const float* features = a.at<const float>(0) + (u64)blockIdx.z * n_mel_rows * N_MELS;
    for (int i = threadIdx.x; i < 7 * WIDE; i += CHANNELS) {
        const int mel_row = row * 4 - 3 + i / WIDE, mel = column * 4 - 3 + i % WIDE;
        const bool inside = mel_row >= 0 && mel_row < n_mel && mel >= 0 && mel < N_MELS;
        patch[i / WIDE][i % WIDE] = inside ? features[(u64)mel_row * N_MELS + mel] : 0.0f;
    }
    __syncthreads();
    // Column 2 · (column + f) - 1 + c of the first convolution is at patch column 4 f + 2 c, its row r at patch row 2 r.
    auto first = [&](int r, int at) {
        const int own_row = row * 2 - 1 + r, own_column = column * 2 - 1 + at / 2;
        if (own_row < 0 || own_row >= n_first || own_column < 0 || own_column >= N_MELS / 2) return 0.0f;
        float y = w_bias;
#pragma unroll
        for (int i = 0; i < 9; i++) y += w[i] * patch[r * 2 + i / 3][at + i % 3];
        return fmaxf(y, 0.0f);
    };
    u16* to = a.at<u16>(6) + (((u64)blockIdx.z * gridDim.x + row) * (N_MELS / 4) + column) * CHANNELS + channel;
    float before[3];
#pragma unroll
    for (int r = 0; r < 3; r++) before[r] = first(r, 0);
#pragma unroll 1
    for (int f = 0; f < STRIDE_COLUMNS; f++) {
        float y = v_bias;
#pragma unroll
        for (int r = 0; r < 3; r++) {
            y += v[r * 3] * before[r] + v[r * 3 + 1] * first(r, f * 4 + 2);
            before[r] = first(r, f * 4 + 4);
            y += v[r * 3 + 2] * before[r];
        }
        to[f * CHANNELS] = (u16)pack_bf16(row < n_second ? y : 0.0f, 0.0f);
    }
}

// ReLU and the second depthwise convolution: [B, T2, N_MELS / 4, CHANNELS] → [B, T, N_MELS / 8, CHANNELS]. Two channels
// a thread.
KERNEL(second_stride, CHANNELS / 2, 1) {
    const int channel = threadIdx.x * 2, column = blockIdx.x, row = blockIdx.y, n_rows = a.number(5);
    float2 v[9], y = *(const float2*)(a.at<const float>(2) + channel);
#pragma unroll
    for (int i = 0; i < 9; i++) v[i] = *(const float2*)(a.at<const float>(1) + i * CHANNELS + channel);
    let_next_begin();
    wait_for_input();
    const int n_own = halved(halved(a.at<const int>(3)[blockIdx.z]));
    const u16* x = a.at<const u16>(0) + (u64)blockIdx.z * n_rows * (N_MELS / 4) * CHANNELS + channel;
#pragma unroll
    for (int i = 0; i < 9; i++) {
        const int r = row * 2 - 1 + i / 3, c = column * 2 - 1 + i % 3;
        u32 pair = 0;
        if (r >= 0 && r < n_own && c >= 0 && c < N_MELS / 4) pair = *(const u32*)(x + (r * (N_MELS / 4) + c) * CHANNELS);
        y.x += v[i].x * fmaxf(low_bf16(pair), 0.0f);
        y.y += v[i].y * fmaxf(high_bf16(pair), 0.0f);
    }
    const u64 at = (((u64)blockIdx.z * gridDim.y + row) * (N_MELS / 8) + column) * CHANNELS + channel;
    *(u32*)(a.at<u16>(4) + at) = pack_bf16(y.x, y.y);
}

// ---------------------------------------------------------------------- features

// Pre-emphasised samples of every frame: [B, N] → [B · M, WINDOW_SAMPLES]; the window is in the Fourier basis.
KERNEL(cut_frames, 128, 1) {
    const int frame = blockIdx.x, n_room = a.number(3);
    let_next_begin();
    wait_for_input();
    const int n_samples = a.at<const int>(1)[blockIdx.y];
    const float* samples = a.at<const float>(0) + (u64)blockIdx.y * n_room;
    float* to = a.at<float>(2) + ((u64)blockIdx.y * gridDim.x + frame) * WINDOW_SAMPLES;
    for (int i = threadIdx.x; i < WINDOW_SAMPLES; i += 128) {
        const int at = frame * HOP_SAMPLES - WINDOW_SAMPLES / 2 + i;
        const bool inside = at >= 0 && at < n_samples;
        to[i] = inside ? samples[at] - (at > 0 ? 0.97f * samples[at - 1] : 0.0f) : 0.0f;
    }
}

// A frame's spectrum, real parts and then imaginary parts, → the logarithms of its mel channels. Of each channel's
// filter only what is not zero is summed: ``reach`` bins from ``first`` on.
KERNEL(mel_logarithms, N_MELS, 1) {
    __shared__ float power[N_BINS];
    const int mel = threadIdx.x, reach = a.number(4);
    let_next_begin();
    wait_for_input();
    const float* spectrum = a.at<const float>(0) + (u64)blockIdx.x * (2 * N_BINS);
    for (int i = threadIdx.x; i < N_BINS; i += N_MELS)
        power[i] = spectrum[i] * spectrum[i] + spectrum[N_BINS + i] * spectrum[N_BINS + i];
    __syncthreads();
    const int first = a.at<const int>(1)[mel];
    float sum = 0;
    for (int i = 0; i < reach; i++) sum += a.at<const float>(2)[i * N_MELS + mel] * power[min(first + i, N_BINS - 1)];
    a.at<float>(3)[(u64)blockIdx.x * N_MELS + mel] = logf(sum + 5.9604644775390625e-8f);
}

// Each channel of a buffer to mean 0 and deviation 1 over the buffer's own frames, 0 behind them. A block has 16
// channels of one buffer, a thread every 32nd frame of one of them.
#define NORMALISE_CHANNELS 16
#define NORMALISE_LANES 32

__device__ __forceinline__ float sum_of_channel(float x, float (*shared)[NORMALISE_CHANNELS + 1], int lane, int channel) {
    __syncthreads();  // what was there has been read
    shared[lane][channel] = x;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < NORMALISE_LANES; i++) sum += shared[i][channel];
    return sum;
}

KERNEL(normalise, NORMALISE_CHANNELS * NORMALISE_LANES, 1) {
    __shared__ float shared[NORMALISE_LANES][NORMALISE_CHANNELS + 1];
    const int channel = threadIdx.x % NORMALISE_CHANNELS, lane = threadIdx.x / NORMALISE_CHANNELS;
    const int n_frames = a.number(2);
    let_next_begin();
    wait_for_input();
    const int n_own = a.at<const int>(1)[blockIdx.y];
    float* x = a.at<float>(0) + (u64)blockIdx.y * n_frames * N_MELS + blockIdx.x * NORMALISE_CHANNELS + channel;
    float sum = 0, squares = 0;
    for (int i = lane; i < n_own; i += NORMALISE_LANES) sum += x[(u64)i * N_MELS];
    const float mean = sum_of_channel(sum, shared, lane, channel) / n_own;
    for (int i = lane; i < n_own; i += NORMALISE_LANES) {
        const float centred = x[(u64)i * N_MELS] - mean;
        squares += centred * centred;
    }
    const float deviation = sqrtf(sum_of_channel(squares, shared, lane, channel) / max(n_own - 1, 1));
    const float rate = 1.0f / (deviation + 1e-5f);
    for (int i = lane; i < n_frames; i += NORMALISE_LANES)
        x[(u64)i * N_MELS] = i < n_own ? (x[(u64)i * N_MELS] - mean) * rate : 0.0f;
}
