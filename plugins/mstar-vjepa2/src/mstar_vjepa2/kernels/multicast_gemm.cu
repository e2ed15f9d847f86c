// GEMM of a frame's tokens for Hopper (sm_90a), with tiles multicast within a thread block cluster.
//
// out = x @ weight.T for x [rows, inputs] and weight [outputs, inputs], of some 258 rows. A block computes 64 * UP outputs
// of ROWS rows. Outputs are the M dimension of wgmma and rows the N dimension, a multiple of eight, so that ABOVE blocks
// cover all rows of a frame without a remainder. They share their weights; ACROSS blocks side by side share their rows:
// each loads its part of a tile by TMA multicast into all of them. Few instructions per tile matter as well: branches and
// addresses are uniform in a warp, and elect.sync selects the thread that issues copies.
//
// Compiled by `multicast_gemm.py` with UP, ROWS (a multiple of eight), ABOVE, ACROSS, STAGES, KIND and DTYPE ("bf16", "f16")
// defined. Sums have a fixed order: the same inputs give the same bits.

#include "hopper.cuh"
#include "multiply.cuh"  // generated for ROWS

#define LINEAR 0   // with a bias
#define GELU 1    // with a bias and an exact GELU
#define QKV_ROTARY 2  // rotated queries; rotated keys and values appended to the pool
#define SPLIT_K 3  // float32 slices of the inputs, summed by the caller

constexpr int HIGH = 64, WIDE = HIGH * UP, DEEP = 64;
constexpr int BOX = 32;  // rows of weights per TMA load
constexpr int SHARE = ROWS / ACROSS / 8 * 8, REST = ROWS - SHARE * ACROSS;
constexpr int OF_X = ROWS * DEEP * 2, OF_W = WIDE * DEEP * 2, OF_STAGE = OF_X + OF_W;
constexpr int HEAD = 64, GROUP = 4;   // warps of one group
constexpr int KEEPING = 2 * GROUP;    // warps that write results; the first group also computes
constexpr int WARPS = KEEPING + 1;    // and one warp that loads
constexpr int PITCH = WIDE + 4;       // of a row of results, padded against bank conflicts
constexpr int EACH = KIND == SPLIT_K ? 4 : 8;  // adjacent outputs of a row per store
constexpr int CHUNKS = WIDE / EACH, STEP = 32 * KEEPING / CHUNKS, TURNS = (ROWS + STEP - 1) / STEP;
static_assert(REST < BOX && ROWS * PITCH * 4 <= STAGES * OF_STAGE, "tiles make room for the results");

// Destination of the results. QKV_ROTARY: out is the queries.
struct Target {
    const u16 *bias;
    void *out;
    const float *cosine, *sine;
    const i64 *places;
    u16 *pool;
    int rows, outputs, angled, page, of_query, of_key;
    int tiles;  // of the inputs
};

// As `gemm._gelu`.
__device__ __forceinline__ float gelu(float x) {
    float size = fabsf(x), t = __fdividef(1.0f, 1.0f + 0.23164189f * size);
    float poly = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    return fmaxf(x, 0.0f) - 0.5f * size * poly * exp2f(-0.72134752f * x * x);
}

// -- the copies ------------------------------------------------------------------------------------------------------

struct Place {
    int above, beside;     // this block in its cluster
    int first, to, start;  // its first row, output and input
    int steps;             // tiles of inputs
    int warp;
};

// Shared memory addresses.
struct Shared {
    u32 tiles, barriers;
};

__device__ __forceinline__ u32 full(const Shared &shared, int stage) { return shared.barriers + 8 * stage; }
__device__ __forceinline__ u32 empty(const Shared &shared, int stage) { return shared.barriers + 8 * (STAGES + stage); }

__device__ __forceinline__ void fetch_weights(
    const Place &own, const Map &weights, const Shared &shared, int stage, int step
) {
    expect(full(shared, stage), OF_STAGE);
    u16 blocks = ((1 << ABOVE) - 1) << (ABOVE * own.beside);
    for (int box = (own.above + step) % ABOVE; box < WIDE / BOX; box += ABOVE) {
        u32 into = shared.tiles + stage * OF_STAGE + OF_X + box * BOX * DEEP * 2;
        fetch(into, weights, own.start + step * DEEP, own.to + box * BOX, full(shared, stage), blocks);
    }
}

__device__ __forceinline__ void fetch_rows(
    const Place &own, const Map &rows, const Map &rest, const Shared &shared, int stage, int step
) {
    u32 tile = shared.tiles + stage * OF_STAGE;
    u16 blocks = 0;
    for (int beside = 0; beside < ACROSS; beside++) blocks |= 1 << (own.above + ABOVE * beside);
    int line = own.beside * SHARE, column = own.start + step * DEEP;
    fetch(tile + line * DEEP * 2, rows, column, own.first + line, full(shared, stage), blocks);
    if (REST && step % ACROSS == own.beside) {
        line = ACROSS * SHARE;
        fetch(tile + line * DEEP * 2, rest, column, own.first + line, full(shared, stage), blocks);
    }
}

