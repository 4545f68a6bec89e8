/* The dimension letters of this project, the same in comments, C, CUDA and Python:
 *
 *   T  tokens of a call               A  top_k, experts a token uses
 *   E  experts of the model (global)  R  routed rows, T * A
 *   L  experts here (local)           H  hidden size        I  intermediate size
 *
 * M, N, K are used only inside one GEMM (K = its reduction length), MR, NR, KR for a register tile. */
#ifndef MOE4_BASE_DIMS_H
#define MOE4_BASE_DIMS_H

enum {
    BLOCK_SIZE = 32,     /* elements that share one E8M0 scale, along K */
    BLOCK_BYTES = 16,    /* their codes */
    MAX_EXPERTS = 32767, /* routing replay stores ids as int16 */
    MAX_TOP_K = 128
};

#endif
