"""Planted faults: each changes a copy of the source, and the cases of `make test` must catch it.

    python tests/faults.py                  # all of them, about half an hour
    python tests/faults.py ring scale       # faults whose names contain a word

A fault lists the test files that should fail. Only cases of `make test` are run, so an undetected fault shows a gap in
the quick tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
QUICK = "not matrix and not pod and not foreign"


class Fault(NamedTuple):
    """One wrong line."""

    name: str
    file: str
    """Below `meshpar/`."""
    old: str
    """Stands there once."""
    new: str
    tests: str
    """Files below `tests/`, with `-k` words behind them where few cases are about it."""


FAULTS = (
    Fault("ranks of several axes in the mesh's order", "collectives/wire.py",
        "transpose([ordered.index(name) for name in names])", "transpose(range(len(names)))",
        "collectives/test_kernels.py -k order"),
    Fault("off by one in the ring", "collectives/ring.py",
        "(rank - stride * (T + 1)) % num_ranks), arrived", "(rank - stride * (T + 2)) % num_ranks), arrived",
        "collectives/test_kernels.py"),
    Fault("doubling has one step too many", "collectives/tree.py",
        "(rank, rank ^ apart)", "(rank, rank ^ (apart % 2))", "collectives/test_kernels.py"),
    Fault("a mask that sees the future", "collectives/attention.py",
        "jnp.where(mask, scores, jnp.finfo(scores.dtype).min)", "scores + 0 * mask",
        "collectives/test_attention.py"),
    Fault("the error bound is doubled", "collectives/quantized.py",
        "(gap if stochastic else gap / 2)", "(gap if stochastic else gap / 4)", "collectives/test_quantized.py"),
    Fault("loss and metrics are not summed", "training/gradients/per_device.py",
        "lax.psum((sums.loss, sums.metrics), axes)", "(sums.loss, sums.metrics)",
        "training/test_step.py training/gradients/test_zeropp.py"),
    Fault("the gradients of a group are dropped", "training/gradients/per_device.py",
        "g = lax.reduce(g, zero, lax.add, range(len(remaining)))", "g = g[(0,) * len(remaining)]",
        "training/test_once_across_groups.py"),
    Fault("the same random key for every micro-step", "training/accumulation.py",
        "jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))", "jnp.broadcast_to(key, (count,))",
        "training/test_step.py layers/test_losses.py -k random_keys or drawn"),
    # Losses and metrics of the parts of a batch.
    Fault("micro-steps without weight make metrics nan", "layers/losses.py",
        "jnp.where(weight > 0, x * share, 0)", "x * share", "layers/test_losses.py -k combine and mean"),
    Fault("metrics of micro-steps are not weighted", "layers/losses.py",
        "jnp.where(weight > 0, x * share, 0)", "jnp.where(weight > 0, x * (share / share), 0)",
        "layers/test_losses.py -k combine and mean"),
    Fault("weights are not summed over micro-steps", "layers/losses.py",
        "total = jax.vmap(weight_of)(rows, keys).sum()", "total = weight_of(part, keys[0]) * len(keys)",
        "layers/test_losses.py -k combine and micro"),
    Fault("weights are not summed over devices", "layers/losses.py",
        "lax.psum(total, tuple(axes)) if axes else total", "total * (num_parts // len(keys))",
        "training/gradients/test_zeropp.py -k zero_weight"),
    Fault("weights are not summed over microbatches", "pipeline/executor.py",
        ".normalized(self.functions.normalizer)", ".normalized()", "pipeline/test_executor.py -k weight"),
    Fault("a sum is divided by the number of parts", "layers/losses.py",
        "value = loss.total * num_parts\n", "value = loss.total\n", "layers/test_losses.py -k combine and sum"),
    Fault("scalar losses are accepted with micro-steps", "layers/losses.py",
        "if isinstance(out.loss, ScalarLoss):", "if False:", "layers/test_losses.py -k scalar"),
    Fault("a loss over pairs is evaluated on parts", "training/step.py",
        "check_parts(self.loss_fn, options, state, batch, divided)", "pass",
        "training/test_independence.py loop/test_verify.py -k refuse or pairs"),
    Fault("products of all pairs count as independent", "layers/example_values.py",
        'raise MixedExamplesError("it combines all pairs of examples")', "pass", "layers/test_example_flow.py"),
    Fault("a weight of the model's outputs is taken for parts", "layers/losses.py",
        "if any(reads[:num_args]):", "if False:", "layers/test_losses.py -k outputs"),
    Fault("updates without weight are applied", "training/step.py",
        "conditions = [metrics[LOSS_WEIGHT] > 0] if LOSS_WEIGHT in metrics else []", "conditions = []",
        "layers/test_losses.py -k leaves_the_state"),
    Fault("validation averages batches without their weights", "loop/fit.py",
        "weights = [metrics.get(LOSS_WEIGHT, 1.0) for metrics in results]", "weights = [1.0 for _ in results]",
        "loop/test_fit.py -k weights"),
    Fault("targets of -100 count", "models/token_loss.py",
        "return targets_BT != IGNORE_TARGET", "return targets_BT >= IGNORE_TARGET", "models/test_token_loss.py"),
    Fault("a target outside the vocabulary has a finite loss", "models/chunked_cross_entropy.py",
        "jnp.where(in_vocab_BT, self.nats_BT, jnp.nan)", "self.nats_BT",
        "models/test_token_loss.py models/test_chunked_cross_entropy.py"),
    Fault("the same random key in every step", "training/step.py",
        "jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)", "jax.random.wrap_key_data(state.key)",
        "training/test_step.py"),
    Fault("non-finite updates are applied", "training/step.py",
        "conditions.append(finite)", "conditions += []", "training/test_step.py"),
    Fault("micro-steps have examples of other devices", "parallel/batch.py",
        "jnp.moveaxis(by_device, 1, 0).reshape(", "by_device.reshape(", "training/test_step.py"),
    Fault("gradients reduced in the compute dtype", "layers/precision.py",
        "jnp.promote_types(compute, jnp.float32)", "jnp.dtype(compute)",
        "layers/test_precision.py training/test_step.py"),
    Fault("a damaged array is restored", "loop/checkpoint.py",
        "strict=True) if a != b]\n", "strict=True) if a != a]\n", "loop/test_checkpoint.py -k damage"),
    Fault("validation is left out", "loop/fit.py",
        "if run.step == run.steps or (self._every is not None", "if False and (self._every is not None",
        "loop/test_fit.py"),
    Fault("the first path rule wins", "sharding/rules.py",
        "for rule in reversed(self._by_path)", "for rule in self._by_path", "sharding/test_rules.py"),
    Fault("indivisible dims are accepted", "sharding/rules.py",
        "        if size % count:\n", "        if size % count < 0:\n",
        "sharding/test_rules.py sharding/test_mistakes.py"),
    Fault("large leaves are replicated silently", "training/sharding_table.py",
        "if decision.replicated_on_purpose or decision.shards > 1 or mesh.size == 1:", "if True:",
        "training/test_sharding_table.py parallel/test_strategies.py"),
    Fault("ZeRO-1 shards gradients", "parallel/zero.py",
        '"zero1": 1,', '"zero1": 2,', "parallel/test_strategies.py"),
    Fault("key and value heads are not sharded", "parallel/tensor.py",
        '("vocab", "heads", "kv_heads", "mlp")', '("vocab", "heads", "mlp")', "parallel/test_strategies.py"),
    Fault("an axis of size one is not reported", "parallel/strategy.py",
        "if sizes.get(need.axis, 1) == 1:", "if sizes.get(need.axis, 1) == 0:", "parallel/test_strategies.py"),
    Fault("one warm-up forward too few", "schedules/makers.py",
        "for i in range(microbatches)], stages - 1 - stage)", "for i in range(microbatches)], stages - 2 - stage)",
        "schedules/test_schedules.py"),
    Fault("messages take no time", "schedules/ticks.py",
        "end + (comm[stage] if comm and origin != stage else 0)", "end", "schedules/test_simulate.py"),
    Fault("a microbatch is lost", "pipeline/executor.py",
        "microbatch=schedule.table[..., 0],", "microbatch=np.minimum(schedule.table[..., 0], 1),",
        "pipeline/test_executor.py"),
    Fault("counts are divided by the microbatches", "layers/auxiliary.py",
        "x if is_counted(x) else x / jnp.asarray(total, x.dtype)", "x / jnp.asarray(total, x.dtype)",
        "layers/test_losses.py -k combine"),
    Fault("the balancing bias goes the wrong way", "moe/balance.py",
        "bias - rate * _sign_above_mean(loads)", "bias + rate * _sign_above_mean(loads)", "moe/test_balance.py"),
    Fault("the auxiliary loss is not scaled by the experts", "moe/balance.py",
        "return alpha * len(mean_scores) * (counts", "return alpha * (counts", "moe/test_balance.py"),
    Fault("tokens go to the wrong ranks", "moe/token_exchange.py",
        "return lax.all_to_all(buffers, link.axis, 0, 0)", "return buffers", "moe/test_dispatch.py"),
    Fault("buffers have twice the size", "moe/dispatch_paths.py",
        "rows // shape.num_ranks, shape", "rows // shape.num_ranks * 2, shape",
        "inspect/test_matching_moe.py -k formulas"),
    Fault("two additional all-to-alls in each direction", "moe/token_exchange.py",
        "    return lax.all_to_all(buffers, link.axis, 0, 0)",
        "    for _ in range(2):\n        buffers = lax.all_to_all(buffers, link.axis, 0, 0)\n"
        "    return lax.all_to_all(buffers, link.axis, 0, 0)", "inspect/test_matching_moe.py -k formulas"),
    Fault("gradients of experts are reduced over the expert axis", "moe/expert_reduction.py",
        "tiled=True) if axes else g\n    return (g,)",
        'tiled=True) if axes else g\n    return (varying(lax.psum(g, "expert"), ("expert",)),)',
        "inspect/test_matching_moe.py -k formulas"),
    Fault("a ring all-reduce in N steps", "hardware/cost_model.py",
        "return Cost(steps=2 * (num_ranks - 1), bytes_sent=sent, bytes_in_turn=sent, bytes_reduced=sent / 2)",
        "return Cost(steps=num_ranks, bytes_sent=sent, bytes_in_turn=sent, bytes_reduced=sent / 2)",
        "hardware/test_cost_model.py"),
    Fault("unexpected collectives are not reported", "inspect/matching.py",
        'unexpected=_unexpected(groups["unexpected"], expectations, pool.sizes, scopes_above),', "unexpected=(),",
        "inspect/test_expected.py -k planted"),
    Fault("kernel collectives without a traced message are not reported", "inspect/matching.py",
        "runs - kernel_runs + untraced", "runs - kernel_runs", "inspect/test_matching.py"),
    Fault("the loss of the token that was read", "models/token_loss.py",
        "TokenLosses(log_BT - target_BT, target_BT == 0,", "TokenLosses(log_BT, target_BT == 0,",
        "models/test_token_loss.py"),
    Fault("rotary embeddings rotate only half of the dims", "models/layers.py",
        "b_BTHF * cos_BT1F + a_BTHF * sin_BT1F", "b_BTHF * cos_BT1F", "models/test_layers.py"),
    # Gradients through regions with check_vma=False, where jax does not check types.
    Fault("unchecked: the gradient of a single device is used", "training/gradients/per_device.py",
        "g = lax.reduce(g, zero, lax.add, scattered)", "g = g[(0,) * len(scattered)]", "training/test_step.py -k once"),
    Fault("unchecked: gradients are scattered only inside a node", "training/gradients/zeropp.py",
        "(lax.psum(total, replica_axes) if replica_axes else total)", "total", "training/gradients/test_zeropp.py"),
    Fault("unchecked: gradients of routers are doubled", "moe/layer.py",
        "weights._replace(router=widened(weights.router))",
        "weights._replace(router=2 * widened(weights.router) - jax.lax.stop_gradient(widened(weights.router)))",
        "moe/test_layers.py models/test_moe.py"),
    Fault("batches are one step late", "data/batches.py",
        "first = step * self._batch_size", "first = max(step - 1, 0) * self._batch_size", "data/test_batches.py"),
    Fault("the window is one position too short", "collectives/attention.py",
        "(distance >= 0) & (distance < ring.window)", "(distance >= 0) & (distance < ring.window - 1)",
        "collectives/test_attention.py -k reaches_back"),
    Fault("fp8 weight gradients summed in the compute dtype", "layers/fp8_dot.py",
        "x.scale * dy.scale, reduce, None)", "x.scale * dy.scale, rhs.dtype, None)",
        "training/test_float8.py -k weight_gradients_have"),
    Fault("the same random key on all devices of a stage", "pipeline/gradients.py",
        "key = jax.random.fold_in(key, lax.axis_index(self.batch_axes))", "pass",
        "training/test_step.py -k random_key_of"),
    Fault("batch statistics are those of local examples", "training/gradients/selection.py",
        "setup.model.batch_stats(variables)", "setup.model.batch_stats({})",
        "training/test_step.py -k statistics"),
    Fault("state of the model is that of a single device", "training/gradients/per_device.py",
        "return lax.pmean(x, axes) if", "return x if", "training/test_step.py -k other_state"),
    # Later faults.
    Fault("8-bit matmuls use one of two scales", "layers/fp8_dot.py",
        "batch), x.scale * w.scale, rhs.dtype, sharding)", "batch), x.scale, rhs.dtype, sharding)",
        "training/test_float8.py"),
    Fault("ranks with other experts count as replicas of Muon", "optim/orthogonalized.py",
        "a not in axes | array.batch_axes)", "a not in axes)", "optim/test_orthogonalized.py -k distribution"),
    Fault("biases of experts decay", "optim/matrix_dims.py",
        'STACK_NAMES = ("layers", "dense_layers", "expert")', 'STACK_NAMES = ("layers", "dense_layers")',
        "optim/test_matrix_dims.py"),
    Fault("statistics over stacks are accepted", "optim/per_layer.py",
        "self.owners += owners", "owners = []", "optim/test_per_layer.py -k refuse"),
    Fault("parameters are rounded up", "optim/rounding.py",
        "jnp.uint32) + (bits >> 16)", "jnp.uint32) + 0xFFFF", "optim/test_rounding.py"),
    Fault("a step in flight is read", "training/earlier_steps.py",
        "> STEPS_IN_FLIGHT + 1", "> STEPS_IN_FLIGHT", "training/test_earlier_steps.py"),
    Fault("restored averages stay in float32", "loop/checkpoint.py",
        "(arrays[0] if len(arrays) == 1 else schedule_free_iterate(*arrays)).astype(dtype)",
        "arrays[0] if len(arrays) == 1 else schedule_free_iterate(*arrays)",
        "optim/test_averages.py -k dtype"),
    Fault("averages are of the last step", "optim/averages.py",
        "decay * a + (1 - decay) * p.astype(a.dtype)", "(1 - decay) * a + decay * p.astype(a.dtype)",
        "optim/test_averages.py"),
    Fault("alpha of adapters is ignored", "training/lora.py",
        "return self.alpha / self.rank", "return 1.0", "training/test_lora.py"),
    Fault("a part of a file's dim is read from its beginning", "interop/weight_mapping.py",
        "return DimPart(tuple(range(start, stop)), size)", "return DimPart(tuple(range(stop - start)), size)",
        "interop/test_hf.py interop/test_peft.py interop/test_published.py"),
    Fault("positions do not restart in each conversation", "data/chat.py",
        '"positions"][row, to] = np.arange(len(ids) - 1)',
        '"positions"][row, to] = np.arange(to.start, to.stop)', "data/test_chat.py"),
    Fault("sown values of Linen are kept after the call", "sharding/adapters/linen.py",
        "**_without(self.extra, self.info.sown)}", "**self.extra}", "sharding/test_adapters.py"),
    Fault("collectives on a link do not wait for each other", "inspect/timeline/simulator.py",
        "start_s = max(block.duration_s, *(block.free_s.get(link, 0.0) for link in links))",
        "start_s = block.duration_s", "inspect/timeline/test_simulator.py"),
    Fault("the product of adapters in bfloat16", "training/lora.py",
        "dtype, (a, b) = jnp.result_type(x, a), _like", "dtype, (a, b) = x.dtype, _like",
        "training/test_lora.py -k rounded_once"),
    Fault("merged adapters in bfloat16", "training/lora.py",
        "dtype = jnp.promote_types(kernel.dtype, jnp.float32)", "dtype = kernel.dtype",
        "training/test_lora.py -k rounded_once"),
    Fault("pairs of several blocks are written with alpha of the first", "interop/peft.py",
        "{name: lora.scale * rank for name, rank in ranks.items()}", "{name: lora.alpha for name in ranks}",
        "interop/test_peft.py -k wide_pair"),
    Fault("the end of YaRN's ramp rounded down", "models/layers.py",
        "np.ceil(at[1])] if", "np.floor(at[1])] if", "models/test_layers.py -k yarn"),
    Fault("each layer has the auxiliary loss of all layers", "interop/decoder.py",
        'coefficient * values["moe.routing.top_k"] / max(values["num_layers"], 1)',
        'coefficient * values["moe.routing.top_k"]', "interop/test_hf.py -k router"),
    # Faults that the quick tests had missed.
    Fault("skipped updates change variables of the model", "training/step.py",
        "(old, before_update, state.extra),", "(old, before_update, extra),", "training/test_step.py -k left_out"),
    Fault("evaluated scalars are not weighted by batch size", "training/step.py",
        "LOSS_WEIGHT: jnp.asarray(num_examples, jnp.int32)", "LOSS_WEIGHT: jnp.asarray(num_examples > 0, jnp.int32)",
        "training/test_step.py -k evaluated_scalar"),
    Fault("devices use a different key for weights of losses", "training/gradients/per_device.py",
        "keys = local_key[None] if count == 1 else micro_keys(local_key, count)",
        "keys = key[None] if count == 1 else micro_keys(local_key, count)",
        "layers/test_losses.py -k drawn"),
    Fault("micro-steps exchange keys for weights of losses", "training/gradients/xla.py",
        "loss = loss.over_parts(where, evaluate, (params, state.extra), micro_batches, keys, axes={})",
        "loss = loss.over_parts(where, evaluate, (params, state.extra), micro_batches, keys[::-1], axes={})",
        "layers/test_losses.py -k drawn"),
    Fault("gradient shards are summed in the parameters' dtype", "training/gradients/per_device.py",
        "masters = jax.tree.map(at_least_float32, setup.trained(params))", "masters = setup.trained(params)",
        "training/gradients/test_zeropp.py -k bfloat16_parameters"),
    Fault("alpha of adapters of experts is ignored", "training/lora.py",
        "return Adapted(matrix, *pair_of(getattr(self, name + LORA_SUFFIX)), lora.scale)",
        "return Adapted(matrix, *pair_of(getattr(self, name + LORA_SUFFIX)), 1.0)",
        "training/test_lora.py -k adapters_of_experts"),
    Fault("adapters are restored with a larger alpha", "loop/checkpoint.py",
        "lora.alpha != stored:", "lora.alpha < stored:", "training/test_lora.py -k refuses_adapters"),
    Fault("tied embeddings have the gradient of a single stage", "pipeline/gradients.py",
        "if len(stages) > 1:", "if len(stages) > 2:", "pipeline/test_executor.py -k tied_embedding"),
    Fault("complex leaves of a stage have no gradient", "pipeline/split_backward.py",
        "self.is_smooth = [flag and jnp.issubdtype(leaf.dtype, jnp.inexact)",
        "self.is_smooth = [flag and jnp.issubdtype(leaf.dtype, jnp.floating)",
        "pipeline/test_split_backward.py -k complex"),
    Fault("capped scores without the slope of the cap", "collectives/attention.py",
        "d_scores = (weights * (d_weights - o[..., None]) * slope * ring.scale)",
        "d_scores = (weights * (d_weights - o[..., None]) * ring.scale)",
        "collectives/test_attention.py -k capped_scores"),
    Fault("all ranks round with the same random bits", "collectives/quantized.py",
        "return _exchange_and_sum(parts, axis, dtype, block, _rank_key(key, axis))",
        "return _exchange_and_sum(parts, axis, dtype, block, key)",
        "collectives/test_quantized.py -k independent_draws"),
    Fault("blocks of a group are rounded before they are summed", "moe/grouped.py",
        "jnp.where(block.is_first, jnp.zeros_like(total), total) + term",
        "jnp.where(block.is_first, jnp.zeros_like(total), total) + term.astype(out.dtype)",
        "moe/test_grouped.py -k blocks_of_a_group"),
    Fault("segments in the natural order, tokens in zigzag order", "models/context_attention.py",
        "segments_BT = reordered(segments_BT)", 'segments_BT = constrain(segments_BT, "batch", "seq")',
        "parallel/test_context_parallel.py -k prepare_reorders"),
    Fault("YaRN's factor of scores is left out", "models/latent_attention.py",
        "if cfg.rope_yarn is not None and cfg.rope_yarn.score_factor != 1:",
        "if cfg.rope_yarn is not None and cfg.rope_yarn.score_factor > 9:",
        "models/test_latent_attention.py -k yarn_scales"),
    Fault("float32 tensors are read as bfloat16", "interop/hf.py",
        "return jnp.dtype(jnp.result_type(*dtypes)).name", "return min(dtype.name for dtype in dtypes)",
        "interop/test_hf.py -k no_tensor_is_rounded"),
    Fault("the first precision rule wins", "sharding/rules.py",
        "return next((rule.value for rule in reversed(self.precision)",
        "return next((rule.value for rule in (self.precision)",
        "sharding/test_rules.py -k precision_rule"),
    Fault("the default epsilon of config.json is wrong", "interop/decoder.py",
        "norm_eps: float = 1e-6, tied", "norm_eps: float = 1e-5, tied",
        "interop/test_hf.py -k left_out"),
    Fault("window null is the default window", "interop/families/mistral.py",
        "return None if WINDOW.theirs in document else DEFAULT_WINDOW", "return DEFAULT_WINDOW",
        "interop/test_hf.py -k window_null"),
    Fault("skipped updates change the optimizer state", "training/step.py",
        "(old, before_update, state.extra),", "(old, opt_state, state.extra),", "training/test_step.py -k left_out"),
    Fault("stages use the key of a different chunk for weights", "pipeline/gradients.py",
        "lambda index: micro_key(key, index, last))", "lambda index: micro_key(key, index, 0 * last))",
        "layers/test_losses.py -k drawn"),
    Fault("integers of the state are those of a single device", "training/gradients/per_device.py",
        "return lax.pmean(x, axes) if jnp.issubdtype(x.dtype, jnp.floating) else lax.pmax(x, axes)",
        "return lax.pmean(x, axes) if jnp.issubdtype(x.dtype, jnp.floating) else lax.pmin(x, axes)",
        "training/test_step.py -k whole_numbers"),
    Fault("weights of adapters are restored with a different alpha", "loop/checkpoint.py",
        '        _check_alpha(run.get("lora_alpha"), setup, where)',
        '        None if weights_only else _check_alpha(run.get("lora_alpha"), setup, where)',
        "training/test_lora.py -k refuses_adapters"),
    Fault("gates are rounded in the backward pass", "moe/assignment_order.py",
        "weight = take(weights.reshape(-1), order.assignments).astype(dtype)[:, None]",
        "weight = take(weights.reshape(-1), order.assignments).astype(rows.dtype)[:, None]",
        "moe/test_assignment_order.py -k gates"),
    Fault("YaRN's factor of rotations is left out", "models/transformer.py",
        "if stretched is not None and stretched.rotated_factor != 1:",
        "if stretched is not None and stretched.rotated_factor > 9:",
        "models/test_transformer.py -k factor_of_rotations"),
    Fault("the default of tied embeddings in config.json is wrong", "interop/decoder.py",
        'tied: bool = False) ->',
        'tied: bool = True) ->',
        "interop/test_hf.py -k left_out"),
    Fault("the first inputs rule wins", "sharding/rules.py",
        "for rule in reversed(self.inputs)", "for rule in (self.inputs)", "sharding/test_rules.py -k inputs_rule"),
    Fault("the first activation rule wins", "sharding/activations.py",
        "reversed(context.rules.by_module)", "(context.rules.by_module)",
        "sharding/test_activations.py -k last_activation"),
    Fault("gradients of gates in bfloat16", "moe/assignment_order.py",
        "jnp.sum(grads * rows.astype(dtype), axis=1)", "jnp.sum(grads.astype(rows.dtype) * rows, axis=1)",
        "moe/test_assignment_order.py -k gates"),
    Fault("parameters are restored instead of averages", "loop/checkpoint.py",
        "_eval_sources(run, path) if weights_only", "[path] if weights_only", "optim/test_averages.py -k restored_as"),
    Fault("biases of experts are written in bfloat16", "interop/hf.py",
        "if not mapping.is_extra else jnp.dtype(np.float32)", "if True else jnp.dtype(np.float32)",
        "interop/test_hf.py -k biases_of"),
    Fault("gates are rounded in the forward pass", "moe/assignment_order.py",
        "weights.astype(dtype))[:, :, None] * terms", "weights.astype(rows.dtype))[:, :, None] * terms",
        "moe/test_assignment_order.py -k gates"),
    Fault("the dtype of a folder overrides the requested dtype", "interop/hf.py",
        "if self.dtype is None and self.files is not None and", "if self.files is not None and",
        "interop/test_hf.py -k biases_of"),
    # Padding and parts of a batch in routers.
    Fault("padding has experts", "moe/routing.py",
        "experts = jnp.where(mask[:, None], experts, num_experts)", "experts = experts + 0",
        "moe/test_routing.py -k padding"),
    Fault("experts choose padding", "moe/routing.py",
        "scores = jnp.where(mask, scores, -1)", "scores = jnp.where(mask, scores, 2)",
        "moe/test_routing.py -k padding"),
    Fault("scores of padding count in the auxiliary loss", "moe/balance.py",
        "axis=0, where=None if mask is None else mask[:, None])", "axis=0)", "moe/test_balance.py -k padding"),
    Fault("router losses are means over all positions", "moe/router_stats.py",
        'sums["num_tokens"] = jnp.sum(mask, dtype=jnp.int32)',
        'sums["num_tokens"] = jnp.sum(mask | True, dtype=jnp.int32)',
        "moe/test_layers.py -k padding"),
    Fault("router losses are means over slices", "layers/batch_slices.py",
        "if totals.sums is not None:", "if False:", "layers/test_batch_slices.py -k sums"),
    Fault("verify keeps the tokens in the padding", "loop/verify.py",
        'inputs = np.where(token_mask(batch), batch["inputs"], other)', 'inputs = batch["inputs"]',
        "loop/test_verify.py -k padding"),
    Fault("segment 0 is always padding", "models/token_loss.py",
        "return ~is_zero_BT | jnp.any(counts_BT & is_zero_BT, axis=-1, keepdims=True)", "return ~is_zero_BT",
        "models/test_token_loss.py -k mask"),
    Fault("sums of the router's scores are too wide", "moe/routing.py",
        "bits = jnp.finfo(values.dtype).nmant + 1 - (", "bits = jnp.finfo(values.dtype).nmant + 2 - (",
        "moe/test_routing.py -k almost_equal"),
)  # fmt: skip


def caught(fault: Fault) -> tuple[bool, str]:
    """Whether the tests fail with the fault in place, and their last line."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("meshpar", "tests", "recipes", "notebooks"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.glob("*.*"):
            shutil.copy(path, copy) if path.is_file() else None
        shutil.copy(ROOT / "Makefile", copy)
        source = copy / "meshpar" / fault.file
        text = source.read_text()
        assert text.count(fault.old) == 1, f"{fault.name}: {fault.file} holds it {text.count(fault.old)} times"
        source.write_text(text.replace(fault.old, fault.new))
        files, _, words = fault.tests.partition(" -k ")
        chosen = [f"tests/{file}" for file in files.split()] + (["-k", words] if words else [])
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", QUICK, *chosen],
            cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    last = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    # 1 is pytest's exit code for failed tests. Errors of the collection, and runs without tests, catch no fault.
    return done.returncode == 1, (last or done.stdout.splitlines() or [""])[-1]


def main(words: list[str]) -> int:
    """Plant each fault whose name contains a word. Return 1 if the tests do not catch a fault."""
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    missed = 0
    for fault in chosen:
        is_caught, line = caught(fault)
        missed += not is_caught
        print(f"{'caught ' if is_caught else 'MISSED '} {fault.name}: {line[:160]}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
