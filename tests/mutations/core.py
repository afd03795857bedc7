"""Core: the plan, the stream, noise, rules and the protocol of a job."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS: list[Mutation] = [
    # The plan ------------------------------------------------------------------------------
    Mutation(
        promise="no micro-batch is larger than the maximum",
        path="core/plan.py",
        old="max(1, _ceil_div(share, self.max_local_bsz))",
        new="max(1, share // self.max_local_bsz)",
        test="tests/core/test_plan.py::test_300_over_64_does_not_exceed_the_maximum",
    ),
    Mutation(
        promise="shares of replicas add up to the batch",
        path="core/plan.py",
        old="return share + (replica < extra)",
        new="return share + (replica <= extra)",
        test="tests/core/test_plan.py::test_more_replicas_than_samples_leaves_some_without",
    ),
    Mutation(
        promise="filler batches come before those with samples",
        path="core/plan.py",
        old="if size else (0,) * whole + (1,) * extra",
        new="if size else (1,) * extra + (0,) * whole",
        test="tests/core/test_plan.py::"
        "test_a_replica_with_fewer_samples_than_micro_batches_runs_fillers_first",
    ),
    Mutation(
        promise="all replicas run the same number of micro-batches",
        path="core/plan.py",
        old="""\
        size, extra = divmod(self.share(replica), self._steps)
        whole = self._steps - extra
""",
        new="""\
        steps = self._steps_for(self.share(replica))
        size, extra = divmod(self.share(replica), steps)
        whole = steps - extra
""",
        test="tests/core/test_plan.py::"
        "test_replicas_of_unequal_shares_run_the_same_number_of_micro_batches",
    ),
    Mutation(
        promise="no micro-batch is smaller than the minimum",
        path="core/plan.py",
        old="smallest = share // self._steps",
        new="smallest = share",
        test="tests/core/test_plan.py::test_bounds_leave_holes_when_they_are_narrow",
    ),
    Mutation(
        promise="the nearest batch has the smallest micro-batch on each replica",
        path="core/plan.py",
        old="size = max(size, lower * replicas)",
        new="size = max(size, lower)",
        test="tests/training/sizing/test_autoscale.py::test_the_nearest_allowed_size",
    ),
    # The stream ----------------------------------------------------------------------------
    Mutation(
        promise="a dropped tail is skipped and does not reach into the next epoch",
        path="core/stream.py",
        old="return range(cursor + left, cursor + left + batch_size)",
        new="return range(cursor, cursor + batch_size)",
        test="tests/core/test_stream.py::test_epoch_tails",
    ),
    Mutation(
        promise="who owns a position does not depend on the batch size",
        path="core/stream.py",
        old="return (replica - (cursor - self.base)) % self.replicas",
        new="return (replica + (cursor - self.base)) % self.replicas",
        test="tests/core/test_stream.py::test_ownership_is_a_partition_that_ignores_the_batch_size",
    ),
    Mutation(
        promise="each epoch has an order of its own",
        path="core/stream.py",
        old="return _table(self.seed, epoch, self.num_samples)[offsets]",
        new="return _table(self.seed, 0, self.num_samples)[offsets]",
        test="tests/core/test_stream.py::test_seeds_and_epochs_give_different_orders",
    ),
    Mutation(
        promise="a cursor of other data is refused",
        path="core/stream.py",
        old="""\
            "fingerprint": self.fingerprint,
