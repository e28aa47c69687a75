// Kernels whose bits are those of torch's operators, or of exact sums. `device_kernels.py` says what each computes.
//
// This file, `elementwise.cu` and `norm.cu`, in this order, are one source for NVRTC, nvcc and, with definitions for what
// CUDA adds to C++, a C++ compiler. Every operation on floats is an intrinsic that rounds once, so no compiler may
// contract two of them. No header is included.
//
// Each kernel has one argument, a struct by value, which is at most 4 KiB. `device_kernels.py` has the same structs.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

enum Type { BF16, FP16, FP32, FP64 };  // ordered by width
enum {
  PARTS = 64,     // tensors that one launch adds
  SLICES = 128,   // tensors that one launch reads or writes in any other kernel
  CHUNK = 16384,  // elements of one tensor that a block of threads takes at a time, a multiple of BLOCK
  BLOCK = 16,     // elements of one block of the norm
  THREADS = 256,  // of a block of threads
  LIMBS = 72,     // 32-bit digits of the norm's sum: room for 2^64 blocks of the largest fp64 number
  INFS = LIMBS,   // behind the limbs: how many blocks' sums are infinite
  NANS,           // and how many are NaN
};

struct SumArguments {
  const void* parts[PARTS];
  void* out;
  i64 length;
  int count;
  u8 types[PARTS];
};

struct Slices {
  char* first[SLICES];
  char* second[SLICES];
  i64 length[SLICES];
  int chunks[SLICES + 1];  // chunks of all tensors before each; the last entry: of all
  int count;
  u8 first_type[SLICES], second_type[SLICES];
  void* extra;  // `norm_limbs`: the limbs; `scale`: the factor, fp32
};

struct ClipArguments {
  const i64* limbs;
  float* out;  // the norm, the factor
  float max_norm;
};

// -- 16-bit floats ---------------------------------------------------------------------------------------------------

__device__ inline float widened(u16 bits, int type) {
  if (type == BF16) return __uint_as_float((u32)bits << 16);
  u32 magnitude = (u32)(bits & 0x7fff) << 13, sign = (u32)(bits & 0x8000) << 16;
  if (magnitude >= 0x0f800000u) return __uint_as_float(sign | 0x70000000u | magnitude);  // inf, NaN: all exponent bits
  float value = __fmul_rn(__uint_as_float(magnitude), __uint_as_float(0x77800000u));     // times 2^112: exact
  return __uint_as_float(sign | __float_as_uint(value));
}

// Rounded half to even once. A NaN is 0x7fff, as the device's own conversion gives it.
__device__ inline u16 narrowed(float value, int type) {
  u32 bits = __float_as_uint(value), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (type == BF16) return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  u32 half;
  if (magnitude >= 0x47800000u) {  // 2^16 and more; 65520 to 2^16 carry into infinity below
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal in fp16: the sum with 0.5 has its last bit at 2^-24
    half = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return (u16)((sign >> 16) | half);
}

// -- memory ----------------------------------------------------------------------------------------------------------

__device__ inline int size_of(int type) { return type <= FP16 ? 2 : type == FP32 ? 4 : 8; }

// Only a sum or a product in fp64 has elements of fp64: elsewhere the branches for them are left out.
__device__ inline void read(const char* at, int type, float* to) {
  *to = type <= FP16 ? widened(*(const u16*)at, type) : *(const float*)at;
}
__device__ inline void read(const char* at, int type, double* to) {
  if (type == FP64) {
    *to = *(const double*)at;
  } else {
    float value;
    read(at, type, &value);
    *to = (double)value;
  }
}

__device__ inline void write(char* at, int type, float value) {
  if (type <= FP16) *(u16*)at = narrowed(value, type);
  else *(float*)at = value;
}
__device__ inline void write(char* at, int, double value) { *(double*)at = value; }

// Eight elements side by side are 4, 8 or 16 words, read 16 bytes at a time where the address allows it.
template <int WORDS>
__device__ inline void read_words(const char* at, u32* words) {
  if ((u64)at & 15) {
    for (int k = 0; k < WORDS; k++)
      words[k] = WORDS == 4 ? ((const u16*)at)[2 * k] | (u32)((const u16*)at)[2 * k + 1] << 16 : ((const u32*)at)[k];
    return;
  }
  for (int k = 0; k < WORDS / 4; k++) {
    uint4 four = ((const uint4*)at)[k];
    words[4 * k] = four.x, words[4 * k + 1] = four.y, words[4 * k + 2] = four.z, words[4 * k + 3] = four.w;
  }
}

template <int WORDS>
__device__ inline void write_words(char* at, const u32* words) {
  if ((u64)at & 15) {
    for (int k = 0; k < WORDS; k++) {
      if (WORDS == 4) ((u16*)at)[2 * k] = (u16)words[k], ((u16*)at)[2 * k + 1] = (u16)(words[k] >> 16);
      else ((u32*)at)[k] = words[k];
    }
    return;
  }
  for (int k = 0; k < WORDS / 4; k++) {
    uint4 four = {words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]};
    ((uint4*)at)[k] = four;
  }
}

__device__ inline void read8(const char* at, int type, float* to) {
  u32 words[8];
  if (type <= FP16) {
    read_words<4>(at, words);
    for (int k = 0; k < 8; k++) to[k] = widened((u16)(words[k / 2] >> (k % 2 * 16)), type);
  } else {
    read_words<8>(at, words);
    for (int k = 0; k < 8; k++) to[k] = __uint_as_float(words[k]);
  }
}
__device__ inline void read8(const char* at, int type, double* to) {
  if (type == FP64) {
    u32 words[16];
    read_words<16>(at, words);
    for (int k = 0; k < 8; k++) to[k] = __longlong_as_double((i64)(words[2 * k] | (u64)words[2 * k + 1] << 32));
  } else {
    float values[8];
    read8(at, type, values);
    for (int k = 0; k < 8; k++) to[k] = (double)values[k];
  }
}

__device__ inline void write8(char* at, int type, const float* values) {
  u32 words[8];
  if (type <= FP16) {
    for (int k = 0; k < 4; k++) words[k] = narrowed(values[2 * k], type) | (u32)narrowed(values[2 * k + 1], type) << 16;
    write_words<4>(at, words);
  } else {
    for (int k = 0; k < 8; k++) words[k] = __float_as_uint(values[k]);
    write_words<8>(at, words);
  }
}
__device__ inline void write8(char* at, int, const double* values) {
  u32 words[16];
  for (int k = 0; k < 16; k++) words[k] = (u32)((u64)__double_as_longlong(values[k / 2]) >> (k % 2 * 32));
  write_words<16>(at, words);
}
