/* warpgroup.cuh - a part of common.cuh: warpgroup products, for compute capability 9.0.
 *
 *     c [64][64] += a [64][16] b [16][64], or = if not `add`
 *
 * A warpgroup is four warps, each of which has 16 rows of a and of c in the layout of
 * multiply_bf16. b is 16 elements of each of 64 rows of 64 elements in shared memory, which begin
 * at a multiple of 1024 bytes and are swizzled as by tile_at. group_matrix(rows) is b for the first
 * 16 elements; for those from element e on add e / 8.
 *
 * Products between open_products and close_products are computed while the threads continue.
 * wait_products waits for all of them; then c can be used. A thread that has written to shared
 * memory, also by copies, must call share_with_products before a barrier. */
#ifndef H2O_CUDA_WARPGROUP_CUH
#define H2O_CUDA_WARPGROUP_CUH

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WARPGROUPS true

#define FOUR_OF(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define ALL_OF(c)                                                                                  \
    FOUR_OF(c, 0), FOUR_OF(c, 1), FOUR_OF(c, 2), FOUR_OF(c, 3), FOUR_OF(c, 4), FOUR_OF(c, 5),      \
        FOUR_OF(c, 6), FOUR_OF(c, 7)
#define DEFINE_GROUP_PRODUCT(type)                                                                 \
    DEVICE void multiply_group_##type(float c[8][4], const uint32_t a[4], uint32_t b, bool add) {  \
        const uint32_t swizzled = 1u << 30, eight_rows = 1024 / 16;                                \
        asm volatile("{ .reg .pred add; .reg .b64 b; mov.b64 b, {%36, %37}; "                      \
                     "setp.ne.b32 add, %38, 0; "                                                   \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." #type "." #type " "             \
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "     \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "      \
                     "%30, %31}, {%32, %33, %34, %35}, b, add, 1, 1, 0; }"                         \
                     : ALL_OF(c)                                                                   \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b),                         \
                       "r"(swizzled | eight_rows), "r"((int)add)                                   \
                     : "memory");                                                                  \
    }
DEFINE_GROUP_PRODUCT(f16)
DEFINE_GROUP_PRODUCT(bf16)

DEVICE uint32_t group_matrix(const void *rows) {
    const uint32_t unused = 1u << 16;
    return unused | (uint32_t)__cvta_generic_to_shared(rows) / 16;
}

DEVICE void open_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

DEVICE void wait_products(float c[8][4]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    asm volatile("" : ALL_OF(c)::"memory"); /* c must not be read before */
}

DEVICE void share_with_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#else
#define WARPGROUPS false
#endif

#endif
