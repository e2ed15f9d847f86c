// One product of a frame's tokens with a layer's weights, its tiles multicast within a cluster, for Hopper (sm_90a).
//
// out = x @ weight.T for x [rows, inputs] and weight [outputs, inputs], rows = 256 * m + left with left <= 8. A block
// takes 64 rows by WIDE outputs. Four blocks of a cluster lie above each other and share their weights, ACROSS lie side
// by side and share their rows: each asks for its share of a tile and the copy engine puts it into all of them. Rows
// left over are summed by warps of their own, from weights that are in shared memory already and without tensor cores:
// on these, between the large products, the few rows took as long as all the others. What decides besides is how few
// instructions a tile takes, so a warp branches as a whole, addresses are the same for all of it, and one of its
// threads is elected where one is to act.
//
// Compiled by `cluster` with WIDE (a multiple of 32), ACROSS, STAGES, KIND, LEFT (rows left over: 0 to 8, even) and
// DTYPE ("bf16", "f16") defined. Sums have a fixed order: the same inputs, the same bits.

#include "hopper.cuh"
#include "multiply.cuh"  // written for WIDE

#define WHOLE 0   // as it is, with a bias
#define GELU 1    // its exact GELU
#define TURNED 2  // queries, keys and values, turned; keys and values to their places
#define SLICED 3  // float32 slices of the inputs, to be summed

constexpr int HIGH = 64, DEEP = 64, ABOVE = 4, GROUPS = WIDE / 8, PITCH = WIDE + 8;
constexpr int OF_X = HIGH * DEEP * 2, OF_W = WIDE * DEEP * 2, OF_STAGE = OF_X + OF_W;
constexpr int HEAD = 64, GROUP = 4;  // warps of one group
constexpr int LEFT_WARPS = LEFT ? 4 : 0, WARPS = GROUP + LEFT_WARPS + 1;

// Where results go. TURNED: out is the queries.
struct Target {
    const u16 *bias;
    void *out;
    const float *cosine, *sine;
    const i64 *places;
    u16 *pool;
    int rows, outputs, angled, page, of_query, of_key;
    int tiles;  // of the inputs
};

// As `tiles._gelu`.
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
    bool has_left;         // whether it also takes rows left over
    int warp;
};

// Warps that multiply: those that multiply rows left over stand behind those of the tile.
__device__ __forceinline__ int computing(const Place &own) { return GROUP + (own.has_left ? LEFT_WARPS : 0); }

// What lies in shared memory.
struct Shared {
    u32 tiles, left, barriers;
};

__device__ __forceinline__ u32 full(const Shared &shared, int stage) { return shared.barriers + 8 * stage; }
__device__ __forceinline__ u32 empty(const Shared &shared, int stage) { return shared.barriers + 8 * (STAGES + stage); }
__device__ __forceinline__ u32 left_full(const Shared &shared) { return shared.barriers + 16 * STAGES; }

__device__ __forceinline__ void fetch_weights(
    const Place &own, const Map &weights, const Shared &shared, int stage, int step
) {
    constexpr int SHARE = WIDE / ABOVE;
    expect(full(shared, stage), OF_STAGE);
    u32 into = shared.tiles + stage * OF_STAGE + OF_X + own.above * SHARE * DEEP * 2;
    u16 blocks = ((1 << ABOVE) - 1) << (ABOVE * own.beside);
    fetch(into, weights, own.start + step * DEEP, own.to + own.above * SHARE, full(shared, stage), blocks);
}

__device__ __forceinline__ void fetch_rows(
    const Place &own, const Map &rows, const Shared &shared, int stage, int step
) {
    constexpr int SHARE = HIGH / ACROSS;
    u32 into = shared.tiles + stage * OF_STAGE + own.beside * SHARE * DEEP * 2;
    u16 blocks = 0;
    for (int beside = 0; beside < ACROSS; beside++) blocks |= 1 << (own.above + ABOVE * beside);
    fetch(into, rows, own.start + step * DEEP, own.first + own.beside * SHARE, full(shared, stage), blocks);
}

// Rows left over, of all inputs: each block of the cluster fetches some boxes for all. One by one they would be the
// same lines for every block of the grid at the same time, and the cache has them in one place.
__device__ __forceinline__ void fetch_left(const Place &own, const Map &left, const Shared &shared, int first_left) {
    constexpr int SIZE = ABOVE * ACROSS, BYTES = LEFT * DEEP * 2;
    expect(left_full(shared), own.steps * BYTES);
    for (int step = own.above + ABOVE * own.beside; step < own.steps; step += SIZE) {
        u32 into = shared.left + step * BYTES;
        fetch(into, left, own.start + step * DEEP, first_left, left_full(shared), (1 << SIZE) - 1);
    }
}

