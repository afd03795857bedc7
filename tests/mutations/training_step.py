"""Training: the step, its data, its batch size, the scaling of the optimizer, and the gates."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS: list[Mutation] = [
    # The ballot ----------------------------------------------------------------------------
    Mutation(
        promise="the votes of one that has left are counted for nobody else",
        path="training/ballot.py",
        old="            if voter in self._voters:\n                voter.counted(said)",
        new="            voter.counted(said)",
        test="tests/training/test_ballot.py::"
        "test_who_leaves_or_joins_in_a_step_does_not_change_what_the_others_are_told",
    ),
    Mutation(
        promise="a ballot is counted once",
        path="training/ballot.py",
        old="told, self._cast = self._told(), []",
        new="told = self._told()",
        test="tests/training/test_ballot.py::test_a_step_without_a_ballot_tells_nobody",
    ),
    Mutation(
        promise="replicas that divide by different weights are refused",
        path="core/step.py",
        old="apart = abs(sums.divisor - replicas * own.divisor) > 1e-9 * abs(sums.divisor)",
        new="apart = own.divisor > sums.divisor",
        test="tests/training/test_ballot.py::test_replicas_that_do_not_make_the_same_step_are_told",
    ),
    Mutation(
        promise="replicas that vote on different things are told",
        path="training/ballot.py",
        old="head.voters != replicas * self._head.voters",
        new="head.voters < 0",
        test="tests/training/test_ballot.py::test_replicas_that_vote_on_different_things_are_told",
    ),
    Mutation(
        promise="a warning names the line of the script",
        path="core/_warn.py",
        old="    while _package(frame) in _BETWEEN and",
        new="    while _package(frame) == 'contextlib' and",
        test="tests/training/test_parallel.py::"
        "test_a_warning_is_shown_for_each_place_in_the_script",
    ),
    # The life of a step --------------------------------------------------------------------
    Mutation(
        promise="the cursor stays until the step is committed",
        path="training/passes.py",
        old="        planned.steps = job.clock.steps\n",
        new="        self.cursor.position = span.stop\n",
        test="tests/training/test_parallel.py::"
        "test_an_optimizer_that_raises_keeps_its_own_values_and_commits_nothing",
    ),
    Mutation(
        promise="the cursor moves with the commit and not later",
        path="training/step.py",
        old="        job.iterations.commit(timeline.clock.progress - before.progress)\n",
        new="",
        test="tests/training/test_lifecycle.py::test_a_failed_step_moves_nothing",
    ),
    Mutation(
        promise="a step that a scaler skips moves no clock",
        path="training/step.py",
        old="        elif outcome is Outcome.SKIPPED:\n"
        "            self._end_step(outcome, measured=False)\n",
        new="",
        test="tests/training/test_parallel.py::test_an_overflow_is_skipped_and_not_counted",
    ),
    Mutation(
        promise="a step that a scaler skips counts as not measured",
        path="training/step.py",
        old="self._end_step(outcome, measured=False)",
        new="self._end_step(outcome, measured=self.step.measure)",
        test="tests/training/test_parallel.py::test_an_overflow_is_skipped_and_not_counted",
    ),
    Mutation(
        promise="a step of zipped loaders begins once",
        path="training/step.py",
        old="    if not begins:\n",
        new="    if not begins and job.trained is None:\n",
        test="tests/training/test_lifecycle.py::test_of_zipped_loaders_one_begins_the_step",
    ),
    Mutation(
        promise="of zipped loaders one ends the step",
        path="training/step.py",
        old="    if ends_step:\n",
        new="    if asked_by is not None or ends_step:\n",
        test="tests/training/test_lifecycle.py::test_of_zipped_loaders_one_begins_the_step",
    ),
    Mutation(
        promise="a model whose registration is refused takes its hooks off",
        path="training/parallel.py",
        old="        except BaseException:\n            self.release()\n            raise\n",
        new="        except BaseException:\n            raise\n",
        test="tests/training/test_parallel.py::test_a_model_that_is_refused_leaves_nothing_behind",
    ),
    Mutation(
        promise="a gated optimizer is refused before hooks are set",
        path="training/parallel.py",
        old="            check_optimizer(each)\n",
        new="            pass\n",
        test="tests/training/test_parallel.py::test_a_model_that_is_refused_leaves_nothing_behind",
    ),
    Mutation(
        promise="what a script has frozen stays so",
        path="training/gates/scheduler.py",
        old="        gc.freeze()  # as the script wants it\n",
        new="",
        test="tests/training/gates/test_scheduler.py::test_a_scheduler_that_was_frozen_is_found",
    ),
    Mutation(
        promise="a scheduler that does not wait is refused",
        path="training/gates/scheduler.py",
        old="            gate.require(scheduler)\n",
        new="            pass\n",
        test="tests/training/gates/test_scheduler.py::test_a_scheduler_that_was_frozen_is_found",
    ),
    Mutation(
        promise="an Accumulator keeps to its job",
        path="training/script/accumulator.py",
        old="        live = self._job.live\n        if live is not None and not any(",
        new="        live = current_job().live\n        if live is not None and not any(",
        test="tests/training/script/test_accumulator.py::"
        "test_sums_stay_with_the_job_that_they_were_made_in",
    ),
    Mutation(
        promise="replicas that differ are refused before the step changes anything",
        path="training/step.py",
        old="        self._check.check(self._ballot.said_to(self._check))\n",
        new="",
        test="tests/training/state/test_divergence.py::"
        "test_one_ulp_of_one_parameter_is_noticed_and_named",
    ),
    Mutation(
        promise="the engine is asked before the optimizer steps",
        path="training/step.py",
        old="        if not job.engine.all_committed():\n",
        new="        own()\n        if not job.engine.all_committed():\n",
        test="tests/training/test_lifecycle.py::test_a_failed_step_moves_nothing",
    ),
    Mutation(
        promise="a failed step leaves what is known of the noise as it was",
        path="training/scaling/factors.py",
        old="        averages = self.estimates.averages.after(",
        new="        averages = self.estimates.averages = self.estimates.averages.after(",
        test="tests/training/test_lifecycle.py::"
        "test_a_failed_step_is_issued_again_and_the_run_is_the_one_without_it",
    ),
    Mutation(
        promise="a scheduler does not count a step that failed",
        path="training/gates/scheduler.py",
        old="for step in () if given_up else held.values():",
        new="for step in held.values():",
        test="tests/training/test_lifecycle.py::test_a_failed_step_moves_nothing",
    ),
    Mutation(
        promise="a scaler does not count a step that failed",
        path="training/gates/scaler.py",
        old="            if steps.step.failed:\n",
        new="            if steps.step.failed and waited:\n",
        test="tests/training/test_lifecycle.py::"
        "test_a_failed_step_is_issued_again_and_the_run_is_the_one_without_it",
    ),
    Mutation(
        promise="tokens on the clock are the weights of the step",
        path="training/step.py",
        old="tokens=reduced.weight,",
        new="tokens=samples,",
        test="tests/training/test_loader.py::"
        "test_a_schedule_in_tokens_counts_those_that_the_model_was_told_of",
    ),
    # Data ----------------------------------------------------------------------------------
    Mutation(
        promise="all zipped loaders issue their part of a failed step again",
        path="training/data/iteration.py",
        old="parts = [each for each in self.training if each.handed_out_at == steps]",
        new="parts: list[Iteration] = []",
        test="tests/training/test_lifecycle.py::"
        "test_loaders_that_are_zipped_issue_their_parts_of_a_failed_step_again",
    ),
    Mutation(
        promise="an evaluation begins at the beginning of the data",
        path="training/data/indexed.py",
        old="position = cursor.position if moves else epoch * self.order.num_samples",
        new="position = cursor.position",
        test="tests/training/data/test_passes.py::"
        "test_evaluation_on_the_training_loader_moves_nothing",
    ),
    Mutation(
        promise="a short last batch has its full learning rate",
        path="training/passes.py",
        old="return step_scale(len(planned.span), planned.batch_size, reference)",
        new="return len(planned.span) / reference",
        test="tests/training/test_parallel.py::test_at_the_reference_batch_nothing_changes",
    ),
    Mutation(
        promise="positions are dealt anew from the cursor on where replicas have changed",
        path="training/data/cursor.py",
        old="self._dealt = Ownership(self.position, membership.num_replicas)",
        new="self._dealt = Ownership(0, membership.num_replicas)",
        test="tests/training/test_loader.py::"
        "test_each_replica_keeps_its_positions_at_the_same_number_of_replicas",
    ),
    Mutation(
        promise="survivors and joiners deal alike",
        path="training/data/cursor.py",
        old="if self._dealt_in != membership.generation and membership.reformed:",
        new="if self._dealt_in is None and membership.reformed:",
        test="tests/training/test_loader.py::test_survivors_and_joiners_of_a_generation_deal_alike",
    ),
    Mutation(
        promise="batches are joined in the order of the stream",
        path="training/data/tickets.py",
        old="joined = torch.cat((first, second))",
        new="joined = torch.cat((second, first))",
        test="tests/training/test_same_number.py::test_batches_are_joined_as_they_are_split",
    ),
    Mutation(
        promise="workers of each pass have the dataset as it is then",
        path="training/data/fetching.py",
        old="        if not self.persistent:\n",
        new="        if self.persistent is None:\n",
        test="tests/training/data/test_changing_data.py::"
        "test_workers_of_each_pass_use_the_dataset_as_it_is_then",
    ),
    Mutation(
        promise="what a collate function of the user has made is not cut",
        path="training/data/fetching.py",
        old="if ticket.num != missing and not self._resizes:",
        new="if ticket.num < 0 and not self._resizes:",
        test="tests/training/data/test_changing_data.py::"
        "test_what_a_collate_function_has_made_is_not_cut_or_joined",
    ),
    Mutation(
        promise="a dataset that has grown is used as long as it is",
        path="training/passes.py",
        old="        self._supply.renew(self.cursor)\n        self.take_part()\n",
        new="        self.take_part()\n",
        test="tests/training/data/test_passes.py::"
        "test_each_epoch_uses_the_dataset_as_long_as_it_is",
    ),
    Mutation(
        promise="epochs that are over stay over when their length changes",
        path="training/data/cursor.py",
        old="self.others += epochs * (before - steps_per_epoch)",
        new="self.others += 0 * (before - steps_per_epoch)",
        test="tests/training/data/test_passes.py::"
        "test_each_epoch_uses_the_dataset_as_long_as_it_is",
    ),
    Mutation(
        promise="progress before a loader began is not that of its epochs",
        path="training/passes.py",
        old="self.cursor.others = job.clock.progress  # all that was made before",
        new="self.cursor.others = 0.0",
        test="tests/training/data/test_passes.py::"
        "test_each_epoch_uses_the_dataset_as_long_as_it_is",
    ),
    Mutation(
        promise="a micro-batch with fewer rows than samples is refused",
        path="training/data/indexed.py",
        old="alone = len(sizes) == 1 and not used and self.mine.step == 1",
        new="alone = True",
        test="tests/training/data/test_changing_data.py::"
        "test_a_micro_batch_with_fewer_rows_than_samples_is_refused",
    ),
    Mutation(
        promise="another order in the middle of a pass is reported",
        path="training/passes.py",
        old="if cursor.position % num and (names := reordered(before, now)):",
        new="if cursor.position % num < 0 and (names := reordered(before, now)):",
        test="tests/training/data/test_changing_data.py::"
        "test_a_second_life_with_another_order_warns_in_the_middle_of_a_pass",
    ),
    Mutation(
        promise="a directory that all names share says nothing of their order",
        path="training/data/sampled.py",
        old="start = next(alike, len(low))",
        new="start = 0",
        test="tests/training/data/test_changing_data.py::"
        "test_other_contents_or_places_are_no_other_order",
    ),
    Mutation(
        promise="an attribute of a loader that has no effect cannot be set",
        path="training/loader.py",
        old='if name in SETTINGS and "_passes" in vars(self):',
        new='if name == "sampler" and "_passes" in vars(self):',
        test="tests/training/data/test_changing_data.py::"
        "test_what_has_no_effect_once_a_loader_is_made_cannot_be_set",
    ),
    Mutation(
        promise="a dataset that has changed is refused in the middle of an epoch",
        path="training/data/cursor.py",
        old="        if self._found is None and self._first:\n",
        new="        if self._found is None and not self._first:\n",
        test="tests/training/data/test_passes.py::"
        "test_a_changed_dataset_is_refused_in_the_middle_of_an_epoch",
    ),
    # Batches that are read ahead -----------------------------------------------------------
    Mutation(
        promise="a pass whose steps are left out ends with its data",
        path="training/passes.py",
        old=" and current.training and not current.passed\n",
        new=" and current.training\n",
        test="tests/training/data/test_reading.py::"
        "test_a_pass_of_forward_passes_alone_ends_with_its_data",
    ),
    Mutation(
        promise="loaders that zip reads ahead end together",
        path="training/passes.py",
        old="                        self._end_read_together(current, before)\n",
        new="                        pass\n",
        test="tests/training/data/test_reading.py::"
        "test_labels_may_come_from_another_loader_that_is_read_ahead",
    ),
    Mutation(
        promise="a step after its pass was left moves the cursor",
        path="training/data/iteration.py",
        old="trained = parts or self._in_step\n",
        new="trained = parts\n",
        test="tests/training/data/test_reading.py::test_a_step_may_come_after_its_pass_was_left",
    ),
    Mutation(
        promise="a batch that was left out is told from one that was read ahead",
        path="training/data/iteration.py",
        old="                for _ in range(max(known) if index is None else index):",
        new="                for _ in range(0):",
        test="tests/training/data/test_reading.py::"
        "test_batches_that_are_left_out_are_told_from_those_that_were_read_ahead",
    ),
    Mutation(
        promise="where data end is asked with the size of the step that would follow",
        path="training/passes.py",
        old="return self._supply.is_over(current, position, clock)",
        new="return self._supply.is_over(current, position)",
        test="tests/training/data/test_reading.py::"
        "test_a_remainder_is_dropped_by_the_size_of_its_step",
    ),
    Mutation(
        promise="a batch that was normalised is recognised",
        path="training/data/reading.py",
        old="(_same_memory, _same_numbers, _same_pattern) if copies",
        new="(_same_memory, _same_numbers) if copies",
        test="tests/training/data/test_reading.py::test_a_batch_that_was_normalised_is_recognised",
    ),
    Mutation(
        promise="several steps on one batch count once for the epoch",
        path="training/data/iteration.py",
        old="(gain if each.used else 0.0)",
        new="0.0",
        test="tests/training/data/test_reading.py::"
        "test_several_steps_on_one_batch_count_once_for_the_epoch",
    ),
    Mutation(
        promise="one loss over unequal parts of steps is refused",
        path="training/data/iteration.py",
        old="        if not (place and same):\n",
        new="        if not place:\n",
        test="tests/training/data/test_reading.py::"
        "test_one_loss_over_unequal_parts_of_steps_is_refused",
    ),
    Mutation(
        promise="what was prefetched is the step that begins, or is dropped",
        path="training/data/iteration.py",
        old="if (first.span, first.plan) == (planned.span, planned.plan):",
        new="if first.span.start == planned.span.start:",
        test="tests/training/data/test_reading.py::"
        "test_what_was_prefetched_is_dropped_where_the_loop_sets_another_size",
    ),
    Mutation(
        promise="what is queued after a prefetched batch runs after its copy",
        path="training/data/copier.py",
        old="                stream.wait_event(self._event)\n",
        new="",
        test="tests/training/test_host_reads.py::"
        "test_prefetched_batches_are_copied_beside_the_steps_before_theirs",
    ),
    Mutation(
        promise="a step is not repeated with batches that the loop has",
        path="training/loader.py",
        old=" or iteration.reading.ahead:\n",
        new=":\n",
        test="tests/training/data/test_reading.py::"
        "test_a_step_that_needs_too_much_memory_is_repeated_unless_the_loop_has_later_batches",
    ),
    # Batch sizes ---------------------------------------------------------------------------
    Mutation(
        promise="a step that ran out of memory is repeated from its first sample",
        path="training/data/planned.py",
        old="self.sizes = sizes\n        self.read = self._used = 0",
        new="self.sizes = sizes\n        self.read = 0",
        test="tests/training/sizing/test_autoscale.py::"
        "test_running_out_of_memory_repeats_the_step_in_smaller_pieces",
    ),
    Mutation(
        promise="bounds of an autoscaler keep within those of the loader",
        path="training/sizing/batch_size.py",
        old="local_bsz_bounds=(lower, min(upper, self._max_local_bsz))",
        new="local_bsz_bounds=(lower, upper)",
        test="tests/training/test_loader.py::"
        "test_autoscaling_keeps_to_the_largest_micro_batch_of_the_loader",
    ),
    Mutation(
        promise="random numbers of a sample depend on its position and not on the split",
        path="training/data/tickets.py",
        old="keys: list[int] = self.stream.keys(ticket.positions).tolist()",
        new="keys: list[int] = self.stream.keys(range(ticket.num)).tolist()",
        test="tests/training/state/test_randomness.py::"
        "test_random_numbers_of_samples_depend_on_their_positions_alone",
    ),
    Mutation(
        promise="a remainder of a stream is dropped if asked",
        path="training/data/shards/supply.py",
        old="if len(taken) < (batch_size if self._drops else 1):",
        new="if len(taken) < 1:",
        test="tests/training/data/test_streams.py::test_a_dropped_tail_is_dropped_once_for_all",
    ),
    Mutation(
        promise="an autoscaled batch keeps within the bounds of the present replicas",
        path="training/sizing/autoscale.py",
        old="return self._tuner.bounds.nearest(self._state.batch_size, replicas)",
        new="return self._tuner.bounds.nearest(self._state.batch_size, min(1, replicas))",
        test="tests/training/test_loader.py::test_autoscaling_stays_within_its_bounds",
    ),
    Mutation(
        promise="a micro-batch fits into the memory of every replica",
        path="training/sizing/memory_limit.py",
        old="self.limit = min(limits, default=None)",
        new="self.limit = max(limits, default=None)",
        test="tests/training/test_same_number.py::"
        "test_replicas_whose_memory_differs_split_steps_alike",
    ),
    Mutation(
        promise="what did not fit into memory is not tried again",
        path="training/sizing/memory_limit.py",
        old="self._ceiling = max(1, size // 2)",
        new="self._ceiling = size",
        test="tests/training/sizing/test_autoscale.py::test_room_follows_a_straight_line",
    ),
    Mutation(
        promise="a batch size that the loop has set survives a restart",
        path="training/sizing/batch_size.py",
        old="self._in_loop = self._wanted = kept.chosen",
        new="self._in_loop = kept.chosen",
        test="tests/training/sizing/test_batch_size_in_loop.py::"
        "test_a_number_that_the_loop_has_set_survives",
    ),
    Mutation(
        promise="a trace is read at the step that begins",
        path="training/sizing/batch_size.py",
        old="size = wanted.at(clock.steps)",
        new="size = wanted.at(clock.steps + 1)",
        test="tests/training/test_parallel.py::test_the_classic_accumulation_example",
    ),
    Mutation(
        promise="positions in tokens are refused where nothing counts tokens",
        path="training/sizing/batch_size.py",
        old="if not weighs and told is None:",
        new="if False:",
        test="tests/training/sizing/test_batch_schedule.py::"
        "test_tokens_that_nothing_counts_are_refused",
    ),
    Mutation(
        promise="one replica alone proposes the next size of a ramp",
        path="training/sizing/by_noise.py",
        old="""\
        if self._job.engine.membership.replica != 0:
            return (0.0,)
        bound =""",
        new="        bound =",
        test="tests/training/sizing/test_ramp.py::test_two_replicas_grow_at_the_same_step",
    ),
    Mutation(
        promise="a cap waits for some measurements of the noise",
        path="training/sizing/by_noise.py",
        old="if self._cap.phi is None and lower_noise_scale(self._job, CONFIDENCE) is None:",
        new="if self._cap.phi is None and noise.sqr_norm == 0:",
        test="tests/training/sizing/test_noise_cap.py::"
        "test_one_replica_takes_what_the_noise_allows_of_a_number",
    ),
    Mutation(
        promise="the bounds of the user go before the cap of the noise",
        path="training/sizing/batch_size.py",
        old="return self._bounds.nearest(size, self._job.engine.membership.num_replicas)",
        new="return size",
        test="tests/training/sizing/test_noise_cap.py::"
        "test_the_bounds_of_an_autoscaler_go_before_the_cap",
    ),
    Mutation(
        promise="a cap that nothing measures for is refused",
        path="training/sizing/batch_size.py",
        old="if isinstance(self._chooser, Ramping) or self._cap is not None:",
        new="if isinstance(self._chooser, Ramping):",
        test="tests/training/sizing/test_noise_cap.py::"
        "test_a_cap_that_nothing_measures_for_is_refused",
    ),
    Mutation(
        promise="who looks at the noise does not take it in",
        path="training/scaling/estimates.py",
        old="        return self.noise_in(self.averages.read())",
        new="        self.averages = self.averages.read()\n        return self.group_noise",
        test="tests/training/scaling/test_estimates.py::"
        "test_a_step_is_read_by_the_next_one_and_the_first_one_at_once",
    ),
    Mutation(
        promise="the loss scale does not reach the noise",
        path="training/scaling/estimates.py",
        old="self.gradient_scale.read()[0] ** -2",
        new="self.gradient_scale.read()[0] ** -1",
        test="tests/training/scaling/test_estimates.py::"
        "test_the_scale_of_gradients_does_not_reach_the_noise",
    ),
    Mutation(
        promise="noise that is not finite is left out",
        path="training/scaling/estimates.py",
        old="if not all(math.isfinite(s.sqr_norm) and math.isfinite(s.trace) for s in samples):",
        new="if all(math.isnan(s.sqr_norm) and math.isnan(s.trace) for s in samples):",
        test="tests/training/scaling/test_estimates.py::"
        "test_a_step_that_cannot_tell_counts_as_not_measured",
    ),
    Mutation(
        promise="samples of steps that were not measured are counted",
        path="training/scaling/estimates.py",
        old="return Averages(groups, unmeasured + weight)",
        new="return Averages(groups, weight)",
        test="tests/training/scaling/test_estimates.py::"
        "test_what_was_not_taken_in_yet_survives_in_the_state",
    ),
    Mutation(
        promise="noise is measured every so many steps",
        path="training/scaling/estimates.py",
        old="self._since + 1 >= self.interval",
        new="self._since >= self.interval",
        test="tests/training/scaling/test_estimates.py::test_the_schedule_of_measurements",
    ),
    Mutation(
        promise="a reference batch is run whole",
        path="training/scaling/estimates.py",
        old="if split_at is None or split_at > 1:",
        new="if split_at is None or split_at >= 1:",
        test="tests/training/scaling/test_reference.py::"
        "test_a_remainder_that_counts_as_one_reference_step_is_left_whole",
    ),
    Mutation(
        promise="two reference batches that differ are refused",
        path="training/scaling/reference.py",
        old="if self._batch_size not in (None, known.batch_size):",
        new="if self._batch_size is not None and self._batch_size < known.batch_size:",
        test="tests/training/test_parallel.py::test_settings_that_clash_are_errors",
    ),
    Mutation(
        promise="the noise is that of samples also where tokens are weighed",
        path="training/scaling/factors.py",
        old="reference = self.reference.weight(reduced.weight / samples)",
        new="reference = self.reference.weight(1.0)",
        test="tests/training/sizing/test_other_replicas.py::"
        "test_the_size_of_two_replicas_is_continued_by_one",
    ),
    Mutation(
        promise="clipping follows the gain of its own step",
        path="training/parallel.py",
        old="        gain = self._steps.prepare().scaled.gain\n",
        new="        gain = self.gain\n",
        test="tests/training/test_parallel.py::test_clip_grad_norm_waits_and_follows_its_policy",
    ),
    Mutation(
        promise="zero_grad waits while a gradient is accumulated",
        path="training/gates/optimizer.py",
        old="            if not gate._owner.gradient_waits(gate.number):\n"
        "                gate._zero_grad(",
        new="            if True:\n                gate._zero_grad(",
        test="tests/training/test_parallel.py::"
        "test_step_and_zero_grad_wait_for_the_last_micro_batch",
    ),
    Mutation(
        promise="accumulation in any loop has the mean of the gradients",
        path="training/gates/optimizer.py",
        old="        multiply_all(grads, 1 / self._steps)\n",
        new="",
        test="tests/training/test_small_parts.py::test_accumulate_averages_exactly",
    ),
    Mutation(
        promise="factors are taken back though the optimizer raises",
        path="training/gates/factors.py",
        old="        yield\n    finally:\n        loan.give_back()",
        new="        yield\n        loan.give_back()\n    finally:\n        pass",
        test="tests/training/gates/test_factors.py::test_what_a_failed_step_borrowed_is_given_back",
    ),
    Mutation(
        promise="a learning rate that groups share is multiplied once",
        path="training/gates/factors.py",
        old='            loan.multiply(first["lr"], multiple)',
        new="            for group, _ in sharing:\n"
        '                loan.multiply(group["lr"], multiple)',
        test="tests/training/gates/test_factors.py::"
        "test_groups_that_share_a_learning_rate_get_their_own_factors",
    ),
    Mutation(
        promise="weight decay is scaled only where it acts through the learning rate",
        path="training/gates/factors.py",
        old='decays = group.get("weight_decay") and known.decay == "decoupled"',
        new='decays = group.get("weight_decay")',
        test="tests/training/test_parallel.py::"
        "test_weight_decay_scales_only_where_it_acts_through_the_learning_rate",
    ),
    Mutation(
        promise="an optimizer that steps others keeps their state, or is refused",
        path="training/gates/others.py",
        old="if any(parameter not in whole.state for parameter in part.state):",
        new="if any(parameter in whole.state for parameter in part.state):",
        test="tests/training/gates/test_several.py::"
        "test_one_that_steps_others_has_to_keep_their_state",
    ),
    Mutation(
        promise="a class that is Muon and AdamW in one has a rule that serves both",
        path="training/scaling/choice.py",
        old="has_betas=any(name in g for g, name in betas)",
        new="has_betas=not any(name in g for g, name in betas)",
        test="tests/training/gates/test_describe.py::"
        "test_a_combined_class_has_groups_of_several_kinds",
    ),
    Mutation(
        promise="the gradient has its share where the momentum is Nesterov's",
        path="training/gates/factors.py",
        old='if "dampening" in group and not nesterov and _has_buffers(',
        new="if _has_buffers(",
        test="tests/training/gates/test_factors.py::"
        "test_under_a_constant_gradient_a_step_is_worth_its_reference_steps",
    ),
    Mutation(
        promise="a scheduler in the loop steps once per optimizer step",
        path="training/gates/scheduler.py",
        old="        if self._waits():\n            self._held",
        new="        if self._waits() and self._clocked is not None:\n            self._held",
        test="tests/training/gates/test_scheduler.py::"
        "test_a_call_for_any_micro_batch_counts_once_its_step_is_complete",
    ),
    Mutation(
        promise="a clock steps a scheduler for each reference step of a large batch",
        path="training/gates/scheduler.py",
        old="        while self._made < due:",
        new="        if self._made < due:",
        test="tests/training/test_parallel.py::test_a_clock_steps_a_per_step_scheduler",
    ),
    Mutation(
        promise="a schedule ends with the run though the last step overshoots",
        path="training/gates/scheduler.py",
        old="due = scheduler_steps(0.0, min(after, limit))",
        new="due = scheduler_steps(0.0, after)",
        test="tests/training/gates/test_scheduler.py::test_a_schedule_of_n_steps_ends_with_the_run",
    ),
    Mutation(
        promise="a scheduler that follows a metric is given to no clock",
        path="training/gates/scheduler.py",
        old="if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers):",
        new='if isinstance(schedulers[0], ReduceLROnPlateau) and schedule_by != "rule":',
        test="tests/training/test_parallel.py::test_schedulers_that_no_clock_can_step",
    ),
    Mutation(
        promise="a scaler that is disabled changes nothing",
        path="training/gates/scaler.py",
        old='return bool(frame.f_locals["self"].is_enabled())',
        new="return True",
        test="tests/training/test_parallel.py::test_a_disabled_scaler_is_no_matter",
    ),
    Mutation(
        promise="a second optimizer of the weights is refused",
        path="training/gates/others.py",
        old="if not self._parameters.isdisjoint(group[",
        new="if self._parameters.issubset(group[",
        test="tests/training/gates/test_others.py::"
        "test_a_second_optimizer_of_the_model_is_refused_before_it_steps",
    ),
    # What scripts do to the wrapper and its optimizer --------------------------------------
    Mutation(
        promise="a parameter group that comes after wrapping is refused at once",
        path="training/parallel.py",
        old='{"add_param_group": refuse}',
        new='{"add_group": refuse}',
        test="tests/training/test_parallel.py::test_a_parameter_group_that_comes_too_late_is_refused",
    ),
    Mutation(
        promise="a copy of the wrapper is in the mode of the original",
        path="training/parallel.py",
        old="return ModuleCopy, (self.module, self.training)",
        new="return ModuleCopy, (self.module, True)",
        test="tests/training/gradient/test_refusals.py::"
        "test_a_copy_is_a_plain_model_with_the_names_of_the_original[deepcopy]",
    ),
    Mutation(
        promise="settings of the optimizer that a script has changed are named",
        path="training/scaling/choice.py",
        old="if now[name] != was[name]",
        new="if now[name] is was[name]",
        test="tests/training/scaling/test_choice.py::"
        "test_settings_that_the_script_has_changed_are_named",
    ),
    Mutation(
        promise="the state of another optimizer is refused",
        path="training/scaling/choice.py",
        old="if kind != former and (missing",
        new="if kind == former and (missing",
        test="tests/training/scaling/test_choice.py::"
        "test_a_job_that_resumes_with_another_rule_says_so[True]",
    ),
    Mutation(
        promise="a step of several optimizers is committed with the last of them",
        path="training/step.py",
        old="        if set(self.now.step.turns) >= set(self.due):\n            self._turns_over()",
        new="        if True:\n            self._turns_over()",
        test="tests/training/gates/test_several.py::test_the_run_is_that_of_plain_torch",
    ),
    Mutation(
        promise="the engine is asked once before the first of several optimizers",
        path="training/step.py",
        old="        if not self.now.step.made:\n            job.iterations.check_unused",
        new="        if True:\n            job.iterations.check_unused",
        test="tests/training/gates/test_several.py::test_a_step_that_fails_changes_neither_and_is_issued_again",
    ),
    Mutation(
        promise="an optimizer whose step failed waits with the others",
        path="training/step.py",
        old="if step.stopped or (step.failed and step.part is None):",
        new="if step.stopped:",
        test="tests/training/gates/test_several.py::test_a_step_that_fails_changes_neither_and_is_issued_again",
    ),
    Mutation(
        promise="each of several optimizers has the factors of its own groups",
        path="training/step.py",
        old="prepared.scaled.factors[self._groups[number]]",
        new="prepared.scaled.factors[: len(self.optimizers[number].param_groups)]",
        test="tests/training/gates/test_several.py::test_each_has_a_rule_and_each_group_its_factors",
    ),
    Mutation(
        promise="an error between two optimizers does not pass for a step",
        path="training/step.py",
        old="        self.now.step = self.now.step.without_turns()\n",
        new="        self.now.step = made\n",
        test="tests/training/gates/test_several.py::test_an_error_in_the_second_does_not_pass_for_a_step",
    ),
    Mutation(
        promise="an optimizer that has stepped may be zeroed before the others step",
        path="training/step.py",
        old="            if number in step.turns:\n                return False\n",
        new="            if number in step.turns:\n                return True\n",
        test="tests/training/gates/test_several.py::test_the_run_is_that_of_plain_torch",
    ),
    Mutation(
        promise="what was used of a gradient may be zeroed before the rest is unscaled",
        path="training/step.py",
        old="            # The loop may zero what was used.\n"
        "            self.gradient.seals.open()\n",
        new="            pass\n",
        test="tests/training/gates/test_several.py::test_a_scaler_skips_each_by_its_own_gradient",
    ),
    Mutation(
        promise="the state of all optimizers survives",
        path="training/parallel.py",
        old="            parts[f\"optimizer{number or ''}\"] = optimizer\n",
        new='            parts["optimizer"] = optimizer\n',
        test="tests/training/gates/test_several.py::test_a_job_that_resumes_has_the_state_of_all_of_them",
    ),
    Mutation(
        promise="optimizers that step together have one clock",
        path="training/scaling/choice.py",
        old="        if own.clock != first.clock:\n",
        new="        if False:\n",
        test="tests/training/gates/test_several.py::test_rules_that_do_not_fit_are_refused",
    ),
    Mutation(
        promise="a player that rests is not stepped",
        path="training/step.py",
        old="if number is not None and number not in self.due:\n            raise",
        new="if False:\n            raise",
        test="tests/training/gates/test_several.py::test_one_whose_turn_it_is_not_is_refused",
    ),
    Mutation(
        promise="a momentum that is a mean has no factor on the gradient",
        path="training/gates/factors.py",
        old='    if known.momentum == "mean":\n',
        new="    if False:\n",
        test="tests/training/gates/test_describe.py::test_muon_of_torch_remembers_as_long_and_decays_as_much",
    ),
    Mutation(
        promise="a momentum that nobody knows is refused",
        path="training/scaling/choice.py",
        old="            if known.momentum is None:\n                return False\n",
        new="            if False:\n                return False\n",
        test="tests/training/gates/test_describe.py::test_a_class_is_described_once_for_its_subclasses_too",
    ),
    Mutation(
        promise="a weight decay that nobody knows is warned of",
        path="training/scaling/choice.py",
        old="    _warn_of_decay(chosen, optimizer)\n",
        new="",
        test="tests/training/gates/test_describe.py::test_a_decay_that_nobody_knows_is_warned_of_with_both_names",
    ),
]