""",
        new="",
        test="tests/core/test_stream.py::test_a_cursor_of_another_stream_is_refused",
    ),
    # The clock -----------------------------------------------------------------------------
    Mutation(
        promise="a short last batch is a whole step of the reference run",
        path="core/clock.py",
        old="float(-(-actual // reference))",
        new="actual / reference",
        test="tests/core/test_clock.py::test_a_short_last_batch_has_at_most_the_planned_scale",
    ),
    Mutation(
        promise="rounding of gains loses no step of a scheduler",
        path="core/clock.py",
        old="return math.floor(after + _ROUNDING) - math.floor(before + _ROUNDING)",
        new="return math.floor(after) - math.floor(before)",
        test="tests/core/test_clock.py::"
        "test_a_shrunk_batch_steps_the_scheduler_seldom_and_rounding_loses_no_step",
    ),
    Mutation(
        promise="a budget in samples is not exceeded",
        path="core/clock.py",
        old="return max(0, min(batch_size, self.max_samples - clock.samples))",
        new="return batch_size if clock.samples < self.max_samples else 0",
        test="tests/core/test_clock.py::test_a_budget_ends_by_length_or_by_cost",
    ),
    Mutation(
        promise="samples of a dropped tail are no reference steps",
        path="core/stream.py",
        old="return epoch * per_epoch + min(offset / reference, per_epoch)",
        new="return epoch * per_epoch + offset / reference",
        test="tests/core/test_clock.py::"
        "test_however_an_epoch_is_cut_it_counts_the_steps_of_the_reference_run",
    ),
    # Noise ---------------------------------------------------------------------------------
    Mutation(
        promise="the estimate of the noise is unbiased",
        path="core/noise.py",
        old="trace = batch_size * (weighted_sqr_norm - mean_sqr_norm) / dof",
        new="trace = batch_size * (weighted_sqr_norm - mean_sqr_norm) / num_micro_batches",
        test="tests/core/test_noise.py::test_micro_batch_estimates_are_unbiased_for_unequal_sizes",
    ),
    Mutation(
        promise="steps that were not measured make the average of the noise older",
        path="core/noise.py",
        old="-(sample.batch_size if elapsed is None else elapsed) / self.horizon",
        new="-sample.batch_size / self.horizon",
        test="tests/core/test_noise.py::test_weight_decays_by_samples_not_by_updates",
    ),
    Mutation(
        promise="single samples of the noise are not clipped",
        path="core/noise.py",
        old="sqr_norm_sum=norm_sum + size * sample.sqr_norm,",
        new="sqr_norm_sum=norm_sum + size * max(0.0, sample.sqr_norm),",
        test="tests/core/test_noise.py::test_only_the_average_is_clipped",
    ),
    Mutation(
        promise="the trace is pooled by degrees of freedom",
        path="core/noise.py",
        old="""\
            trace_sum=trace_sum + dof * sample.trace,
            trace_weight=trace_weight + dof,
""",
        new="""\
            trace_sum=trace_sum + sample.trace,
            trace_weight=trace_weight + 1,
