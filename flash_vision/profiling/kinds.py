"""The kind of work that an operator does: matrix products, convolution, normalisation, reduction, element-wise, layout.

One table serves the counters (which operators cost zero MACs, and which are unknown) and the time breakdown.
"""

from __future__ import annotations

KINDS = ("matmul", "convolution", "normalisation", "reduction", "elementwise", "cast", "layout", "creation", "view")

_OPERATORS = {
    "matmul": """mm addmm bmm baddbmm matmul linear einsum addbmm mv addmv dot vdot inner tensordot linalg_multi_dot
        bilinear scaled_dot_product_attention mkldnn_linear mkl_linear addr outer ger""",
    "convolution": """convolution convolution_mode conv1d conv2d conv3d conv_transpose1d conv_transpose2d
        conv_transpose3d mkldnn_convolution cudnn_convolution miopen_convolution convolution_overrideable thnn_conv2d
        slow_conv2d slow_conv2d_forward conv_depthwise2d conv_depthwise3d slow_conv3d slow_conv3d_forward""",
    "normalisation": """layer_norm batch_norm group_norm instance_norm rms_norm fused_rms_norm cudnn_batch_norm
        batch_norm_impl_index batch_norm_no_update batch_norm_with_update batch_norm_legit
        batch_norm_legit_no_training local_response_norm""",
    "reduction": """softmax log_softmax safe_softmax sum mean amax amin max min argmax argmin prod cumsum var var_mean
        std std_mean norm linalg_vector_norm logsumexp adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
        avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool2d_with_indices adaptive_max_pool2d
        mkldnn_adaptive_avg_pool2d any all nll_loss nll_loss_nd nll_loss_forward cross_entropy_loss count_nonzero topk
        sort amp_foreach_non_finite_check_and_unscale""",
    "elementwise": """add sub rsub mul div true_divide silu gelu relu relu6 sigmoid log_sigmoid tanh exp expm1 log log1p
        log2 sqrt rsqrt pow square erf erfc neg abs clamp clamp_min clamp_max clip where masked_fill threshold
        hardswish hardtanh hardsigmoid elu selu celu leaky_relu prelu softplus softsign mish glu dropout
        fused_dropout alpha_dropout feature_dropout bernoulli eq ne lt gt ge le logical_and logical_or logical_not
        logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ floor ceil round trunc floor_divide
        remainder fmod reciprocal sign sgn lerp addcmul addcdiv cos sin tan atan2 acos asin cosh sinh maximum minimum
        isnan isinf isfinite isposinf isneginf nan_to_num tril triu masked_fill_ normalize fused_adamw fused_adam
        fused_sgd upsample_nearest2d upsample_bilinear2d upsample_bicubic2d upsample_bilinear2d_aa
        upsample_bicubic2d_aa grid_sampler grid_sampler_2d amp_update_scale""",
    "cast": "to to_copy type_as float half bfloat16 double int long bool _to_copy",
    "layout": """copy clone contiguous cat concat concatenate stack hstack vstack index index_select index_put
        index_put_impl index_add index_copy gather scatter scatter_add roll pad constant_pad_nd reflection_pad2d
        replication_pad2d flip repeat repeat_interleave tile im2col col2im unfold pixel_shuffle pixel_unshuffle
        channel_shuffle embedding masked_select masked_scatter nonzero one_hot slice select unfold_backward
        take take_along_dim as_strided_scatter slice_scatter select_scatter""",
    "creation": """empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like
        new_ones full full_like new_full arange linspace scalar_tensor eye fill zero rand randn rand_like randn_like
        randint uniform normal random resize resize_ lift_fresh lift_fresh_copy tensor set meshgrid""",
    "view": """view reshape flatten unflatten permute transpose t mT mH numpy_T movedim swapaxes squeeze unsqueeze
        expand expand_as view_as unbind
        split split_with_sizes chunk tensor_split narrow as_strided detach alias diagonal
        unsafe_view unsafe_split reshape_alias size Int ScalarImplicit item local_scalar_dense is_nonzero dim
        broadcast_to broadcast_tensors ravel view_as_real view_as_complex conj resolve_conj resolve_neg requires_grad
        result_type promote_types data numel stride is_floating_point device dtype
        atleast_1d atleast_2d is_same_size lift sym_size sym_stride sym_numel sym_storage_offset storage_offset
        is_pinned output_nr version nnpack_available""",
}
_KIND_OF = {operator: kind for kind, operators in _OPERATORS.items() for operator in operators.split()}

# the spellings of one operator: in place, fused over lists, native, the backward pass
_PREFIXES = ("_foreach_", "_thnn_fused_", "native_", "_native_", "_fused_", "_")
_SUFFIXES = ("_backward_data", "_backward", "_")


def operator_kind(name: str) -> str | None:
    """The kind of an aten operator, in any of its spellings.

    A slice, a select or a view moves nothing by itself ("view"); where a copy follows, it is an operator of its own.
    The backward pass of an operator has the kind of the operator.

    Args:
        name: as a tracer, a dispatcher or a profiler spells it: `aten::silu_`, `native_layer_norm_backward`.

    Returns:
        One of `KINDS`, or None for an operator that is not in the table.
    """
    namespace, _, base = name.rpartition("::")
    if namespace not in ("", "aten"):
        return None
    base = base.partition(".")[0]
    if base.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")):
        return "matmul"
    for candidate in _spellings(base):
        if candidate in _KIND_OF:
            return _KIND_OF[candidate]
    return None


def _spellings(base: str) -> list[str]:
    spellings = [base]
    for suffix in _SUFFIXES:
        spellings += [s.removesuffix(suffix) for s in spellings if s.endswith(suffix)]
    for prefix in _PREFIXES:
        spellings += [s.removeprefix(prefix) for s in spellings if s.startswith(prefix)]
    return spellings
