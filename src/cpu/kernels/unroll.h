/* Loops of constant length whose bodies are to stand one after the other, so that arrays become registers. */
#ifndef MOE4_CPU_KERNELS_UNROLL_H
#define MOE4_CPU_KERNELS_UNROLL_H

/* Before a loop of at most 16 turns.  Clang optimises an inlined function first by itself, when lengths are not yet
 * constants: told a number it unrolls by that then, and never again. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

#endif
