// Instructions of Hopper (sm_90a) as functions: barriers, TMA, clusters, conversions. Source: PTX ISA 8.0.
// DTYPE ("bf16", "f16") is defined on the command line.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef long long i64;

struct alignas(64) Map {
    char bytes[128];
};

__device__ __forceinline__ u32 shared_address(const void *at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool is_over(u32 barrier, u32 phase) {
    u32 found;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(found) : "r"(barrier), "r"(phase) : "memory");
    return found;
}

__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
    while (!is_over(barrier, phase)) {
    }
}

__device__ __forceinline__ bool elected() {
    u32 found;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p; }" : "=r"(found));
    return found;
}

__device__ __forceinline__ void arrive_at(u32 barrier, u32 block) {
    asm volatile(
        "{ .reg .b32 far; mapa.shared::cluster.u32 far, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [far]; }"
        ::"r"(barrier), "r"(block) : "memory");
}

// Relaxed: values that other blocks read need a separate fence.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// A box of a matrix at (column, row) at the same offset in each block of `blocks`.
__device__ __forceinline__ void fetch(u32 into, const Map &map, int column, int row, u32 barrier, u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(into), "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks) : "memory");
}

__device__ __forceinline__ void ask(const Map &map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(column), "r"(row));
}

// wgmma descriptor of a tile: rows of 128 bytes, swizzled in groups of eight.
__device__ __forceinline__ u64 described(u32 at) {
    return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

__device__ __forceinline__ float wide_of(u16 value) {
    float found;
    asm("cvt.f32." DTYPE " %0, %1;" : "=f"(found) : "h"(value));
    return found;
}

// Both halves of a word as floats.
__device__ __forceinline__ float2 wide_pair(u32 both) {
    return make_float2(wide_of((u16)both), wide_of((u16)(both >> 16)));
}

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 found;
    asm("cvt.rn." DTYPE "x2.f32 %0, %1, %2;" : "=r"(found) : "f"(high), "f"(low));
    return found;
}

__device__ __forceinline__ float rounded(float value) {
    u16 found;
    asm("cvt.rn." DTYPE ".f32 %0, %1;" : "=h"(found) : "f"(value));
    return wide_of(found);
}
