"""State: memory copies, checkpoints, what is restored, and what a script keeps between steps."""

from __future__ import annotations

from tests.mutations import Mutation

_STATE = "tests/training/state"
_MEMORY = f"{_STATE}/test_memory.py"
_SCHEDULE = f"{_STATE}/test_memory_schedule.py"
_RESTORE = f"{_STATE}/test_restore.py"
_RECOVERY = f"{_STATE}/test_recovery.py"
_REGISTRY = f"{_STATE}/test_registry.py"
_RANDOM = f"{_STATE}/test_randomness.py"
_SAVED = f"{_STATE}/checkpoint/test_checkpoints.py"
_SECURITY = f"{_STATE}/checkpoint/test_security.py"
_EMA = "tests/training/script/test_ema.py"

MUTATIONS: list[Mutation] = [
    Mutation(
        promise="a loop that is left by break is saved",
        path="training/script/epochs.py",
        old="        if not leaves_by_exception():\n",
        new="        if False:\n",
        test="tests/training/test_leaving.py::test_a_break_out_of_both_loops_saves_what_there_is",
    ),
    Mutation(
        promise="a loop that fails is not taken for one that was left",
        path="compat/python_names.py",
        old="each.tb_lasti == frame.f_lasti",
        new="each.tb_lasti == -1",
        test="tests/training/test_leaving.py::"
        "test_a_loop_that_fails_is_not_taken_for_one_that_was_left",
    ),
    Mutation(
        promise="a model that was changed after the loop is not saved in its place",
        path="training/leaving.py",
        old="    if at_end and not _same(",
        new="    if False and not _same(",
        test="tests/training/test_leaving.py::"
        "test_what_a_script_makes_of_its_model_afterwards_is_not_saved",
    ),
    Mutation(
        promise="a pass that is left in its last step is not repeated",
        path="training/passes.py",
        old="if training and current.made and self.is_over(",
        new="if False and self.is_over(",
        test="tests/training/test_leaving.py::"
        "test_a_run_that_was_left_continues_as_if_it_had_not_been",
    ),
    # Memory copies -------------------------------------------------------------------------
    Mutation(
        promise="a memory copy is marked complete last of all",
        path="training/state/memory_file.py",
        old="_HEADER.pack_into(memory, 0, _MAGIC, 0, *head, 0)",
        new="_HEADER.pack_into(memory, 0, _MAGIC, 1, *head, zlib.crc32(text))",
        test=f"{_MEMORY}::test_a_live_writer_that_is_killed_while_it_overwrites_its_own_file",
    ),
    Mutation(
        promise="a memory copy with another checksum is passed over",
        path="training/state/memory_file.py",
        old="if len(text) != size or zlib.crc32(text) != crc:",
        new="if len(text) != size:",
        test=f"{_MEMORY}::test_a_header_that_says_less_than_all_is_passed_over",
    ),
    Mutation(
        promise="a memory copy that is overwritten while it is read does not count",
        path="training/state/memory_file.py",
        old="if again is None or again.version != file.version:",
        new="if again is None:",
        test=f"{_MEMORY}::test_a_file_that_is_overwritten_in_place_while_it_is_read",
    ),
    Mutation(
        promise="memory copies of another format are passed over",
        path="training/state/memory_file.py",
        old='if meta["format"] != FORMAT:',
        new='if meta["format"] < FORMAT:',
        test=f"{_MEMORY}::test_files_of_another_format_are_passed_over",
    ),
    Mutation(
        promise="a copy that finds no room leaves the complete one alone",
        path="training/state/memory.py",
        old="            self._turn = before\n            raise",
        new="            raise",
        test=f"{_SCHEDULE}::test_room_for_one_buffer_alone_keeps_the_one_that_is_whole",
    ),
    Mutation(
        promise="copies in a directory that others can write to are refused",
        path="training/state/memory.py",
        old="if status.st_uid != os.getuid() or status.st_mode & 0o022:",
        new="if status.st_uid != os.getuid() or status.st_mode & 0o002:",
        test=f"{_MEMORY}::test_a_directory_that_others_can_write_to_is_refused",
    ),
    Mutation(
        promise="what is kept for another host is no state of this one",
        path="training/state/memory_scan.py",
        old='complete_copies(file for file in self.files if "ward" not in file.meta)',
        new="complete_copies(self.files)",
        test=f"{_STATE}/test_buddy_copies.py::"
        "test_what_is_kept_for_one_process_of_another_host_is_no_copy_of_this_one",
    ),
    Mutation(
        promise="a replica votes once its copy is written",
        path="training/state/memory_schedule.py",
        old="if not may_vote(writing=self._writing is not None):",
        new="if not may_vote(writing=self._writing is None):",
        test=f"{_SCHEDULE}::"
        "test_a_copy_is_written_while_the_state_changes_and_the_ballot_waits_for_it",
    ),
    Mutation(
        promise="the state that was resumed stays until all replicas have a copy",
        path="training/state/memory_schedule.py",
        old="self._all_kept = not failed",
        new="self._all_kept = failed >= 0",
        test=f"{_SCHEDULE}::test_the_state_that_was_resumed_stays_while_another_replica_has_no_copy",
    ),
    Mutation(
        promise="a staged state is a copy",
        path="training/state/stage.py",
        old="return Staged(staged, wait, pieces)",
        new="return Staged(dict(pieces), wait, pieces)",
        test=f"{_SAVED}::test_tensors_may_change_while_a_save_is_in_flight",
    ),
    Mutation(
        promise="a buddy gets what one host alone has",
        path="training/state/buddy_copies.py",
        old="return all(self._hosts.get(each, mine) == mine for each in keepers)",
        new="return all(self._hosts.get(each, mine) != mine for each in keepers)",
        test=f"{_STATE}/test_buddy_copies.py::test_only_what_one_host_has_is_sent",
    ),
    Mutation(
        promise="a member that was a step ahead leaves the sums before that step",
        path="training/state/sums_file.py",
        old="self._write(steps % 2, steps, sums)",
        new="self._write(0, steps, sums)",
        test=f"{_STATE}/test_sums_file.py::test_a_member_that_was_a_step_ahead_has_those_before_it",
    ),
    # Which state wins ----------------------------------------------------------------------
    Mutation(
        promise="own states come from all hosts",
        path="training/state/restore.py",
        old="known = set().union(*owners[: engine.membership.process])",
        new="known = set().union(*owners[:1])",
        test=f"{_RESTORE}::test_what_each_has_of_its_own_comes_from_all_hosts",
    ),
    Mutation(
        promise="a host that lacks the state keeps it before the first step",
        path="training/state/restore.py",
        old='Newest(snapshot, "memory", generation, scan is None or mine is not None)',
        new='Newest(snapshot, "memory", generation, True)',
        test=f"{_RESTORE}::test_a_host_without_a_copy_gets_it_from_one_that_has_it",
    ),
    Mutation(
        promise="a memory copy wins over an older checkpoint",
        path="training/state/restore.py",
        old='engine.group("control"), at_least=next(copies, None), wanted=wanted',
        new='engine.group("control"), wanted=wanted',
        test=f"{_RESTORE}::test_a_memory_copy_wins_over_checkpoints_older_than_a_corrupt_one",
    ),
    Mutation(
        promise="a generation has a number above that of every state in memory",
        path="training/state/restore.py",
        old="next_generation([*saved, *(Version(each, 0) for each in visible)])",
        new="next_generation(saved)",
        test=f"{_RECOVERY}::test_the_memory_copy_holds_the_last_completed_step",
    ),
    Mutation(
        promise="a copy counts if the pieces of all hosts are the whole",
        path="training/state/restore.py",
        old="        return not reason\n",
        new="        return True\n",
        test=f"{_STATE}/test_transfer.py::"
        "test_the_newest_copy_wins_of_which_the_hosts_have_all_pieces",
    ),
    Mutation(
        promise="each replica gets its own random state back",
        path="training/state/replica_parts.py",
        old='prefix = f"{OWN}{process}/"',
        new='prefix = f"{OWN}{0}/"',
        test=f"{_REGISTRY}::test_each_replica_gets_back_its_own",
    ),
    Mutation(
        promise="at another number of replicas nobody has its own state",
        path="training/state/replica_parts.py",
        old='if snapshot.tree.get("job", {}).get("replicas") == num_replicas:',
        new='if snapshot.tree.get("job", {}).get("replicas"):',
        test=f"{_REGISTRY}::test_at_another_number_of_replicas_nobody_has_its_own_any_more[3]",
    ),
    Mutation(
        promise="sums are restored once, not on each replica",
        path="training/state/registry.py",
        old='thing.load_state_dict({"sums": sums if first_replica else {}})',
        new='thing.load_state_dict({"sums": sums})',
        test=f"{_REGISTRY}::test_parts_of_sums_add_up_key_by_key",
    ),
    Mutation(
        promise="state that nobody has registered for yet stays in every state",
        path="training/state/registry.py",
        old="tree, tensors = self._left(left)",
        new="tree, tensors = self._left(())",
        test=f"{_REGISTRY}::test_restored_state_is_taken_again_until_somebody_claims_it",
    ),
    Mutation(
        promise="the state of a model of another type is refused",
        path="training/state/registry.py",
        old="if (was.shape, was.dtype) != (now.shape, now.dtype):",
        new="if was.shape != now.shape:",
        test=f"{_REGISTRY}::"
        "test_the_state_of_another_model_is_refused_before_anything_is_loaded[type-early]",
    ),
    Mutation(
        promise="the second of a pair of Gaussian numbers is restored",
        path="training/state/randomness.py",
        old="random.setstate((version, words, gauss if has_gauss else None))",
        new="random.setstate((version, words, None))",
        test=f"{_RANDOM}::test_the_second_of_a_pair_of_gaussian_numbers_is_restored",
    ),
    Mutation(
        promise="random numbers are those of the state when the first step begins",
        path="training/state/randomness.py",
        old="        self.leave_out_pass()\n        self._pending = None",
        new="        self._pending = None",
        test=f"{_RANDOM}::test_a_job_lost_at_any_moment_draws_the_same_numbers[{{}}]",
    ),
    Mutation(
        promise="swapped numbers are seen by the cross-check",
        path="training/state/divergence.py",
        old="return place * 0x9E3779B97F4A7C1 * 2 + 1",
        new="return place * 0 + 1",
        test=f"{_STATE}/test_divergence.py::test_any_bit_and_any_place_changes_the_sums[dtype2]",
    ),
    Mutation(
        promise="what the loop has unfrozen is trained after a restart",
        path="training/state/freezing.py",
        old="if parameter.requires_grad == (name in frozen):",
        new="if parameter.requires_grad and name in frozen:",
        test=f"{_STATE}/test_freezing.py::test_what_the_loop_has_frozen_and_unfrozen_survives",
    ),
    # Checkpoints ---------------------------------------------------------------------------
    Mutation(
        promise="data is on disk before the commit appears",
        path="training/state/checkpoint/storage.py",
        old="            os.fsync(raw.fileno())\n",
        new="",
        test=f"{_SAVED}::test_everything_is_on_disk_before_the_commit_appears",
    ),
    Mutation(
        promise="a removed checkpoint loses its commit first",
        path="training/state/checkpoint/storage.py",
        old="os.unlink(os.path.join(directory, first))",
        new="os.stat(os.path.join(directory, first))",
        test=f"{_SAVED}::test_a_removal_that_is_interrupted_leaves_no_commit",
    ),
    Mutation(
        promise="the checksum of a file is compared",
        path="training/state/checkpoint/files.py",
        old="if crc32 != expected.crc32:",
        new="if problem is not None and crc32 != expected.crc32:",
        test=f"{_SAVED}::test_what_is_not_whole_is_skipped_with_a_warning[flip_middle-.metadata]",
    ),
    Mutation(
        promise="a file that has grown is not whole",
        path="training/state/checkpoint/files.py",
        old="if (size := storage.size(commit.name, file)) != expected:",
        new="if (size := storage.size(commit.name, file)) < expected:",
        test=f"{_SAVED}::test_what_is_not_whole_is_skipped_with_a_warning[lengthen-.metadata]",
    ),
    Mutation(
        promise="loading a checkpoint executes no code",
        path="training/state/checkpoint/files.py",
        old="weights_only=True",
        new="weights_only=False",
        test=f"{_SECURITY}::test_what_hides_beside_the_tensor_is_not_executed",
    ),
    Mutation(
        promise="a compressed tensor takes no memory",
        path="training/state/checkpoint/archive.py",
        old="if record.compress_type != zipfile.ZIP_STORED or record.file_size",
        new="if record.compress_type == zipfile.ZIP_STORED and record.file_size",
        test=f"{_SECURITY}::test_a_tensor_that_is_compressed_is_refused_before_it_takes_memory",
    ),
    Mutation(
        promise="a commit names files of its own directory alone",
        path="training/state/checkpoint/commit.py",
        old="if _DATA_FILE.fullmatch(file) is None:",
        new="if not file:",
        test=f"{_SECURITY}::test_a_commit_reaches_nothing_outside_its_directory[../outside]",
    ),
    Mutation(
        promise="a damaged commit file is found",
        path="training/state/checkpoint/commit.py",
        old='if (found := f"{zlib.crc32(body):08x}") != expected:',
        new='if (found := f"{zlib.crc32(body):08x}") == "":',
        test=f"{_STATE}/checkpoint/test_commit.py::test_every_flipped_bit_and_every_cut_is_found",
    ),
    Mutation(
        promise="of two checkpoints that of the later generation is resumed",
        path="training/state/checkpoint/catalogue.py",
        old="found.commits.sort(key=lambda commit: commit.version, reverse=True)",
        new="found.commits.sort(key=lambda commit: commit.version.step, reverse=True)",
        test=f"{_SAVED}::test_the_newest_and_the_milestones_stay",
    ),
    Mutation(
        promise="the newest checkpoints stay",
        path="training/state/checkpoint/retention.py",
        old="staying = set(ordered[-keep:])",
        new="staying = set(ordered[:keep])",
        test=f"{_STATE}/checkpoint/test_commit.py::test_which_ones_stay",
    ),
    Mutation(
        promise="the checkpoint that was just saved is not removed",
        path="training/state/checkpoint/catalogue.py",
        old="staying = {newest.name, *kept(versions, keep=keep, keep_every=keep_every)}",
        new="staying = kept(versions, keep=keep, keep_every=keep_every)",
        test=f"{_SAVED}::test_what_was_just_saved_is_never_removed",
    ),
    Mutation(
        promise="a job that resumes from memory counts from its last checkpoint",
        path="training/state/checkpoint_schedule.py",
        old="self._begun_step = self._last_saved(step)",
        new="self._begun_step = step",
        test=f"{_RECOVERY}::"
        "test_a_job_that_dies_more_often_than_it_saves_counts_from_its_last_checkpoint",
    ),
    Mutation(
        promise="a failure of one replica fails the checkpoint",
        path="training/state/checkpoint/saver.py",
        old="return _commit(storage, task, name, Peers.values(outcomes))",
        new="return _commit(storage, task, name, [o.value for o in outcomes if o.value])",
        test=f"{_SAVED}::test_a_failure_on_one_replica_fails_all_of_them",
    ),
    Mutation(
        promise="a poller's request to stop is voted on",
        path="training/state/recovery.py",
        old="float(self._engine.stop.asked), float(self._saves.is_due(steps))",
        new="float(self._engine.stop.signal is not None), float(self._saves.is_due(steps))",
        test=f"{_RECOVERY}::test_a_poller_ends_the_job_with_a_code_that_asks_for_a_restart",
    ),
    Mutation(
        promise="a worker without copies waits for those that have some",
        path="training/state/recovery.py",
        old="        if not self._engine.exits:\n",
        new="        if memory is not None and not self._engine.exits:\n",
        test="tests/integrations/test_ray.py::test_all_workers_wait_for_each_other_at_the_end",
    ),
    # The script ----------------------------------------------------------------------------
    Mutation(
        promise="an average is restored with the rest",
        path="training/script/ema.py",
        old='        self._begun = bool(state["begun"])\n',
        new="",
        test=f"{_EMA}::test_a_crash_costs_the_average_nothing[False]",
    ),
    Mutation(
        promise="a step that is worth several decays the average as often",
        path="training/script/ema.py",
        old="share = 1 - decay ** (after.read(self.clock, reference) - reading)",
        new="share = 1 - decay",
        test=f"{_EMA}::test_a_step_that_is_worth_several_decays_as_often[samples]",
    ),
    Mutation(
        promise="a checkpoint within the block of an average has the model's own weights",
        path="training/script/ema.py",
        old="module = registry.exchange(MODEL, _OwnWeights(self))",
        new="module = registry.exchange(MODEL, self._model.module)",
        test=f"{_EMA}::test_within_the_block_the_model_has_the_average_and_the_state_does_not",
    ),
    Mutation(
        promise="weights of low precision are averaged in float32",
        path="training/script/ema.py",
        old="return copied.to(torch.float32) if low else copied",
        new="return copied",
        test=f"{_EMA}::test_weights_of_low_precision_are_averaged_in_float32",
    ),
    Mutation(
        promise="sums of different keys are those over all replicas",
        path="training/script/accumulator.py",
        old="total[key] = total.get(key, 0.0) + value",
        new="total[key] = value",
        test="tests/training/script/test_accumulator.py::test_sums_over_replicas[other keys]",
    ),
    # Buffers -------------------------------------------------------------------------------
    Mutation(
        promise="a buffer outside of the state_dict survives if training changes it",
        path="training/state/buffers.py",
        old="for n, changed in self._changed.items() if changed}",
        new="for n, changed in self._changed.items() if not changed}",
        test=f"{_STATE}/test_buffers.py::"
        "test_what_training_has_changed_survives_and_constants_are_the_scripts[1-ddp]",
    ),
    Mutation(
        promise="a buffer that replicas send to each other is no changed one",
        path="training/state/buffers.py",
        old="return not torch.equal(buffer.detach().cpu(), self._first[name])",
        new="return True",
        test=f"{_STATE}/test_buffers.py::"
        "test_what_training_has_changed_survives_and_constants_are_the_scripts[2-buckets]",
    ),
]
