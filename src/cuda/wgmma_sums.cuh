/* The sums of a wgmma m64nN, 4 registers a thread for every 8 columns: as its text names them, WGMMA_SUMS_N, and as
 * they are bound to d[N / 2], WGMMA_BIND_N(d).  The instruction names each of its registers, so each width needs its
 * own. */
#ifndef MOE4_CUDA_WGMMA_SUMS_CUH
#define MOE4_CUDA_WGMMA_SUMS_CUH

#define WGMMA_SUMS_8   "%0, %1, %2, %3"
#define WGMMA_SUMS_16  WGMMA_SUMS_8 ", %4, %5, %6, %7"
#define WGMMA_SUMS_24  WGMMA_SUMS_16 ", %8, %9, %10, %11"
#define WGMMA_SUMS_32  WGMMA_SUMS_24 ", %12, %13, %14, %15"
#define WGMMA_SUMS_40  WGMMA_SUMS_32 ", %16, %17, %18, %19"
#define WGMMA_SUMS_48  WGMMA_SUMS_40 ", %20, %21, %22, %23"
#define WGMMA_SUMS_56  WGMMA_SUMS_48 ", %24, %25, %26, %27"
#define WGMMA_SUMS_64  WGMMA_SUMS_56 ", %28, %29, %30, %31"
#define WGMMA_SUMS_72  WGMMA_SUMS_64 ", %32, %33, %34, %35"
#define WGMMA_SUMS_80  WGMMA_SUMS_72 ", %36, %37, %38, %39"
#define WGMMA_SUMS_88  WGMMA_SUMS_80 ", %40, %41, %42, %43"
#define WGMMA_SUMS_96  WGMMA_SUMS_88 ", %44, %45, %46, %47"
#define WGMMA_SUMS_104 WGMMA_SUMS_96 ", %48, %49, %50, %51"
#define WGMMA_SUMS_112 WGMMA_SUMS_104 ", %52, %53, %54, %55"
#define WGMMA_SUMS_120 WGMMA_SUMS_112 ", %56, %57, %58, %59"
#define WGMMA_SUMS_128 WGMMA_SUMS_120 ", %60, %61, %62, %63"
#define WGMMA_SUMS_136 WGMMA_SUMS_128 ", %64, %65, %66, %67"
#define WGMMA_SUMS_144 WGMMA_SUMS_136 ", %68, %69, %70, %71"
#define WGMMA_SUMS_152 WGMMA_SUMS_144 ", %72, %73, %74, %75"
#define WGMMA_SUMS_160 WGMMA_SUMS_152 ", %76, %77, %78, %79"

#define WGMMA_BIND_FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_BIND_8(d)       WGMMA_BIND_FOUR(d, 0)
#define WGMMA_BIND_16(d)      WGMMA_BIND_8(d), WGMMA_BIND_FOUR(d, 4)
#define WGMMA_BIND_24(d)      WGMMA_BIND_16(d), WGMMA_BIND_FOUR(d, 8)
#define WGMMA_BIND_32(d)      WGMMA_BIND_24(d), WGMMA_BIND_FOUR(d, 12)
#define WGMMA_BIND_40(d)      WGMMA_BIND_32(d), WGMMA_BIND_FOUR(d, 16)
#define WGMMA_BIND_48(d)      WGMMA_BIND_40(d), WGMMA_BIND_FOUR(d, 20)
#define WGMMA_BIND_56(d)      WGMMA_BIND_48(d), WGMMA_BIND_FOUR(d, 24)
#define WGMMA_BIND_64(d)      WGMMA_BIND_56(d), WGMMA_BIND_FOUR(d, 28)
#define WGMMA_BIND_72(d)      WGMMA_BIND_64(d), WGMMA_BIND_FOUR(d, 32)
#define WGMMA_BIND_80(d)      WGMMA_BIND_72(d), WGMMA_BIND_FOUR(d, 36)
#define WGMMA_BIND_88(d)      WGMMA_BIND_80(d), WGMMA_BIND_FOUR(d, 40)
#define WGMMA_BIND_96(d)      WGMMA_BIND_88(d), WGMMA_BIND_FOUR(d, 44)
#define WGMMA_BIND_104(d)     WGMMA_BIND_96(d), WGMMA_BIND_FOUR(d, 48)
#define WGMMA_BIND_112(d)     WGMMA_BIND_104(d), WGMMA_BIND_FOUR(d, 52)
#define WGMMA_BIND_120(d)     WGMMA_BIND_112(d), WGMMA_BIND_FOUR(d, 56)
#define WGMMA_BIND_128(d)     WGMMA_BIND_120(d), WGMMA_BIND_FOUR(d, 60)
#define WGMMA_BIND_136(d)     WGMMA_BIND_128(d), WGMMA_BIND_FOUR(d, 64)
#define WGMMA_BIND_144(d)     WGMMA_BIND_136(d), WGMMA_BIND_FOUR(d, 68)
#define WGMMA_BIND_152(d)     WGMMA_BIND_144(d), WGMMA_BIND_FOUR(d, 72)
#define WGMMA_BIND_160(d)     WGMMA_BIND_152(d), WGMMA_BIND_FOUR(d, 76)

#endif