__device__ __forceinline__ void bring(
    const Place &own, const Map &rows, const Map &left, const Map &weights, int first_left, const Shared &shared
) {
    int ahead = own.steps < STAGES ? own.steps : STAGES;
    bool acts = elected();
    for (int step = 0; step < ahead; step++)
        if (acts) fetch_weights(own, weights, shared, step, step);
    if (acts && blockIdx.x < ABOVE) {
        // The rest comes as far as the second-level cache; one block of those above each other asks for its share.
        for (int step = ahead; step < own.steps; step++)
            ask(weights, own.start + step * DEEP, own.to + own.above * (WIDE / ABOVE));
    }
    wait_for_kernels_before();
    for (int step = 0; step < ahead; step++)
        if (acts) fetch_rows(own, rows, shared, step, step);
    if (acts && own.has_left) fetch_left(own, left, shared, first_left);
    int stage = 0;
    u32 phase = 0;
    for (int step = ahead; step < own.steps; step++) {
        wait(empty(shared, stage), phase);
        if (acts) {
            fetch_weights(own, weights, shared, stage, step);
            fetch_rows(own, rows, shared, stage, step);
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
}

// -- the results -----------------------------------------------------------------------------------------------------

// Eight neighbouring outputs of one row, four of a slice. place: of the row in the pool, or -1.
__device__ __forceinline__ void keep(const Target &target, int row, int column, i64 place, const float *values) {
#if KIND == SLICED
    float *into = (float *)target.out + ((i64)blockIdx.z * target.rows + row) * target.outputs + column;
    *(float4 *)into = make_float4(values[0], values[1], values[2], values[3]);
#else
    uint4 all;
    all.x = packed(values[0], values[1]), all.y = packed(values[2], values[3]);
    all.z = packed(values[4], values[5]), all.w = packed(values[6], values[7]);
#if KIND == TURNED
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

// One output of a row left over.
__device__ __forceinline__ void keep_one(const Target &target, int row, int column, i64 place, float value) {
#if KIND == SLICED
    ((float *)target.out)[((i64)blockIdx.z * target.rows + row) * target.outputs + column] = value;
#else
    u16 narrow = (u16)packed(value, 0.0f);
#if KIND == TURNED
    if (column < target.of_query) {
        ((u16 *)target.out)[(i64)row * target.of_query + column] = narrow;
    } else if (place >= 0) {
        int behind = column - target.of_query, is_value = behind >= target.of_key;
        i64 line = place + (is_value ? target.page : 0);
        target.pool[line * target.of_key + behind - (is_value ? target.of_key : 0)] = narrow;
    }
#else
    ((u16 *)target.out)[(i64)row * target.outputs + column] = narrow;
#endif
#endif
}

struct Angles {
    float2 cosine[2][HEAD / 8], sine[2][HEAD / 8];
};

// Angles of this thread's two rows, of the eight groups of lanes that follow the first.
__device__ __forceinline__ void read_angles(Angles &angles, const Target &target, int row, int lane) {
    for (int i = 0; i < 2; i++) {
        i64 line = (i64)((row + 8 * i) % target.angled) * HEAD;
#pragma unroll
        for (int group = 0; group < HEAD / 8; group++) {
            int at = (lane + 8 * group) % HEAD;
            angles.cosine[i][group] = *(const float2 *)(target.cosine + line + at);
            angles.sine[i][group] = *(const float2 *)(target.sine + line + at);
        }
    }
}

// Turn queries and keys where they lie. total: as the products left it.
__device__ __forceinline__ void turn(
    const Target &target, const Place &own, const float *bias, float (&total)[WIDE / 2], const Angles &angles
) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        int at = group * 8 + threadIdx.x % 4 * 2;
        bool turns = own.to + group * 8 < target.of_query + target.of_key;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float &low = total[group * 4 + i * 2], &high = total[group * 4 + i * 2 + 1];
            float2 c = angles.cosine[i][group % 8], s = angles.sine[i][group % 8];
            float one = rounded(low + bias[at]), two = rounded(high + bias[at + 1]);
            low = turns ? one * c.x - two * s.x : one;
            high = turns ? two * c.y + one * s.y : two;
        }
    }
}

// A warp's 16 rows into shared memory, so that a thread then has neighbouring outputs and a warp whole lines.
__device__ __forceinline__ void lay(const Place &own, const float (&total)[WIDE / 2], float *lines) {
    static_assert(HIGH * PITCH * 4 <= STAGES * OF_STAGE, "tiles make room for the results");
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float *into = lines + (own.warp * 16 + lane / 4 + 8 * i) * PITCH + group * 8 + lane % 4 * 2;
            *(float2 *)into = make_float2(total[group * 4 + i * 2], total[group * 4 + i * 2 + 1]);
        }
    }
}

