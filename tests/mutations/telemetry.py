"""Telemetry: the event log, its readers, and what a person sees of a run."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        promise="an unfinished line of the event log is no event yet",
        path="telemetry/read.py",
        old='            if not text.endswith(b"\\n") and not self._part.is_sealed:\n',
        new='            if not text.endswith(b"\\n") and self._part.is_sealed:\n',
        test="tests/telemetry/test_read.py::test_a_follower_waits_for_the_end_of_a_line",
    ),
    Mutation(
        promise="a restarted writer cuts off the line that a crash left unfinished",
        path="telemetry/log.py",
        old="            position = start + found + 1\n            break\n",
        new="            position = end\n            break\n",
        test="tests/telemetry/test_log.py::test_an_unfinished_line_is_cut_off",
    ),
    Mutation(
        promise="the steps before a fault are written with it and not held back",
        path="telemetry/log.py",
        old="            type(event) is not StepEvent\n            or ",
        new="            ",
        test="tests/telemetry/test_log.py::"
        "test_what_is_not_a_step_is_written_at_once_with_the_steps_before_it",
    ),
    Mutation(
        promise="two processes of one name do not write to the same event file",
        path="telemetry/log.py",
        old="    except BlockingIOError:\n        return False\n",
        new="    except BlockingIOError:\n        return True\n",
        test="tests/telemetry/test_log.py::"
        "test_a_second_process_under_the_same_name_writes_beside_the_first",
    ),
    Mutation(
        promise="a merge of two segments that is interrupted loses no event",
        path="telemetry/segments.py",
        old="    os.replace(temporary, path)\n",
        new="    older.path.unlink(missing_ok=True)\n    os.replace(temporary, path)\n",
        test="tests/telemetry/test_segments.py::"
        "test_a_merge_that_ends_anywhere_loses_and_repeats_nothing",
    ),
    Mutation(
        promise="starts and rescales and faults are never thinned out",
        path="telemetry/segments.py",
        old="if size < rare} | ALWAYS_KEPT | {b",
        new="if size < rare} | {b",
        test="tests/telemetry/test_segments.py::test_some_kinds_always_stay",
    ),
    Mutation(
        promise="a segment that a merged one covers is not read again",
        path="telemetry/segments.py",
        old="segment.last <= sealed[-1].last",
        new="segment.last < sealed[-1].first",
        test="tests/telemetry/test_segments.py::test_a_segment_that_another_covers_does_not_count",
    ),
    Mutation(
        promise="a follower sees an event once also after its file was sealed",
        path="telemetry/read.py",
        old="part.first == part.last == seen and part.identity == self.identity",
        new="not part.is_sealed and part.identity == self.identity",
        test="tests/telemetry/test_read.py::"
        "test_a_follower_sees_each_event_once_while_files_are_sealed_and_merged",
    ),
    Mutation(
        promise="steps that a later generation made again count once",
        path="telemetry/run.py",
        old="np.minimum.accumulate(origin[::-1])[::-1][1:]",
        new="np.minimum.accumulate(origin)[1:]",
        test="tests/telemetry/test_run.py::"
        "test_steps_that_a_later_generation_did_again_do_not_count",
    ),
    Mutation(
        promise="goodput is in reference samples and not in reference steps",
        path="telemetry/run.py",
        old="rates = worth * reference / seconds",
        new="rates = worth / seconds",
        test="tests/telemetry/test_run.py::"
        "test_goodput_is_progress_in_reference_samples_per_second_however_few_steps_are_told",
    ),
    Mutation(
        promise="a run is not called finished one epoch too early",
        path="telemetry/status.py",
        old="number(epoch + 1) * start.steps_per_epoch",
        new="number(epoch + 2) * start.steps_per_epoch",
        test="tests/telemetry/test_view.py::test_a_run_whose_last_epoch_is_over_is_finished",
    ),
    Mutation(
        promise="a counter of steps counts those that were not reported",
        path="telemetry/scalars.py",
        old='Count("steps", event.step - before if event.step > before else 1, {})',
        new='Count("steps", 1, {})',
        test="tests/telemetry/test_scalars.py::test_steps_are_counted_by_their_numbers",
    ),
    Mutation(
        promise="a metric of the user does not replace a number of resilin",
        path="telemetry/scalars.py",
        old='values[f"user_{name}" if name in SCALARS and name != "loss" else name] = number',
        new="values[name] = number",
        test="tests/telemetry/test_scalars.py::test_a_recorded_number_does_not_replace_one_of_ours",
    ),
]
