/* Single instructions that CUDA C has no name for; of sm_90a where it does not say otherwise. */
#ifndef MOE4_CUDA_PTX_CUH
#define MOE4_CUDA_PTX_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* ---- mbarriers -------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* So many arrivals at once. */
static __device__ __forceinline__ void barrier_arrive(uint32_t barrier, int count)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/* This phase also waits for `bytes` of bulk copies. */
static __device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/* An arrival that brings `bytes` of bulk copies. */
static __device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/* Waits until the phase of this parity is over. */
static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* The same for somebody who has time, while others want the issue slots. */
static __device__ __forceinline__ void barrier_await(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\n"
                 "nanosleep.u32 100;\n"
                 "bra again;\n"
                 "over:\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* Meets the block's other threads that name this barrier, `threads` in all. */
template <int threads> static __device__ __forceinline__ void barrier_sync(int barrier)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(threads) : "memory");
}

/* Counts for the other threads that name this barrier, and goes on. */
template <int threads> static __device__ __forceinline__ void barrier_arrive_at(int barrier)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(threads) : "memory");
}

/* Makes initialised barriers visible to the copy engine. */
static __device__ __forceinline__ void barrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* ---- Copies to shared memory ------------------------------------------------------------------------------------ */

static __device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* Into the second-level cache; `bytes` a multiple of 16. */
static __device__ __forceinline__ void prefetch_bulk(const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

/* If wanted, 16 bytes, of which the first `valid` are read and the others become 0. */
static __device__ __forceinline__ void copy16_if(bool wanted, uint32_t to, const void *from, uint32_t valid)
{
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 "setp.ne.b32 wanted, %0, 0;\n"
                 "@wanted cp.async.cg.shared.global [%1], [%2], 16, %3;\n"
                 "}" ::"r"((int)wanted),
                 "r"(to), "l"(from), "r"(valid)
                 : "memory");
}

static __device__ __forceinline__ void copy4(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

/* One arrival at the barrier once all copy16_if and copy4 of this thread so far have landed. */
static __device__ __forceinline__ void copies_arrive(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

static __device__ __forceinline__ void copy_wait_all(void)
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* What this thread wrote to shared memory, or knows to be written, becomes visible to wgmma. */
static __device__ __forceinline__ void async_proxy_fence(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Memory that is soon read, to the first-level cache. */
static __device__ __forceinline__ void prefetch(const void *from)
{
    asm volatile("prefetch.global.L1 [%0];" ::"l"(from) : "memory");
}

/* ---- Warpgroups ------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int pending> static __device__ __forceinline__ void wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

template <int count> static __device__ __forceinline__ void registers_raise(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}

template <int count> static __device__ __forceinline__ void registers_lower(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

/* ---- Programmatic dependent launch ------------------------------------------------------------------------------ */

/* The next kernel of the stream may start.  Before sm_90 kernels do not overlap (launch.cuh). */
static __device__ __forceinline__ void launch_dependents(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Until the kernels before this one are over and what they wrote is visible. */
static __device__ __forceinline__ void wait_for_predecessors(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* ---- Clusters --------------------------------------------------------------------------------------------------- */

/* All threads of the cluster's blocks meet; what they wrote is visible. */
static __device__ __forceinline__ void cluster_sync(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads(); /* a cluster is a block */
#endif
}

/* ---- Shared memory ---------------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint4 load_shared_16(uint32_t address)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

static __device__ __forceinline__ uint32_t load_shared_4(uint32_t address)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

static __device__ __forceinline__ uint2 load_shared_8(uint32_t address)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
    return v;
}

/* The same by index, as a pointer: constant offsets then go into the instructions. */
static __device__ __forceinline__ const float2 *shared_pairs(uint32_t address)
{
    return (const float2 *)__cvta_shared_to_generic(address);
}

/* Stores if wanted, without a branch, which would keep the compiler from computing several values at once. */
static __device__ __forceinline__ void store_2_if(bool wanted, void *to, uint32_t v)
{
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 "setp.ne.b32 wanted, %0, 0;\n"
                 "@wanted st.global.u16 [%1], %2;\n"
                 "}" ::"r"((int)wanted),
                 "l"(to), "r"(v)
                 : "memory");
}

static __device__ __forceinline__ void store_4_if(bool wanted, void *to, uint32_t v)
{
    asm volatile("{\n"
                 ".reg .pred wanted;\n"
                 "setp.ne.b32 wanted, %0, 0;\n"
                 "@wanted st.global.u32 [%1], %2;\n"
                 "}" ::"r"((int)wanted),
                 "l"(to), "r"(v)
                 : "memory");
}

/* The lower half. */
static __device__ __forceinline__ void store_shared_2(uint32_t address, uint32_t v)
{
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

static __device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t v)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

static __device__ __forceinline__ void store_shared_8(uint32_t address, uint32_t first, uint32_t second)
{
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(first), "r"(second) : "memory");
}

static __device__ __forceinline__ void store_shared_16(uint32_t address, const uint4 &v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

static __device__ __forceinline__ void store_shared_zeros(uint32_t address)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

/* Four 8x8 matrices of 16-bit elements: lane i gives the address of row i%8 of matrix i/8 and gets, of each matrix,
 * elements 2(i%4) and 2(i%4)+1 of row i/4. */
static __device__ __forceinline__ uint4 load_matrices(uint32_t address)
{
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

/* ---- mma.sync --------------------------------------------------------------------------------------------------- */

/* m16n8k16: d += a * b, bf16 operands, fp32 sums. */
static __device__ __forceinline__ void mma(float *d, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