// What lies there to where it goes, by all warps that computed.
__device__ __forceinline__ void keep_lines(
    const Target &target, const Place &own, const float *bias, const float *lines
) {
    constexpr int EACH = KIND == SLICED ? 4 : 8, CHUNKS = WIDE / EACH;
    asm volatile("bar.sync 1, %0;" ::"r"(32 * computing(own)) : "memory");
#pragma unroll 2
    for (int chunk = threadIdx.x; chunk < HIGH * CHUNKS; chunk += 32 * computing(own)) {
        int line = chunk / CHUNKS, at = chunk % CHUNKS * EACH, row = own.first + line;
        if (own.to + at >= target.outputs) continue;  // beyond the last output
        float values[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i += 4) *(float4 *)(values + i) = *(const float4 *)(lines + line * PITCH + at + i);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (KIND == WHOLE || KIND == GELU) values[i] += bias[at + i];
            if (KIND == GELU) values[i] = gelu(values[i]);
        }
        i64 place = -1;
        if (KIND == TURNED && own.to + at >= target.of_query) place = target.places[row];
        keep(target, row, own.to + at, place, values);
    }
}

// One output of a row left over. value: its sum; the other of its pair is with the thread eight lanes away.
__device__ __forceinline__ void keep_left(
    const Target &target, const Place &own, const float *bias, int row, int at, float value
) {
    int column = own.to + at;
    bool known = row < target.rows && column < target.outputs;
    if (KIND != SLICED) value += bias[at];
    if (KIND == GELU) value = gelu(value);
    i64 place = -1;
    if (KIND == TURNED) {
        value = rounded(value);
        float other = __shfl_xor_sync(0xFFFFFFFFu, value, 8);
        if (known && column < target.of_query + target.of_key) {
            i64 angle = (i64)(row % target.angled) * HEAD + column % HEAD;
            value = value * target.cosine[angle] + (at % 2 ? other : -other) * target.sine[angle];
        }
        if (known && column >= target.of_query) place = target.places[row];
    }
    if (known) keep_one(target, row, column, place, value);
}

// -- the tiles -------------------------------------------------------------------------------------------------------

// Whom a warp tells that it has read a tile: the blocks above and below, then those beside.
struct Readers {
    u32 told;
    bool tells;

    __device__ __forceinline__ Readers(const Place &own) {
        int lane = threadIdx.x % 32, beside = lane - ABOVE, other = beside + (beside >= own.beside);
        told = lane < ABOVE ? lane + ABOVE * own.beside : own.above + ABOVE * other;
        tells = lane < ABOVE + ACROSS - 1;
    }

    // Nobody waits for the last ones, whose blocks may have ended.
    __device__ __forceinline__ void have_read(const Place &own, const Shared &shared, int step, int stage) const {
        if (tells && step + STAGES < own.steps) arrive_at(empty(shared, stage), told);
    }
};

// The bias is there, and nobody reads tiles any more.
__device__ __forceinline__ void meet_readers(const Place &own) {
    asm volatile("bar.sync 1, %0;" ::"r"(32 * computing(own)) : "memory");
}