""",
        test="tests/core/test_noise.py::test_pooling_by_degrees_of_freedom_beats_a_plain_mean",
    ),
    Mutation(
        promise="a step is worth at most its scale",
        path="core/noise.py",
        old="return scale * float((noise + reference * signal) / (noise + batch_size * signal))",
        new="return scale * float((noise + batch_size * signal) / (noise + reference * signal))",
        test="tests/core/test_noise.py::test_gain_lies_between_one_and_the_scale",
    ),
    Mutation(
        promise="without an estimate of the noise a larger batch gains nothing",
        path="core/noise.py",
        old="return min(1.0, batch_size / reference)",
        new="return batch_size / reference",
        test="tests/core/test_rules.py::test_without_an_estimate_adaptive_rules_do_not_speed_up",
    ),
    Mutation(
        promise="while the noise is unknown the cap holds the reference batch",
        path="core/noise_cap.py",
        old="            return self.reference\n",
        new="            return offered\n",
        test="tests/core/test_noise_cap.py::test_at_the_ends_of_the_noise",
    ),
    Mutation(
        promise="a cap leaves out what adds no whole reference step",
        path="core/noise_cap.py",
        old="steps = min(math.floor(gain * (1 + 1e-9)), offered // self.reference)",
        new="steps = min(math.ceil(gain * (1 - 1e-9)), offered // self.reference)",
        test="tests/core/test_noise_cap.py::"
        "test_it_takes_as_many_reference_batches_as_a_step_is_worth",
    ),
    Mutation(
        promise="a ramp grows only where the noise is sure to allow it",
        path="core/ramp.py",
        old="low = max(0.0, trace - width *",
        new="low = max(0.0, trace + width *",
        test="tests/core/test_ramp.py::test_with_more_measurements_it_comes_near",
    ),
    Mutation(
        promise="a ramp with other sizes does not resume above what was reached",
        path="core/ramp.py",
        old="return max((size for size in self.sizes if size <= reached), default=self.sizes[0])",
        new="return min((size for size in self.sizes if size >= reached), default=self.sizes[-1])",
        test="tests/core/test_ramp.py::test_a_ramp_with_other_sizes_resumes_below_what_was_reached",
    ),
    # Rules ---------------------------------------------------------------------------------
    Mutation(
        promise="the learning rate follows the scale and the efficiency of the rule",
        path="core/rules.py",
        old="_exact.power(scaling.scale, self.p - self.q)",
        new="_exact.power(scaling.scale, self.p)",
        test="tests/core/test_rules.py::test_the_named_rules_are_the_published_ones",
    ),
    Mutation(
        promise="time constants follow the clock of the rule",
        path="core/rules.py",
        old="beta_power=scaling.advance if self.betas else 1.0,",
        new="beta_power=scaling.scale if self.betas else 1.0,",
        test="tests/core/test_rules.py::test_time_constants_follow_the_clock",
    ),
    Mutation(
        promise="weight decay per unit of the clock is constant",
        path="core/rules.py",
        old="weight_decay=scaling.advance / lr if self.weight_decay else 1.0,",
        new="weight_decay=scaling.advance if self.weight_decay else 1.0,",
        test="tests/core/test_rules.py::test_time_constants_follow_the_clock",
    ),
    Mutation(
        promise="each parameter group has the rate of its own noise",
        path="core/rules.py",
        old="own.factors(Scaling(scale, gain(group, batch_size, reference), advance, elapsed))",
        new="own.factors(Scaling(scale, advance, advance, elapsed))",
        test="tests/core/test_rules.py::test_groups_have_their_own_rate_and_share_the_clock",
    ),
    Mutation(
        promise="an adaptive rule measures time by progress",
        path="core/rules.py",
        old='"progress" if self.q else "samples"',
        new='"samples"',
        test="tests/core/test_rules.py::test_each_rule_has_its_clock",
    ),
    Mutation(
        promise="a larger batch never tightens clipping",
        path="core/rules.py",
        old='return invariant if policy == "invariant" else max(max_norm, invariant)',
        new="return invariant",
        test="tests/core/test_rules.py::test_clipping",
    ),
    Mutation(
        promise="the momentum buffer keeps its scale",
        path="core/momentum.py",
        old="dampening=1 - (1 - dampening) * share,",
        new="dampening=dampening,",
        test="tests/core/test_momentum.py::test_the_buffer_keeps_its_scale",
    ),
    Mutation(
        promise="a size of a batch schedule holds from its very position on",
        path="core/batch_schedule.py",
        old="return self.sizes[bisect_right(self.starts, used) - 1]",
        new="return self.sizes[max(0, bisect_right(self.starts, used - 1) - 1)]",
        test="tests/core/test_batch_schedule.py::"
        "test_a_size_holds_from_its_position_until_the_next",
    ),
    # Goodput -------------------------------------------------------------------------------
    Mutation(
        promise="a batch that bounds do not allow is worth nothing",
        path="core/goodput.py",
        old="return np.where(self.possible, value, 0.0)",
        new="return value",
        test="tests/core/test_goodput.py::test_every_candidate_can_be_planned_within_the_bounds",
    ),
    Mutation(
        promise="a change of the batch has to be certain enough",
        path="core/tuner.py",
        old="best = int(np.argmax(low))\n        if low[best] >= needed",
        new="best = int(np.argmax(gain))\n        if gain[best] > 0",
        test="tests/core/test_tuner.py::test_jitter_alone_does_not_move_it",
    ),
    Mutation(
        promise="the tuner measures a size with these replicas before it grows",
        path="core/tuner.py",
        old="if largest else max(current, least)",
        new="if largest else max(self.max_growth * current, least)",
        test="tests/core/test_tuner.py::"
        "test_it_grows_by_at_most_two_over_what_was_run_with_these_replicas",
    ),
    Mutation(
        promise="a step that not all have measured teaches nothing",
        path="core/autoscale.py",
        old="if ran is not None and sums.measured == replicas and ran.replicas == replicas:",
        new="if ran is not None and ran.replicas == replicas:",
        test="tests/core/test_autoscale.py::test_a_step_that_not_all_have_measured_teaches_nothing",
    ),
    # Recovery ------------------------------------------------------------------------------
    Mutation(
        promise="copies of two starts never complete each other",
        path="core/recovery.py",
        old="        shares = found.setdefault((file.version, file.host, file.num_shares), {})",
        new="""\
        version = Version(file.version.generation, file.version.step, file.version.epoch)
        shares = found.setdefault((version, file.host, file.num_shares), {})""",
        test="tests/protocol/test_protocol.py::test_files_of_two_branches_do_not_complete_each_other",
    ),
    Mutation(
        promise="only a whole copy goes before a newer one that lacks parts",
        path="core/recovery.py",
        old="if each.version == before and each.whole:",
        new="if each.version == before:",
        test="tests/protocol/test_protocol.py::"
        "test_a_state_with_missing_parts_gives_way_to_the_copy_before_it_alone",
    ),
    Mutation(
        promise="a generation has a greater number than any state that is visible",
        path="core/recovery.py",
        old="return max((version.generation for version in visible), default=-1) + 1",
        new="return max((version.generation for version in visible), default=0)",
        test="tests/protocol/test_protocol.py::"
        "test_a_state_that_cannot_be_read_does_not_lend_its_number",
    ),
    Mutation(
        promise="each share of a memory copy has two writers",
        path="core/recovery.py",
        old="neighbour = (local_process + 1) % num_local_processes",
        new="neighbour = min(local_process + 1, num_local_processes - 1)",
        test="tests/protocol/test_protocol.py::"
        "test_each_share_is_written_by_two_replicas_where_there_are_two",
    ),
    Mutation(
        promise="of two states the later generation wins",
        path="core/recovery.py",
        old='found.sort(key=lambda each: (each.version, each.source == "memory")',
        new='found.sort(key=lambda each: (each.version.step, each.source == "memory")',
        test="tests/protocol/test_protocol.py::"
        "test_memory_is_tried_before_storage_for_the_same_state",
    ),
    Mutation(
        promise="the buddy of a process is on another host",
        path="core/buddies.py",
        old="order[(i + most) % len(order)]",
        new="order[(i + 1) % len(order)]",
        test="tests/core/test_buddies.py::"
        "test_every_process_has_a_buddy_on_another_host_and_the_load_is_even",
    ),
    Mutation(
        promise="a state that one replica alone has different is noticed",
        path="core/agreement.py",
        old="    return all(\n",
        new="    return any(\n",
        test="tests/core/test_agreement.py::test_one_bit_of_one_of_many_is_noticed",
    ),
    Mutation(
        promise="lives without a new step are counted",
        path="core/lives.py",
        old="new = life.ended > best",
        new="new = life.ended >= best",
        test="tests/core/test_lives.py::"
        "test_lives_that_end_at_one_step_are_counted_however_long_they_are",
    ),
    # Members -------------------------------------------------------------------------------
    Mutation(
        promise="survivors keep their numbers and joiners come last",
        path="core/membership.py",
        old="members=(*staying, *joining), reformed=True)",
        new="members=(*joining, *staying), reformed=True)",
        test="tests/core/test_membership.py::test_those_that_stay_keep_their_order_and_come_first",
    ),
    Mutation(
        promise="a planned change waits until all members know of it",
        path="core/forming.py",
        old="return votes == members",
        new="return votes > 0",
        test="tests/protocol/test_live.py::test_a_planned_change_waits_until_all_have_seen_it",
    ),
    Mutation(
        promise="a generation of which a member is gone is given up",
        path="core/live.py",
        old="replace(self, broken=self.roster.generation)._announce(staying)",
        new="replace(self, broken=self.roster.generation - 1)._announce(staying)",
        test="tests/protocol/test_live.py::test_each_member_may_say_that_the_group_broke",
    ),
    Mutation(
        promise="only all members of the newest generation form it",
        path="core/live.py",
        old="if (generation, tuple(names)) != (self.roster.generation, self.roster.names):",
        new="if generation != self.roster.generation:",
        test="tests/protocol/test_live.py::test_only_the_newest_generation_can_be_formed",
    ),
    Mutation(
        promise="a member that leaves takes part until others formed without it",
        path="core/forming.py",
        old="gone = {*group.names} - {*newest.roster.names} - newest.leaving",
        new="gone = {*group.names} - {*newest.roster.names}",
        test="tests/protocol/test_live.py::test_who_leaves_is_there_until_others_formed_without_it",
    ),
    Mutation(
        promise="a group that broke does not wait for joiners",
        path="core/forming.py",
        old='return "renew" if left == "broke" else "wait"',
        new='return "wait"',
        test="tests/protocol/test_live.py::test_a_member_comes_to_joiners_only_if_all_agreed",
    ),
    Mutation(
        promise="healing does not go back behind the state that a generation needs",
        path="core/forming.py",
        old="elif not states or (least is not None and max(states) < least):",
        new="elif not states:",
        test="tests/protocol/test_live.py::test_the_newest_state_wins_and_its_holders_send_it",
    ),
    Mutation(
        promise="a sharded state of which a part is lost does not win",
        path="core/forming.py",
        old="if len(parts) == processes_per_copy]",
        new="if parts]",
        test="tests/protocol/test_live.py::test_a_state_of_which_a_part_is_lost_does_not_win",
    ),
    # Detection -----------------------------------------------------------------------------
    Mutation(
        promise="the replica with the least progress blocks the others",
        path="core/hang.py",
        old="last = min(sign.position for sign in signs)",
        new="last = max(sign.position for sign in signs)",
        test="tests/core/test_hang.py::test_the_one_that_has_not_come_to_the_reduction_is_guilty",
    ),
    Mutation(
        promise="time that the watchdog has not seen does not count",
        path="core/hang.py",
        old="elapsed = min(max(elapsed, 0.0), MOST_SEEN)",
        new="elapsed = max(elapsed, 0.0)",
        test="tests/core/test_hang.py::test_time_that_nobody_has_seen_does_not_count",
    ),
    Mutation(
        promise="there is no limit outside of the training",
        path="core/hang.py",
        old="if any(sign.phase in (Phase.START, Phase.DONE) for sign in busy):",
        new="if any(sign.phase is Phase.START for sign in busy):",
        test="tests/core/test_hang.py::test_before_and_after_the_training_there_is_no_limit",
    ),
    # Shards and chunks ---------------------------------------------------------------------
    Mutation(
        promise="the end of a shard moves at most one other",
        path="core/shard_order.py",
        old="""\
                seats[seat] = seats[-1]
                seats = seats[:-1]
