// x (batch, M, K) bf16 as wgmma.cu reads it: tiles of 64 values of k, (batch, K / 64, M, 64), M padded
// to whole 8 and K to whole chunks, with zeros. Of each 32 values thread t's pair q stands at
// 16 (q / 2) + 8 (q % 2) + 2 t; of a row's eight 16-byte pieces, piece p stands at p ^ (row % 8).
//
// A thread moves 32 values. Given by -D: NATURAL, whether codes are decoded in pairs of neighbours
// and not of those four apart.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

struct Operands {
  const u8* x;       // rows of K values
  u8* out;
  long long x_stride, x_batch;  // bytes between rows, and between products of a batch
  int m, k, groups;  // groups of 32 values, whole chunks
};

extern "C" __global__ void arrange(const Operands p) {
  asm volatile("griddepcontrol.launch_dependents;");
  const int group = blockIdx.x * blockDim.x + threadIdx.x, lines = (p.m + 7) / 8 * 8;
  if (group >= p.groups) return;
  const int row = blockIdx.y % lines, batch = blockIdx.y / lines, k = group * 32;
  u32 in[4][4];
  const u8* from = p.x + batch * p.x_batch + row * p.x_stride + k * 2;
  if (row < p.m && k + 32 <= p.k && ((size_t)p.x | p.x_stride | p.x_batch) % 16 == 0) {
#pragma unroll
    for (int t = 0; t < 4; t++) *(uint4*)in[t] = ((const uint4*)from)[t];
  } else {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const u16* pair = (const u16*)from + 2 * i;
      const u32 low = row < p.m && k + 2 * i < p.k ? pair[0] : 0;
      const u32 high = row < p.m && k + 2 * i + 1 < p.k ? pair[1] : 0;
      in[i / 4][i % 4] = high << 16 | low;
    }
  }
  const long long tile = (long long)batch * (p.groups / 2) + group / 2;
  u8* to = p.out + (tile * lines + row) * 128;
#pragma unroll
  for (int q = 0; q < 4; q++) {
    u32 piece[4];
#pragma unroll
    for (int t = 0; t < 4; t++)
      piece[t] = NATURAL ? in[t][q] : __byte_perm(in[t][q / 2], in[t][2 + q / 2], q % 2 ? 0x7632 : 0x5410);
    *(uint4*)(to + ((group % 2 * 4 + q) ^ row % 8) * 16) = *(uint4*)piece;
  }
}