__device__ __forceinline__ void compute(
    const Place &own, const Target &target, float *bias, float *lines, const Shared &shared
) {
    float total[WIDE / 2];
    for (int i = 0; i < WIDE / 2; i++) total[i] = 0.0f;
    if (KIND != SLICED) {
        for (int at = threadIdx.x; at < WIDE; at += 32 * GROUP)
            bias[at] = own.to + at < target.outputs ? wide_of(target.bias[own.to + at]) : 0.0f;
    }
    Angles angles;
    if (KIND == TURNED) {
        wait_for_kernels_before();
        int lane = threadIdx.x % 32, row = own.first + own.warp * 16 + lane / 4;
        if (own.to < target.of_query + target.of_key) read_angles(angles, target, row, own.to + lane % 4 * 2);
    }
    Readers readers(own);
    int stage = 0, before = 0;
    u32 phase = 0;
    for (int step = 0; step < own.steps; step++) {
        wait(full(shared, stage), phase);
        u64 rows = described(shared.tiles + stage * OF_STAGE), weights = rows + OF_X / 16;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < DEEP / 16; k++) multiply(total, rows + 2 * k, weights + 2 * k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (step > 0) readers.have_read(own, shared, step - 1, before);  // the tile before this one
        before = stage;
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (KIND != TURNED) wait_for_kernels_before();
    meet_readers(own);
    if (KIND == TURNED) turn(target, own, bias, total, angles);
    lay(own, total, lines);
    keep_lines(target, own, bias, lines);
}

#if LEFT
// Each block takes its quarter of the outputs, a warp four of them at a time, a thread eight inputs of one.
__device__ __forceinline__ void compute_left(
    const Place &own, const Target &target, const float *bias, int first_left, const float *lines, const Shared &shared
) {
    constexpr int SHARE = WIDE / ABOVE, FOURS = SHARE / 4, TURNS = (FOURS + LEFT_WARPS - 1) / LEFT_WARPS;
    const char *memory = (const char *)lines;
    int lane = threadIdx.x % 32, part = lane % 8, first = own.warp - GROUP;
    float total[TURNS][LEFT] = {};
    Readers readers(own);
    wait(left_full(shared), 0);
    int stage = 0;
    u32 phase = 0;
    for (int step = 0; step < own.steps; step++) {
        float2 given[LEFT][4];
#pragma unroll
        for (int token = 0; token < LEFT; token++) {
            uint4 all = *(const uint4 *)(memory + STAGES * OF_STAGE + ((step * LEFT + token) * 8 + part) * 16);
            given[token][0] = wide_pair(all.x), given[token][1] = wide_pair(all.y);
            given[token][2] = wide_pair(all.z), given[token][3] = wide_pair(all.w);
        }
        wait(full(shared, stage), phase);
        uint4 held[TURNS];
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            // Lines are swizzled: their 16 bytes lie where their number and the line's say together.
            int line = own.above * SHARE + (first + turn * LEFT_WARPS) % FOURS * 4 + lane / 8;
            held[turn] = *(const uint4 *)(memory + stage * OF_STAGE + OF_X + line * 128 + ((part ^ (line % 8)) << 4));
        }
        __syncwarp();
        readers.have_read(own, shared, step, stage);
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            float2 weight[4] = {
                wide_pair(held[turn].x), wide_pair(held[turn].y), wide_pair(held[turn].z), wide_pair(held[turn].w)
            };
#pragma unroll
            for (int token = 0; token < LEFT; token++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    total[turn][token] = fmaf(weight[i].x, given[token][i].x, total[turn][token]);
                    total[turn][token] = fmaf(weight[i].y, given[token][i].y, total[turn][token]);
                }
            }
        }
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    wait_for_kernels_before();
    meet_readers(own);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        int four = first + turn * LEFT_WARPS;
        if (four >= FOURS) break;
        float mine = 0.0f;  // of the token that has this part's number
#pragma unroll
        for (int token = 0; token < LEFT; token++) {
            float sum = total[turn][token];
            for (int apart = 1; apart < 8; apart *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, apart);
            mine = part == token ? sum : mine;
        }
        keep_left(target, own, bias, first_left + part, own.above * SHARE + four * 4 + lane / 8, mine);
    }
    keep_lines(target, own, bias, lines);
}
#endif

// -- the kernel ------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(32 * WARPS) frame_product_kernel(
    const __grid_constant__ Map rows, const __grid_constant__ Map left, const __grid_constant__ Map weights,
    const __grid_constant__ Target target
) {
    extern __shared__ char memory[];
    __shared__ __align__(8) u64 kept[2 * STAGES + 1];
    __shared__ __align__(16) float bias[WIDE];
    Shared shared;
    shared.tiles = (shared_address(memory) + 1023) & ~1023u;
    shared.left = shared.tiles + STAGES * OF_STAGE, shared.barriers = shared_address(kept);
    float *lines = (float *)(memory + (shared.tiles - shared_address(memory)));
    int first_tile = blockIdx.z * target.tiles / gridDim.z;
    Place own;
    own.above = blockIdx.x % ABOVE, own.beside = blockIdx.y % ACROSS;
    own.first = blockIdx.x * HIGH, own.to = blockIdx.y * WIDE, own.start = first_tile * DEEP;
    own.steps = (blockIdx.z + 1) * target.tiles / gridDim.z - first_tile;
    own.has_left = LEFT && blockIdx.x >= gridDim.x - ABOVE;
    own.warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);  // so that the compiler sees that a warp has one
    int first_left = gridDim.x * HIGH, readers = computing(own) * (ABOVE + ACROSS - 1);
    asm volatile("griddepcontrol.launch_dependents;");
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            init(full(shared, stage), 1);
            init(empty(shared, stage), readers);
        }
        init(left_full(shared), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    meet_cluster();
    if (own.warp == WARPS - 1) {
        bring(own, rows, left, weights, first_left, shared);
    } else if (own.warp < GROUP) {
        compute(own, target, bias, lines, shared);
    }
#if LEFT
    else if (own.has_left) {
        compute_left(own, target, bias, first_left, lines, shared);
    }
#endif
}