__device__ __forceinline__ void bring(
    const Place &own, const Map &rows, const Map &rest, const Map &weights, const Shared &shared
) {
    int ahead = own.steps < STAGES ? own.steps : STAGES;
    bool acts = elected();
    for (int step = 0; step < ahead; step++)
        if (acts) fetch_weights(own, weights, shared, step, step);
    if (acts) {
        // The remaining tiles are prefetched into L2.
        for (int step = ahead; step < own.steps; step++)
            for (int box = own.above; box < WIDE / BOX; box += ABOVE)
                ask(weights, own.start + step * DEEP, own.to + box * BOX);
    }
    wait_for_kernels_before();
    for (int step = 0; step < ahead; step++)
        if (acts) fetch_rows(own, rows, rest, shared, step, step);
    int stage = 0;
    u32 phase = 0;
    for (int step = ahead; step < own.steps; step++) {
        wait(empty(shared, stage), phase);
        if (acts) {
            fetch_weights(own, weights, shared, stage, step);
            fetch_rows(own, rows, rest, shared, stage, step);
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
}

// -- the results -----------------------------------------------------------------------------------------------------

// Stores adjacent outputs of one row. place: slot of the row in the pool, or -1.
__device__ __forceinline__ void keep(const Target &target, int row, int column, i64 place, const float *values) {
#if KIND == SPLIT_K
    float *into = (float *)target.out + ((i64)blockIdx.z * target.rows + row) * target.outputs + column;
    *(float4 *)into = make_float4(values[0], values[1], values[2], values[3]);
#else
    uint4 all;
    all.x = packed(values[0], values[1]), all.y = packed(values[2], values[3]);
    all.z = packed(values[4], values[5]), all.w = packed(values[6], values[7]);
#if KIND == QKV_ROTARY
    if (column < target.of_query) {
        *(uint4 *)((u16 *)target.out + (i64)row * target.of_query + column) = all;
    } else if (place >= 0) {
        int behind = column - target.of_query, is_value = behind >= target.of_key;
        i64 line = place + (is_value ? target.page : 0);
        *(uint4 *)(target.pool + line * target.of_key + behind - (is_value ? target.of_key : 0)) = all;
    }
#else
    *(uint4 *)((u16 *)target.out + (i64)row * target.outputs + column) = all;
#endif
#endif
}

// The first row and column that a thread writes. It writes the same columns of all its rows.
struct Part {
    int line, at;

    __device__ __forceinline__ Part() : line(threadIdx.x / CHUNKS), at(threadIdx.x % CHUNKS * EACH) {}
};

// Angles and slots of the rows that a thread writes.
struct Angles {
    float cosine[TURNS][EACH], sine[TURNS][EACH];
    i64 place[TURNS];

    __device__ __forceinline__ void read(const Target &target, const Place &own) {
        Part part;
        int column = own.to + part.at;
        bool turns = column < target.of_query + target.of_key;
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            int row = min(own.first + part.line + turn * STEP, target.rows - 1);
            i64 from = (i64)(row % target.angled) * HEAD + column % HEAD;
#pragma unroll
            for (int i = 0; i < EACH; i += 4) {
                float4 c = make_float4(1, 1, 1, 1), s = make_float4(0, 0, 0, 0);
                if (turns) {
                    c = *(const float4 *)(target.cosine + from + i);
                    s = *(const float4 *)(target.sine + from + i);
                }
                *(float4 *)(cosine[turn] + i) = c, *(float4 *)(sine[turn] + i) = s;
            }
            place[turn] = column >= target.of_query ? target.places[row] : -1;
        }
    }

    __device__ __forceinline__ void turn(int number, const float *bias, float *values) const {
#pragma unroll
        for (int i = 0; i < EACH; i += 2) {
            float one = rounded(values[i] + bias[i]), two = rounded(values[i + 1] + bias[i + 1]);
            values[i] = one * cosine[number][i] - two * sine[number][i];
            values[i + 1] = two * cosine[number][i + 1] + one * sine[number][i + 1];
        }
    }
};

struct Nothing {
    __device__ __forceinline__ void read(const Target &, const Place &) {}
};

#if KIND == QKV_ROTARY
typedef Angles Beside;
#else
typedef Nothing Beside;
#endif

// Writes a warp's outputs to shared memory in row order, so that stores to global memory are coalesced.
__device__ __forceinline__ void lay(const Place &own, const float (&total)[UP][ROWS / 2], float *lines) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int up = 0; up < UP; up++) {
#pragma unroll
        for (int group = 0; group < ROWS / 8; group++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = group * 8 + lane % 4 * 2 + i % 2, at = up * HIGH + own.warp * 16 + lane / 4 + i / 2 * 8;
                lines[row * PITCH + at] = total[up][group * 4 + i];
            }
        }
    }
}

