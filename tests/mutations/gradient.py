"""Gradient: the exact mean over replicas, its norms, and what loops may not do to it."""

from __future__ import annotations

from tests.mutations import Mutation

_REDUCER = "tests/training/gradient/test_reducer.py"
_BUCKETS = "tests/training/gradient/test_buckets.py"
_REPLICAS = "tests/training/gradient/test_replicas.py"
_REFUSALS = "tests/training/gradient/test_refusals.py"
_HOOKS = "tests/training/gradient/test_parameter_hooks.py"
_NORMS = "tests/training/gradient/test_norms.py"
_FSDP_LOOPS = "tests/training/gradient/test_fsdp_loops.py"

MUTATIONS: list[Mutation] = [
    # Accumulation --------------------------------------------------------------------------
    Mutation(
        promise="every micro-batch counts by its samples",
        path="training/gradient/accumulation.py",
        old="self._parameters.scale_grads(self._unit / weight)",
        new="self._parameters.scale_grads(weight / self._unit)",
        test=f"{_REFUSALS}::test_losses_that_a_loop_keeps_alive_do_not_weigh_later_micro_batches",
    ),
    Mutation(
        promise="a small weight after a large one does not overflow",
        path="training/gradient/accumulation.py",
        old="elif self._unit > self._widest * weight:",
        new="elif self._unit and weight > self._widest * self._unit:",
        test=f"{_REFUSALS}::test_weights_of_any_size_do_not_overflow[weights0-dtype0]",
    ),
    Mutation(
        promise="what is of the step before is not put aside for this one",
        path="training/gradient/accumulation.py",
        old="        if not self._unit:\n",
        new="        if self._unit is None:\n",
        test=f"{_REDUCER}::test_a_gradient_that_is_zeroed_after_the_call_does_not_come_back"
        "[weights0-True-1-ddp]",
    ),
    Mutation(
        promise="a parameter that only a micro-batch without weight used has a gradient for DDP",
        path="training/gradient/accumulation.py",
        old="        self._remove_grads()\n        for parameter",
        new="        self._parameters.clear_grads()\n        for parameter",
        test=f"{_REDUCER}::test_a_parameter_may_be_used_by_a_micro_batch_without_weight_alone[ddp]",
    ),
    Mutation(
        promise="what was put aside is added again",
        path="training/gradient/accumulation.py",
        old="parameter.grad = held[parameter].add_(grad) if parameter in held else grad",
        new="parameter.grad = grad",
        test=f"{_REDUCER}::test_two_backward_passes_of_a_micro_batch_count_by_its_weight"
        "[False-1-ddp]",
    ),
    Mutation(
        promise="a gradient that must not count may be infinite",
        path="training/gradient/accumulation.py",
        old="self._parameters.take_grads() if trained and self._share else {}",
        new="self._parameters.take_grads() if trained else {}",
        test="tests/training/test_exactness.py::test_token_losses[loader-1-ddp]",
    ),
    Mutation(
        promise="a parameter that only some micro-batches use has the mean in a measured step",
        path="training/gradient/local.py",
        old="old.mul_(1 - share)",
        new="old.mul_(share)",
        test="tests/training/test_exactness.py::test_mean_losses_float64[1-ddp]",
    ),
    # Replicas ------------------------------------------------------------------------------
    Mutation(
        promise="DDP's gradient is divided by the weight that was trained",
        path="training/gradient/ddp.py",
        old="correction = now.divisor / weight",
        new="correction = weight / now.divisor",
        test=f"{_REPLICAS}::test_the_mean_is_that_of_the_samples_that_were_trained[2-ddp]",
    ),
    Mutation(
        promise="the gradient of live replicas is divided by the weight that was trained",
        path="training/gradient/buckets.py",
        old="        self._model.parameters.scale_grads(correction)\n",
        new="",
        test=f"{_REPLICAS}::test_the_mean_is_that_of_the_samples_that_were_trained[3-buckets]",
    ),
    Mutation(
        promise="a bucket has each replica's part by its weight",
        path="training/gradient/ddp.py",
        old="buffer.mul_(self._sum.unit / self._now.divisor)",
        new="buffer.mul_(1 / dist.get_world_size(self.group))",
        test=f"{_REPLICAS}::test_the_mean_is_that_of_the_samples_that_were_trained[2-ddp]",
    ),
    Mutation(
        promise="only the last micro-batch of a replica synchronises",
        path="training/gradient/buckets.py",
        old="if part is None or not part.last or not step.trained",
        new="if part is None or not step.trained",
        test=f"{_REPLICAS}::test_the_mean_is_that_of_the_samples_that_were_trained[3-buckets]",
    ),
    Mutation(
        promise="a step that one replica leaves is made by none",
        path="training/gradient/gradient.py",
        old="if head.skips:",
        new="if head.skips > 1:",
        test=f"{_REPLICAS}::test_a_step_of_one_micro_batch_with_buffers_is_left_by_all[2-ddp]",
    ),
    Mutation(
        promise="a parameter that no replica used has no gradient",
        path="training/gradient/packs.py",
        old="            if used[index]:\n                self.parameters",
        new="            if index in self._unused:\n                self.parameters",
        test=f"{_BUCKETS}::test_what_nobody_used_has_no_gradient_and_what_some_used_has_the_mean"
        "[0.0-3-buckets]",
    ),
    Mutation(
        promise="a replica that joins does not overwrite the others",
        path="training/gradient/reducer.py",
        old="return 0 if first == num_replicas else int(first)",
        new="return 0",
        test=f"{_REDUCER}::test_a_replica_that_joins_does_not_overwrite_those_that_were_there"
        "[ddp-1]",
    ),
    Mutation(
        promise="memory that a lost reduction may write to is given up",
        path="training/gradient/buckets.py",
        old="given_up = now.lost is not None or (bool(now.sent) and not now.over)",
        new="given_up = now.lost is not None",
        test=f"{_BUCKETS}::test_memory_that_a_lost_reduction_may_write_to_is_not_used_again",
    ),
    Mutation(
        promise="buffers are those of the first replica",
        path="training/gradient/buckets.py",
        old="send(kept_alike(module.named_buffers(), module), 0, self.group",
        new="send(kept_alike(module.named_buffers(), module), self.group.size() - 1, self.group",
        test=f"{_BUCKETS}::test_buffers_are_those_of_replica_0_at_the_beginning_of_each_step"
        "[None-3-buckets]",
    ),
    # What others do to it ------------------------------------------------------------------
    Mutation(
        promise="a change of the gradient in place is seen",
        path="training/gradient/seal.py",
        old="if list(map(version_of, now)) != self._versions:",
        new="if len(now) != len(self._versions):",
        test=f"{_REFUSALS}::test_a_change_before_the_step_is_refused_with_and_without_accumulation"
        "[12-clip]",
    ),
    Mutation(
        promise="another tensor in the place of the gradient is seen",
        path="training/gradient/seal.py",
        old="or not all(map(operator.is_, now, self._grads)):",
        new="or not now:",
        test=f"{_REFUSALS}::test_a_change_before_the_step_is_refused_with_and_without_accumulation"
        "[12-replace_it]",
    ),
    Mutation(
        promise="a change through .data is seen",
        path="training/gradient/seal.py",
        old="contents=self._thorough)",
        new="contents=False)",
        test=f"{_REFUSALS}::test_a_change_before_the_step_is_refused_with_and_without_accumulation"
        "[12-write_data]",
    ),
    Mutation(
        promise="a gradient that nobody zeroed is refused",
        path="training/gradient/seal.py",
        old="used, self._used = self._used, None",
        new="used = self._used = None",
        test=f"{_REFUSALS}::test_a_gradient_that_nobody_zeroes_is_refused",
    ),
    Mutation(
        promise="a second backward pass through a step is refused",
        path="core/step.py",
        old="self.backwards > 1 and self.part and self.part.last",
        new="self.backwards > 1 and self.part and not self.part.last",
        test="tests/training/test_parallel.py::test_stepping_without_a_backward_pass_is_refused",
    ),
    Mutation(
        promise="zero_grad waits for the whole step",
        path="training/step.py",
        old="            self.leave_step()\n        return self.now.step.pending",
        new="            self.leave_step()\n        return self.now.step.complete",
        test=f"{_REFUSALS}::test_zero_grad_of_anything_waits[model-after step]",
    ),
    Mutation(
        promise="freezing in the middle of a step is refused",
        path="training/gradient/parameters.py",
        old="pairs if new != old]",
        new="pairs if new and not old]",
        test=f"{_REFUSALS}::test_freezing_in_the_middle_of_a_step_is_refused",
    ),
    # Norms ---------------------------------------------------------------------------------
    Mutation(
        promise="squares of half precision gradients do not overflow",
        path="training/gradient/norms.py",
        old="tensor.reshape(-1).float() if tensor.dtype in _HALF else tensor.reshape(-1)",
        new="tensor.reshape(-1)",
        test=f"{_NORMS}::test_norms_do_not_overflow[dtype0]",
    ),
    Mutation(
        promise="parameters outside the optimizer do not count in the noise",
        path="training/gradient/norms.py",
        old="self.num_groups == 1 and all(p in self._group for p in trained)",
        new="self.num_groups == 1",
        test=f"{_NORMS}::test_parameters_outside_the_optimizer_do_not_count",
    ),
    Mutation(
        promise="the norm of the mean gradient counts once, not per replica",
        path="training/gradient/reducer.py",
        old="if not divided and dist.get_rank(group) > 0:",
        new="if divided and dist.get_rank(group) > 0:",
        test=f"{_NORMS}::test_the_gain_agrees_with_per_sample_gradients[2-ddp-SGD]",
    ),
    Mutation(
        promise="a micro-batch's norm counts by its weight",
        path="training/gradient/local.py",
        old="term = weight * self._model",
        new="term = self._model",
        test=f"{_NORMS}::test_the_gain_agrees_with_per_sample_gradients[1-ddp-SGD]",
    ),
    Mutation(
        promise="the norm of a guessed mean is corrected with it",
        path="training/gradient/buckets.py",
        old="means * correction**2",
        new="means * correction",
        test=f"{_REDUCER}"
        "::test_the_noise_does_not_depend_on_a_guess_of_the_weight_nor_on_an_idle_replica[buckets]",
    ),
    Mutation(
        promise="an idle replica has no gradient that was measured",
        path="training/gradient/ddp.py",
        old="num_gradients=int(self._exchange.step.own_weight > 0)",
        new="num_gradients=1",
        test=f"{_REDUCER}"
        "::test_the_noise_does_not_depend_on_a_guess_of_the_weight_nor_on_an_idle_replica[ddp]",
    ),
    # Sharded -------------------------------------------------------------------------------
    Mutation(
        promise="a sharded gradient is divided by the weight that was trained",
        path="training/gradient/fsdp.py",
        old="model.parameters.scale_grads(self._divide_by() / weight)",
        new="model.parameters.scale_grads(1.0)",
        test=f"{_FSDP_LOOPS}::test_backward_passes_that_one_replica_leaves_out[fsdp]",
    ),
    Mutation(
        promise="unsharded parameters of a sharded model add up their micro-batches",
        path="training/gradient/unsharded.py",
        old="self._sums[parameter] = grad if known is None else known.add_(grad)",
        new="self._sums[parameter] = grad",
        test=f"{_FSDP_LOOPS}::test_backward_passes_that_one_replica_leaves_out[fsdp]",
    ),
    Mutation(
        promise="a released sharded model averages over processes again",
        path="training/gradient/fsdp.py",
        old="scatter.unit.modules[0].set_gradient_divide_factor(None)",
        new="scatter.unit.modules[0].set_gradient_divide_factor(1.0)",
        test=f"{_FSDP_LOOPS}::test_freezing_leaving_a_step_and_release",
    ),
    Mutation(
        promise="what has copies counts once in the norm of a sharded gradient",
        path="training/gradient/clipping.py",
        old="shares.append(1 / sharding.copies(parameter))",
        new="shares.append(1.0)",
        test="tests/training/gradient/test_fsdp.py::test_two_processes",
    ),
    # check_split ---------------------------------------------------------------------------
    Mutation(
        promise="pieces of a checked batch count by their weight",
        path="training/gradient/split_check.py",
        old="sum(grads[place] * (each / total) for grads, each in found)",
        new="sum(grads[place] / len(found) for grads, each in found)",
        test="tests/training/gradient/test_split_check.py::test_pieces_count_by_their_weight"
        "[model]",
    ),
    # Hooks and models ----------------------------------------------------------------------
    Mutation(
        promise="a hook on a parameter waits for the whole gradient",
        path="training/gradient/parameter_hooks.py",
        old="return self.own(tensor) if hooks is None or not hooks.wait else None",
        new="return self.own(tensor)",
        test=f"{_HOOKS}::test_a_hook_gets_the_gradient_of_the_batch_once[1-ddp]",
    ),
    Mutation(
        promise="a hook that steps a parameter is refused",
        path="training/gradient/parameter_hooks.py",
        old="if parameter.grad is None or version_of(parameter) != version:",
        new="if parameter.grad is None:",
        test=f"{_HOOKS}::test_a_step_within_the_backward_pass_is_refused[changed the value]",
    ),
    Mutation(
        promise="hooks of a released model are torch's again",
        path="training/gradient/parameter_hooks.py",
        old="hooks[key] = hook.own",
        new="hook.own = lambda tensor: None",
        test=f"{_HOOKS}::test_hooks_come_and_go_and_are_torchs_own_outside_of_steps",
    ),
    Mutation(
        promise="sparse gradients are averaged in a measured step",
        path="training/gradient/local.py",
        old="if p in mean and grads[p].layout is torch.strided]",
        new="if p in mean]",
        test=f"{_REFUSALS}::test_sparse_gradients_may_be_accumulated_and_measured",
    ),
    Mutation(
        promise="a model that was converted after it was wrapped is refused",
        path="training/gradient/parameters.py",
        old="if dtypes != self._dtypes:",
        new="if len(dtypes) != len(self._dtypes):",
        test=f"{_REFUSALS}::test_a_model_that_is_converted_after_it_was_wrapped_is_refused",
    ),
    Mutation(
        promise="a backward pass that DDP does not reduce is refused",
        path="training/gradient/ddp.py",
        old="if not self._now.complete:",
        new="if not self._now.begun and self._now.complete:",
        test=f"{_REFUSALS}::test_a_pass_that_ddp_does_not_reduce_is_refused_by_name",
    ),
]
