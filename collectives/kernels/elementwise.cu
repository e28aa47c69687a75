// The sum in rank order; products and master weights of many tensors at once. It follows `elements.cu`.

// -- the sum in rank order -------------------------------------------------------------------------------------------

__device__ inline float sum(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double sum(double a, double b) { return __dadd_rn(a, b); }

// Rounded to a dtype, in a wider one.
template <int OUT>
__device__ inline float rounded(float value) {
  return OUT <= FP16 ? widened(narrowed(value, OUT), OUT) : value;
}
template <int OUT>
__device__ inline double rounded(double value) { return value; }

template <int OUT, typename Wide>
__device__ inline void ordered_sum(const SumArguments& a) {
  i64 vectors = (a.length + 7) / 8, step = (i64)gridDim.x * blockDim.x;
  for (i64 v = (i64)blockIdx.x * blockDim.x + threadIdx.x; v < vectors; v += step) {
    i64 begin = v * 8;
    Wide total[8], part[8];
    if (begin + 8 <= a.length) {
      read8(((const char*)a.parts[0]) + begin * size_of(a.types[0]), a.types[0], total);
      for (int k = 0; k < 8; k++) total[k] = rounded<OUT>(total[k]);
      for (int p = 1; p < a.count; p++) {
        read8(((const char*)a.parts[p]) + begin * size_of(a.types[p]), a.types[p], part);
        for (int k = 0; k < 8; k++) total[k] = rounded<OUT>(sum(total[k], part[k]));
      }
      write8((char*)a.out + begin * size_of(OUT), OUT, total);
      continue;
    }
    for (i64 i = begin; i < a.length; i++) {
      read(((const char*)a.parts[0]) + i * size_of(a.types[0]), a.types[0], total);
      *total = rounded<OUT>(*total);
      for (int p = 1; p < a.count; p++) {
        read(((const char*)a.parts[p]) + i * size_of(a.types[p]), a.types[p], part);
        *total = rounded<OUT>(sum(*total, *part));
      }
      write((char*)a.out + i * size_of(OUT), OUT, *total);
    }
  }
}

extern "C" __global__ void ordered_sum_bf16(const __grid_constant__ SumArguments a) { ordered_sum<BF16, float>(a); }
extern "C" __global__ void ordered_sum_fp16(const __grid_constant__ SumArguments a) { ordered_sum<FP16, float>(a); }
extern "C" __global__ void ordered_sum_fp32(const __grid_constant__ SumArguments a) { ordered_sum<FP32, float>(a); }
extern "C" __global__ void ordered_sum_fp64(const __grid_constant__ SumArguments a) { ordered_sum<FP64, double>(a); }

// -- many tensors at once --------------------------------------------------------------------------------------------

// Return the tensor that a chunk is of.
__device__ inline int slice_of(const Slices& a, int chunk) {
  int low = 0, high = a.count;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (a.chunks[middle] <= chunk) low = middle;
    else high = middle;
  }
  return low;
}

struct Interval {
  int slice;
  i64 begin, end;  // elements
};

__device__ inline Interval interval_of(const Slices& a, int chunk) {
  Interval found;
  found.slice = slice_of(a, chunk);
  found.begin = (i64)(chunk - a.chunks[found.slice]) * CHUNK;
  i64 end = found.begin + CHUNK, length = a.length[found.slice];
  found.end = end < length ? end : length;
  return found;
}

__device__ inline float product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double product(double a, double b) { return __dmul_rn(a, b); }

template <typename Wide>
__device__ inline void scale8(char* at, int type, i64 left, Wide factor) {
  Wide values[8];
  if (left >= 8) {
    read8(at, type, values);
    for (int k = 0; k < 8; k++) values[k] = product(values[k], factor);
    write8(at, type, values);
    return;
  }
  for (int k = 0; k < left; k++) {
    read(at + k * size_of(type), type, values);
    write(at + k * size_of(type), type, product(*values, factor));
  }
}

extern "C" __global__ void scale(const __grid_constant__ Slices a) {
  float factor = *(const float*)a.extra;
  for (int chunk = blockIdx.x; chunk < a.chunks[a.count]; chunk += gridDim.x) {
    Interval now = interval_of(a, chunk);
    int type = a.first_type[now.slice];
    for (i64 i = now.begin + 8 * threadIdx.x; i < now.end; i += 8 * blockDim.x) {
      char* at = a.first[now.slice] + i * size_of(type);
      if (type == FP64) scale8(at, type, now.end - i, (double)factor);
      else scale8(at, type, now.end - i, factor);
    }
  }
}

__device__ inline float rounded_once(float value) { return value; }
__device__ inline float rounded_once(double value) { return __double2float_rn(value); }

// Write a parameter's element, widened, to its master weight unless it is the master weight, rounded. Torch rounds an
// fp64 master weight to fp32 first.
template <typename Wide>
__device__ inline void follow8(char* master, int wide, const char* param, int type, i64 left) {
  Wide masters[8];
  float params[8];
  if (left >= 8) {
    read8(master, wide, masters);
    read8(param, type, params);
  }
  u32 infinity = type == FP32 ? 0x7f800000u : type == FP16 ? 0x7c00u : 0x7f80u;
  u32 magnitudes = type == FP32 ? 0x7fffffffu : 0x7fffu;
  for (int k = 0; k < 8; k++) {
    if (k >= left) return;
    if (left < 8) {
      read(master + k * size_of(wide), wide, masters + k);
      read(param + k * size_of(type), type, params + k);
    }
    float from = rounded_once(masters[k]);
    u32 rounded = type == FP32 ? __float_as_uint(from) : narrowed(from, type);
    u32 bits = type == FP32 ? __float_as_uint(params[k]) : *(const u16*)(param + k * size_of(type));
    bool both_nan = (bits & magnitudes) > infinity && (rounded & magnitudes) > infinity;
    if (bits != rounded && !both_nan) write(master + k * size_of(wide), wide, (Wide)params[k]);
  }
}

extern "C" __global__ void follow(const __grid_constant__ Slices a) {
  for (int chunk = blockIdx.x; chunk < a.chunks[a.count]; chunk += gridDim.x) {
    Interval now = interval_of(a, chunk);
    int wide = a.first_type[now.slice], type = a.second_type[now.slice];
    for (i64 i = now.begin + 8 * threadIdx.x; i < now.end; i += 8 * blockDim.x) {
      char* master = a.first[now.slice] + i * size_of(wide);
      const char* param = a.second[now.slice] + i * size_of(type);
      if (wide == FP64) follow8<double>(master, wide, param, type, now.end - i);
      else follow8<float>(master, wide, param, type, now.end - i);
    }
  }
}
