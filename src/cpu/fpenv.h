/* The floating-point environment our code is written for: round to nearest, subnormals kept, exceptions masked.  A host
 * that runs with other settings changes nothing for us, and we change nothing for it. */
#ifndef MOE4_CPU_FPENV_H
#define MOE4_CPU_FPENV_H

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>

static inline uint32_t fpenv_enter(void)
{
    uint32_t host = _mm_getcsr();
    _mm_setcsr(0x1F80);
    return host;
}

static inline void fpenv_leave(uint32_t host)
{
    _mm_setcsr(host);
}

#elif defined(__aarch64__)

static inline uint32_t fpenv_enter(void)
{
    uint64_t host;
    __asm__ volatile("mrs %0, fpcr" : "=r"(host));
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
    return (uint32_t)host;
}

static inline void fpenv_leave(uint32_t host)
{
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)host));
}

#else
#error "fpenv: unknown architecture"
#endif
#endif
