// LIBXSMM's product with block-sparse int8 weights (BCSC), for benchmarks/peers/libxsmm.py, which compiles it.
#include <libxsmm.h>

// Make a kernel for activations uint8 [m_blocks][columns / 4][packed][4], or NULL where LIBXSMM has none.
void *make(int packed, int m_blocks, int rows, int columns, int block_rows, int block_columns) {
  libxsmm_spgemm_config blocks;
  blocks.packed_width = packed;
  blocks.bk = block_columns;
  blocks.bn = block_rows;
  libxsmm_gemm_shape shape = libxsmm_create_gemm_shape(m_blocks, 0, columns, columns, 0, rows, LIBXSMM_DATATYPE_U8,
                                                       LIBXSMM_DATATYPE_I8, LIBXSMM_DATATYPE_I32, LIBXSMM_DATATYPE_I32);
  libxsmm_bitfield flags = LIBXSMM_GEMM_FLAG_VNNI_A | LIBXSMM_GEMM_FLAG_BETA_0;
  return (void *)libxsmm_create_packed_spgemm_bcsc(shape, flags, 0, blocks);
}

// Compute int32 [m_blocks][rows][packed] from blocks [kept][block_rows][block_columns] of `count` rows of blocks.
void run(void *kernel, void *x, void *weight, void *begins, void *places, void *y, unsigned long long count) {
  libxsmm_gemm_param given = {0};
  given.a.primary = x;
  given.b.primary = weight;
  given.b.secondary = begins;
  given.b.tertiary = places;
  given.b.quaternary = &count;
  given.c.primary = y;
  ((libxsmm_gemmfunction)kernel)(&given);
}

const char *target(void) { return libxsmm_get_target_arch(); }
