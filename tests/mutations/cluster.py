"""Cluster: the division of accelerators, policies, backends, and the controller."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        promise="an accelerator of a job that may not move is given to nobody else",
        path="cluster/division/place.py",
        old="            self._change(place, -count)\n            self.pinned.add(place)\n",
        new="            self.pinned.add(place)\n",
        test="tests/cluster/division/test_place.py::test_a_pinned_job_never_moves",
    ),
    Mutation(
        promise="a small job is placed on the fullest node with room for it",
        path="cluster/division/place.py",
        old="for count in range(size, self.largest + 1):",
        new="for count in range(self.largest, size - 1, -1):",
        test="tests/cluster/division/test_place.py::"
        "test_what_runs_stays_and_the_fullest_node_is_filled",
    ),
    Mutation(
        promise="two jobs that have several hosts do not share one",
        path="cluster/division/place.py",
        old="(place not in self.spread and place not in others)",
        new="place not in others",
        test="tests/cluster/division/test_place.py::test_a_fixed_size_that_no_number_of_hosts_has_"
        "shares_its_last_host_with_small_jobs_only",
    ),
    Mutation(
        promise="a node that is about to leave is given to no job",
        path="cluster/division/constraints.py",
        old="node.leaves > now + lead",
        new="node.leaves > now - lead",
        test="tests/cluster/division/test_divide.py::"
        "test_a_node_that_leaves_is_left_and_the_move_costs_nothing_extra",
    ),
    Mutation(
        promise="a job that may not be preempted keeps what it has",
        path="cluster/division/constraints.py",
        old="found[row] = young or not job.spec.preemptible",
        new="found[row] = young",
        test="tests/cluster/division/test_divide.py::"
        "test_a_job_that_may_not_be_preempted_stays_when_a_shorter_one_comes",
    ),
    Mutation(
        promise="the highest priority is served first",
        path="cluster/division/share.py",
        old="sorted(set(priority))[::-1]",
        new="sorted(set(priority))",
        test="tests/cluster/division/test_divide.py::test_a_higher_priority_is_served_first",
    ),
    Mutation(
        promise="the guarantee of a tenant holds against higher priorities",
        path="cluster/division/share.py",
        old="        free = room.free - reserved\n",
        new="        free = room.free\n",
        test="tests/cluster/division/test_divide.py::"
        "test_a_guarantee_holds_against_a_higher_priority_of_others",
    ),
    Mutation(
        promise="a decision of a policy below the minimum of a job is not carried out",
        path="cluster/controller/decide.py",
        old="if not spec.min_replicas <= allocation.size <= spec.max_replicas:",
        new="if not allocation.size <= spec.max_replicas:",
        test="tests/cluster/controller/test_step.py::"
        "test_a_job_never_gets_less_than_its_minimum_whatever_the_policy_says",
    ),
    Mutation(
        promise="a job with fewer nodes left than its minimum is stopped",
        path="cluster/controller/carry_out.py",
        old="    return shares if sum(shares.values()) >= job.spec.min_replicas else {}\n",
        new="    return shares\n",
        test="tests/cluster/controller/test_step.py::"
        "test_a_job_with_too_few_nodes_left_is_stopped_also_if_the_policy_fails",
    ),
    Mutation(
        promise="a drained node is left before its time and not after",
        path="cluster/controller/decide.py",
        old="(leaves is not None and leaves - now <= rules.lead)",
        new="(leaves is not None and leaves - now <= 0)",
        test="tests/cluster/controller/test_step.py::test_a_drained_node_is_left_in_time",
    ),
    Mutation(
        promise="a part is started when its accelerators are free and not before",
        path="cluster/controller/carry_out.py",
        old="if node not in here and left[node] >= count",
        new="if node not in here",
        test="tests/cluster/controller/test_step.py::"
        "test_stops_come_first_and_a_start_waits_for_the_accelerator",
    ),
    Mutation(
        promise="a part of a former life does not save over the present one",
        path="cluster/controller/carry_out.py",
        old="why=_why(job, part, shares), now=former",
        new="why=_why(job, part, shares), now=False",
        test="tests/cluster/controller/test_step.py::"
        "test_a_part_of_a_former_life_that_comes_back_is_ended_without_saving",
    ),
    Mutation(
        promise="a job is not forgiven all later failures for one step of progress",
        path="cluster/controller/changes.py",
        old="mark=job.progress if record.failures else job.mark",
        new="mark=job.mark",
        test="tests/cluster/controller/test_step.py::"
        "test_one_step_of_progress_does_not_forgive_all_later_failures",
    ),
    Mutation(
        promise="a part that is listed late is not taken for a new one",
        path="cluster/controller/learn.py",
        old="            continue  # an answer that is late: names are not used twice\n",
        new="            pass\n",
        test="tests/cluster/controller/test_step.py::"
        "test_an_answer_that_is_late_does_not_revive_a_part",
    ),
    Mutation(
        promise="a controller that restarts continues the journal behind its last whole line",
        path="cluster/controller/journal.py",
        old="        os.ftruncate(self._file, end)  # a line that was cut short\n",
        new="",
        test="tests/cluster/controller/test_journal.py::"
        "test_a_last_line_that_was_cut_short_is_dropped",
    ),
    Mutation(
        promise="a damaged line of the journal is no end of it",
        path="cluster/controller/journal.py",
        old="            if index == len(lines) - 2 and not lines[-1]:\n",
        new="            if not lines[-1]:\n",
        test="tests/cluster/controller/test_journal.py::"
        "test_damage_before_the_last_line_is_an_error_that_names_the_line",
    ),
    Mutation(
        promise="two parts on one node have no GPU in common",
        path="cluster/backends/local.py",
        old="for name in self._gpus if name not in taken",
        new="for name in self._gpus",
        test="tests/cluster/backends/test_local.py::test_each_part_gets_gpus_of_its_own",
    ),
    Mutation(
        promise="the limit of a tenant holds for jobs in order",
        path="cluster/policies/pool.py",
        old="min(left, most - self._used[job.spec.tenant])",
        new="min(left, most)",
        test="tests/cluster/policies/test_in_order.py::"
        "test_a_tenant_never_exceeds_its_limit_and_the_rest_goes_to_others",
    ),
    Mutation(
        promise="nobody passes a job that waits unless backfill is on",
        path="cluster/policies/fifo.py",
        old="elif not (self._backfill or guaranteed or pool.is_at_limit(job)):",
        new="elif not (self._backfill or guaranteed or not pool.is_at_limit(job)):",
        test="tests/cluster/policies/test_in_order.py::"
        "test_fifo_lets_nobody_pass_a_job_that_waits_unless_it_fills_gaps",
    ),
]
