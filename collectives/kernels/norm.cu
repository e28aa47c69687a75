// The exact norm and the clip's factor. It follows `elementwise.cu`.

__device__ inline double square(float value) { return __dmul_rn((double)value, (double)value); }

// Return the sum of squares of 16 elements: lanes j + j+8, then j + j+4, then j + j+2, then 0 + 1.
__device__ inline double block_sum(const char* at, int type, i64 left) {
  float values[16];
  if (left >= BLOCK) {
    read8(at, type, values);
    read8(at + 8 * size_of(type), type, values + 8);
  } else {
    for (int k = 0; k < BLOCK; k++) {
      values[k] = 0.0f;
      if (k < left) read(at + k * size_of(type), type, values + k);
    }
  }
  double lanes[8];
  for (int k = 0; k < 8; k++) lanes[k] = __dadd_rn(square(values[k]), square(values[k + 8]));
  for (int k = 0; k < 4; k++) lanes[k] = __dadd_rn(lanes[k], lanes[k + 4]);
  for (int k = 0; k < 2; k++) lanes[k] = __dadd_rn(lanes[k], lanes[k + 2]);
  return __dadd_rn(lanes[0], lanes[1]);
}

// A finite fp64 number as three 32-bit digits: low + middle 2^32 + high 2^64, times 2^(32 place - 1074).
struct Digits {
  int place;
  u64 low, middle, high;
};

__device__ inline Digits digits_of(double value) {
  u64 bits = (u64)__double_as_longlong(value), mantissa = bits & 0xfffffffffffffULL;
  int exponent = (int)(bits >> 52) & 0x7ff;
  if (exponent) mantissa |= 1ULL << 52;
  else exponent = 1;
  int position = exponent - 1, shift = position & 31;
  u64 lower = mantissa << shift;
  Digits found = {position >> 5, lower & 0xffffffffULL, lower >> 32, shift ? mantissa >> (64 - shift) : 0};
  return found;
}

// Carry what exceeds 32 bits of a limb into the next one.
__device__ inline void settle(u64* limbs) {
  u64 carry = 0;
#pragma unroll 1
  for (int k = 0; k < LIMBS; k++) {
    u64 value = limbs[k] + carry;
    limbs[k] = value & 0xffffffffULL;
    carry = value >> 32;
  }
}

__device__ inline void add_digits(u64* limbs, const Digits& sums) {
  atomicAdd(limbs + sums.place, sums.low);
  atomicAdd(limbs + sums.place + 1, sums.middle);
  atomicAdd(limbs + sums.place + 2, sums.high);
}

// A thread adds up the digits of one place while the place stays the same; a block of threads adds at most 2^32 - 1 to
// each limb in global memory. So sums of 2^31 such blocks, of all launches and ranks, stay below 2^63.
extern "C" __global__ void __launch_bounds__(THREADS, 4) norm_limbs(const __grid_constant__ Slices a) {
  __shared__ u64 mine[LIMBS + 2];
  for (int k = threadIdx.x; k < LIMBS + 2; k += blockDim.x) mine[k] = 0;
  __syncthreads();
  Digits held = {0, 0, 0, 0};
  u64 infs = 0, nans = 0;
  for (int chunk = blockIdx.x; chunk < a.chunks[a.count]; chunk += gridDim.x) {
    Interval now = interval_of(a, chunk);
    int type = a.first_type[now.slice];
    for (i64 i = now.begin + BLOCK * threadIdx.x; i < now.end; i += BLOCK * blockDim.x) {
      double value = block_sum(a.first[now.slice] + i * size_of(type), type, now.end - i);
      u64 bits = (u64)__double_as_longlong(value), infinity = 0x7ffULL << 52;  // no block's sum is negative
      if ((bits & (~0ULL >> 1)) >= infinity) {
        if ((bits & (~0ULL >> 1)) == infinity) infs++;
        else nans++;
        continue;
      }
      Digits found = digits_of(value);
      if (found.place != held.place) {
        add_digits(mine, held);
        held = found;
      } else {
        held.low += found.low;
        held.middle += found.middle;
        held.high += found.high;
      }
    }
  }
  add_digits(mine, held);
  if (infs) atomicAdd(mine + INFS, infs);
  if (nans) atomicAdd(mine + NANS, nans);
  __syncthreads();
  if (threadIdx.x == 0) settle(mine);
  __syncthreads();
  for (int k = threadIdx.x; k < LIMBS + 2; k += blockDim.x)
    if (mine[k]) atomicAdd((u64*)a.extra + k, mine[k]);
}

__device__ inline int bit(const u64* limbs, int place) { return (int)(limbs[place >> 5] >> (place & 31)) & 1; }

// Return settled limbs as fp64, rounded half to even once.
__device__ inline double rounded_limbs(const u64* limbs) {
  int top = LIMBS - 1;
#pragma unroll 1
  while (top > 0 && !limbs[top]) top--;
  int highest = 32 * top + 31;
#pragma unroll 1
  while (highest > 0 && !bit(limbs, highest)) highest--;
  if (highest <= 52) return __longlong_as_double((i64)(limbs[0] | limbs[1] << 32));  // exact; its bits are its units
  int low = highest - 52;
  u64 mantissa = 0;
#pragma unroll 1
  for (int place = highest; place >= low; place--) mantissa = mantissa << 1 | bit(limbs, place);
  bool sticky = false;
#pragma unroll 1
  for (int place = low - 2; place >= 0 && !sticky; place--) sticky = bit(limbs, place);
  if (bit(limbs, low - 1) && (sticky || (mantissa & 1))) mantissa++;
  if (mantissa >> 53) mantissa >>= 1, low++;
  if (low + 1 >= 2047) return __longlong_as_double((i64)(0x7ffULL << 52));
  return __longlong_as_double((i64)((u64)(low + 1) << 52 | (mantissa & 0xfffffffffffffULL)));
}

// The norm and the clip's factor, by one thread. The limbs may be sums over launches and ranks.
extern "C" __global__ void clip_factor(const __grid_constant__ ClipArguments a) {
  u64 limbs[LIMBS];
#pragma unroll 1
  for (int k = 0; k < LIMBS; k++) limbs[k] = (u64)a.limbs[k];
  settle(limbs);
  float norm = __double2float_rn(__dsqrt_rn(rounded_limbs(limbs)));
  if (a.limbs[INFS]) norm = __uint_as_float(0x7f800000u);
  if (a.limbs[NANS]) norm = __uint_as_float(0x7fc00000u);
  float factor = __fmul_rn(__frcp_rn(__fadd_rn(norm, 1e-6f)), a.max_norm);
  a.out[0] = norm;
  a.out[1] = factor > 1.0f ? 1.0f : factor;  // NaN stays NaN
}