// Writes the results from shared memory to their destination. Called by all warps except the loading one.
__device__ __forceinline__ void keep_lines(
    const Target &target, const Place &own, const float *bias, const float *lines, const Beside &beside
) {
    Part part;
    asm volatile("bar.sync 1, %0;" ::"r"(32 * KEEPING) : "memory");
    bool known = own.to + part.at < target.outputs;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        int line = part.line + turn * STEP, row = own.first + line;
        if (!known || line >= ROWS || row >= target.rows) continue;
        float values[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i += 4)
            *(float4 *)(values + i) = *(const float4 *)(lines + line * PITCH + part.at + i);
#if KIND == QKV_ROTARY
        beside.turn(turn, bias + part.at, values);
        keep(target, row, own.to + part.at, beside.place[turn], values);
#else
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (KIND == LINEAR || KIND == GELU) values[i] += bias[part.at + i];
            if (KIND == GELU) values[i] = gelu(values[i]);
        }
        keep(target, row, own.to + part.at, -1, values);
#endif
    }
}

// -- the tiles -------------------------------------------------------------------------------------------------------

// Blocks that a warp notifies when it has read a tile: those above and below, then those beside.
struct Readers {
    u32 target;
    bool notifies;

    __device__ __forceinline__ Readers(const Place &own) {
        int lane = threadIdx.x % 32, beside = lane - ABOVE, other = beside + (beside >= own.beside);
        target = lane < ABOVE ? lane + ABOVE * own.beside : own.above + ABOVE * other;
        notifies = lane < ABOVE + ACROSS - 1;
    }

    // No block waits for the last tiles, and their blocks may have exited.
    __device__ __forceinline__ void have_read(const Place &own, const Shared &shared, int step, int stage) const {
        if (notifies && step + STAGES < own.steps) arrive_at(empty(shared, stage), target);
    }
};

// Multiplies all tiles and leaves the sums in `lines`. Called by the warps of GROUP.
__device__ __forceinline__ void compute(
    const Place &own, const Target &target, float *bias, float *lines, const Shared &shared, Beside &beside
) {
    float total[UP][ROWS / 2];
#pragma unroll
    for (int up = 0; up < UP; up++)
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) total[up][i] = 0.0f;
    if (KIND != SPLIT_K) {
        for (int at = threadIdx.x; at < WIDE; at += 32 * GROUP)
            bias[at] = own.to + at < target.outputs ? wide_of(target.bias[own.to + at]) : 0.0f;
    }
    if (KIND == QKV_ROTARY) {
        wait_for_kernels_before();
        beside.read(target, own);
    }
    Readers readers(own);
    int stage = 0, before = 0;
    u32 phase = 0;
    for (int step = 0; step < own.steps; step++) {
        wait(full(shared, stage), phase);
        u64 rows = described(shared.tiles + stage * OF_STAGE), weights = rows + OF_X / 16;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < DEEP / 16; k++)
#pragma unroll
            for (int up = 0; up < UP; up++)
                multiply(total[up], weights + up * (HIGH * DEEP * 2 / 16) + 2 * k, rows + 2 * k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (step > 0) readers.have_read(own, shared, step - 1, before);  // the previous tile
        before = stage;
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (KIND != QKV_ROTARY) wait_for_kernels_before();
    asm volatile("bar.sync 2, %0;" ::"r"(32 * GROUP) : "memory");  // all tiles have been read
    lay(own, total, lines);
}

// -- the kernel ------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(32 * WARPS) multicast_gemm_kernel(
    const __grid_constant__ Map rows, const __grid_constant__ Map rest, const __grid_constant__ Map weights,
    const __grid_constant__ Target target
) {
    extern __shared__ char memory[];
    __shared__ __align__(8) u64 kept[2 * STAGES];
    __shared__ __align__(16) float bias[WIDE];
    Shared shared;
    shared.tiles = (shared_address(memory) + 1023) & ~1023u;
    shared.barriers = shared_address(kept);
    float *lines = (float *)(memory + (shared.tiles - shared_address(memory)));
    int first_tile = blockIdx.z * target.tiles / gridDim.z;
    Place own;
    own.above = blockIdx.x, own.beside = blockIdx.y % ACROSS;
    own.first = blockIdx.x * ROWS, own.to = blockIdx.y * WIDE, own.start = first_tile * DEEP;
    own.steps = (blockIdx.z + 1) * target.tiles / gridDim.z - first_tile;
    own.warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);  // makes it warp-uniform for the compiler
    asm volatile("griddepcontrol.launch_dependents;");
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            init(full(shared, stage), 1);
            init(empty(shared, stage), GROUP * (ABOVE + ACROSS - 1));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    meet_cluster();
    if (own.warp == WARPS - 1) {
        bring(own, rows, rest, weights, shared);
        return;
    }
    Beside beside;
    if (own.warp < GROUP) {
        compute(own, target, bias, lines, shared, beside);
    } else {
        wait_for_kernels_before();
        beside.read(target, own);
    }
    keep_lines(target, own, bias, lines, beside);  // one call, so that all warps reach its barrier from one place
}