""",
        new="                seats = np.delete(seats, seat)\n",
        test="tests/core/test_shard_order.py::test_an_end_moves_at_most_one_shard",
    ),
    Mutation(
        promise="no replica idles where few shards are left",
        path="core/shard_order.py",
        old="return -(-seats // replicas) * replicas <= _UNEVEN * seats",
        new="return True",
        test="tests/core/test_shard_order.py::test_no_replica_idles_where_one_shard_is_left",
    ),
    Mutation(
        promise="those that keep a range are those that hold it",
        path="core/chunk_dealing.py",
        old="(number - each * num // copies) % num",
        new="(number + each * num // copies) % num",
        test="tests/core/test_chunk_plan.py::test_a_range_is_kept_by_so_many_holders",
    ),
    # Traces and events ---------------------------------------------------------------------
    Mutation(
        promise="a trace that ends repeats from its beginning if asked",
        path="core/trace.py",
        old='step % self.num_steps if self.end == "repeat" else self.num_steps - 1',
        new='step % self.num_steps if self.end == "hold" else self.num_steps - 1',
        test="tests/core/test_trace.py::test_the_end_is_chosen_by_name",
    ),
    Mutation(
        promise="a field of an event that is missing is an error",
        path="core/events.py",
        old="elif is_required:",
        new="elif is_required and not values:",
        test="tests/core/test_events.py::test_a_missing_field_is_named",
    ),
]
