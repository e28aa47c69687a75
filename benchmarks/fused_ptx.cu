// Kernels of `python -m benchmarks.fused_ptx`: torch's multi_tensor_apply_kernel with the functors of its optimizers, each under
// a short name. Adam and what `foreach` needs are the wheel's headers. The formula of the fused SGD is in no header: it is
// restated here after torch's aten/src/ATen/native/cuda/FusedSgdKernel.cu, with its branches and its order of operations.
#include <ATen/native/cuda/fused_adam_utils.cuh>
#include <functional>

namespace at::native {
namespace {

template <typename T, int depth>
struct RestatedSgd {
  using math = at::opmath_type<T>;

  C10_DEVICE __forceinline__ void step(T values[depth][kILP], math decay, math momentum, math lr, math dampening,
      bool nesterov, bool maximize, bool first, const float* scale) {
#pragma unroll
    for (int i = 0; i < kILP; i++) {
      auto parameter = static_cast<math>(values[0][i]);
      auto update = static_cast<math>(values[1][i]);
      if (scale) {
        update /= static_cast<math>(*scale);
        values[1][i] = update;
      }
      if (maximize) update *= -1.0;
      if (decay != 0) update += decay * parameter;
      if constexpr (depth > 2) {
        const auto buffer = first ? update : (momentum * static_cast<math>(values[2][i]) + (1 - dampening) * update);
        values[2][i] = buffer;
        if (nesterov) {
          update = update + momentum * buffer;
        } else {
          update = buffer;
        }
      }
      parameter -= lr * update;
      values[0][i] = parameter;
    }
  }

  C10_DEVICE __forceinline__ void operator()(int64_t chunk_size, TensorListMetadata<depth>& lists, double decay,
      double momentum, const float* lr_ptr, double lr, double dampening, bool nesterov, bool maximize, bool first,
      const float* scale, const float* found_inf) {
    if (found_inf && *found_inf == 1) return;
    const auto tensor = lists.block_to_tensor[blockIdx.x];
    const auto chunk = lists.block_to_chunk[blockIdx.x];
    const auto rate = lr_ptr ? static_cast<math>(*lr_ptr) : static_cast<math>(lr);
    T* args[depth];
    T values[depth][kILP];
    const auto n = lists.numel_for_tensor[tensor] - chunk * chunk_size;
    const bool aligned = init_args<depth>(args, lists, chunk, chunk_size, tensor);
    if (n % kILP == 0 && chunk_size % kILP == 0 && aligned) {
      for (auto at = threadIdx.x; at * kILP < n && at * kILP < chunk_size; at += blockDim.x) {
#pragma unroll
        for (int d = 0; d < depth; d++) load_store(values[d], args[d], 0, at);
        step(values, decay, momentum, rate, dampening, nesterov, maximize, first, scale);
        load_store(args[0], values[0], at, 0);
        if (scale) load_store(args[1], values[1], at, 0);
        if (depth > 2) load_store(args[2], values[2], at, 0);
      }
    } else {
      for (auto at = 0; at < n && at < chunk_size; at += blockDim.x * kILP) {
        load_args<depth>(values, args, at, chunk_size, n);
        step(values, decay, momentum, rate, dampening, nesterov, maximize, first, scale);
        store_args(args[0], values[0], at, chunk_size, n);
        if (scale) store_args(args[1], values[1], at, chunk_size, n);
        if (depth > 2) store_args(args[2], values[2], at, chunk_size, n);
      }
    }
  }
};

#define ADAM(name, T, mode, depth)                                                                        \
  struct name : FusedAdamMathFunctor<T, depth, ADAM_MODE::mode, depth == 5> {};                           \
  template __global__ void multi_tensor_apply_kernel(FusedOptimizerTensorListMetadata<depth>, name,       \
      const float*, double, double, double, double, double, bool, const float*, const float*);
#define SGD(name, T, depth)                                                                               \
  struct name : RestatedSgd<T, depth> {};                                                                 \
  template __global__ void multi_tensor_apply_kernel(TensorListMetadata<depth>, name, double, double,     \
      const float*, double, double, bool, bool, bool, const float*, const float*);
#define FOREACH(name, T, functor, depth, op)                                                              \
  struct name : functor<T, depth, depth, 0> {};                                                           \
  template __global__ void multi_tensor_apply_kernel(TensorListMetadata<depth>, name, op<opmath_type<T>>, \
      opmath_type<T>);
#define KERNELS(dtype, T)                                                                                 \
  ADAM(adam_##dtype, T, ORIGINAL, 4)                                                                      \
  ADAM(adamw_##dtype, T, ADAMW, 4)                                                                        \
  ADAM(adamw_amsgrad_##dtype, T, ADAMW, 5)                                                                \
  SGD(sgd_##dtype, T, 2)                                                                                  \
  SGD(sgd_momentum_##dtype, T, 3)                                                                         \
  FOREACH(foreach_add_##dtype, T, BinaryOpListAlphaFunctor, 2, std::plus)                                 \
  FOREACH(foreach_addcmul_##dtype, T, PointwiseOpScalarFunctor, 3, std::multiplies)                       \
  FOREACH(foreach_addcdiv_##dtype, T, PointwiseOpScalarFunctor, 3, std::divides)

KERNELS(fp32, float)
KERNELS(bf16, c10::BFloat16)

} // namespace
} // namespace at::native
