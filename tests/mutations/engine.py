"""Engine: who is in the job, who may say so, and what is noticed when one of them is lost."""

from __future__ import annotations

from tests.mutations import Mutation

_ENGINE = "tests/engine"
_PROOF = f"{_ENGINE}/live/test_proof.py"
_FORMING = f"{_ENGINE}/live/test_forming.py"
_CLIENT = f"{_ENGINE}/live/test_client.py"
_WIRE = f"{_ENGINE}/live/test_wire.py"
_STOP = f"{_ENGINE}/test_stop.py"
_WATCH = f"{_ENGINE}/test_watch.py"
_SERVER = "tests/cli/live/test_server.py"

MUTATIONS: list[Mutation] = [
    # Who belongs to the job ----------------------------------------------------------------
    Mutation(
        promise="a worker has the authority prove that it knows the secret",
        path="engine/live/proof.py",
        old='if not _equal(str(proof), full._sign(secret, "authority")):',
        new="if not proof:",
        test=f"{_PROOF}::test_an_impostor_in_place_of_the_authority_learns_nothing",
    ),
    Mutation(
        promise="a worker proves that it knows the secret",
        path="engine/live/proof.py",
        old='if not _equal(proof, self._sign(secret, "worker")):',
        new='if _equal(proof, ""):',
        test=f"{_PROOF}::test_a_worker_without_the_secret_is_refused_and_others_are_heard",
    ),
    Mutation(
        promise="a proof of the authority is none of a worker",
        path="engine/live/proof.py",
        old="(side, self.asked, self.answered, self.name)",
        new="(self.asked, self.answered, self.name)",
        test=f"{_PROOF}::test_the_proof_of_the_authority_is_none_of_a_worker",
    ),
    Mutation(
        promise="a proof is of no use in another connection",
        path="engine/live/proof.py",
        old="self.asked, self.answered, self.name))",
        new="self.asked, self.name))",
        test=f"{_PROOF}::test_an_old_proof_is_of_no_use",
    ),
    Mutation(
        promise="a member proves to the others that it knows the secret",
        path="engine/live/forming.py",
        old="if not hmac.compare_digest(str(signature), expected):",
        new="if not signature:",
        test=f"{_FORMING}::test_a_process_that_cannot_prove_that_it_knows_the_secret_is_refused[1]",
    ),
    Mutation(
        promise="members alone know where they meet",
        path="engine/live/forming.py",
        old='PrefixStore(credentials.sign("meeting", number), store)',
        new='PrefixStore(f"meeting/{number}", store)',
        test=f"{_FORMING}::test_a_process_without_the_secret_never_meets_the_members",
    ),
    Mutation(
        promise="a name has one connection",
        path="engine/authority/server.py",
        old="elif worker.connection is not None:",
        new="elif worker.connection is connection:",
        test=f"{_PROOF}::test_a_name_has_one_connection",
    ),
    # Generations ---------------------------------------------------------------------------
    Mutation(
        promise="an earlier announcement does not replace a later one",
        path="engine/live/client.py",
        old="or known.revision < authority.revision",
        new="or known.revision != authority.revision",
        test=f"{_CLIENT}::test_of_two_announcements_the_later_one_counts",
    ),
    Mutation(
        promise="whoever is gone before its event was taken does not come back",
        path="engine/authority/keeper.py",
        old="            self._gone.add(name)\n",
        new="",
        test=f"{_SERVER}::test_a_member_that_dies_before_its_answer_harms_nobody",
    ),
    Mutation(
        promise="nobody leaves alone once the whole job stops",
        path="engine/authority/server.py",
        old="elif isinstance(event, Leave) and self._stopping:",
        new="elif isinstance(event, Leave) and not self._stopping:",
        test=f"{_SERVER}::test_all_workers_hear_that_the_job_stops_and_nobody_leaves_then",
    ),
    Mutation(
        promise="a signal does not change an earlier request",
        path="engine/stop.py",
        old="        if self.reason is None:\n            self.signal = number\n",
        new="        self.signal = number\n",
        test=f"{_STOP}::test_a_signal_behind_another_request_does_not_change_it",
    ),
    Mutation(
        promise="a new process group has new members",
        path="engine/base.py",
        old="if self._membership is None or world is not self._world:",
        new="if self._membership is None:",
        test=f"{_ENGINE}/test_group.py::test_joining_leaving_and_joining_again",
    ),
    # What is lost --------------------------------------------------------------------------
    Mutation(
        promise="a collective that a broken connection refuses is a lost member",
        path="engine/live/forming.py",
        old="if not self.broken and lost_connection(error) is None:",
        new="if not self.broken:",
        test=f"{_FORMING}::test_a_collective_that_is_refused_is_a_loss_only_if_a_member_is_gone",
    ),
    Mutation(
        promise="an error of the user's code is no lost replica",
        path="engine/lost.py",
        old="if not isinstance(error, RuntimeError) or error.__cause__ or error.__context__:",
        new="if not isinstance(error, RuntimeError):",
        test=f"{_ENGINE}/test_lost.py::"
        "test_only_a_connection_of_gloo_is_taken_for_a_lost_replica[not the first]",
    ),
    Mutation(
        promise="a number that was given to another process is not the one that had it",
        path="engine/processes.py",
        old="return now is not None and now != started",
        new='return now == ""',
        test=f"{_ENGINE}/test_engine.py::test_a_number_that_was_given_again_is_another_process",
    ),
    Mutation(
        promise="a worker ends before its agent kills it",
        path="engine/torchrun.py",
        old="return 0.6 * float(",
        new="return 1.6 * float(",
        test=f"{_WATCH}::test_the_deadline_comes_before_that_of_the_agent",
    ),
    Mutation(
        promise="a poller that failed is called again",
        path="engine/stop.py",
        old="exc_info=True\n                    )\n                    continue",
        new="exc_info=True\n                    )\n                    return",
        test=f"{_STOP}::test_pollers_ask",
    ),
    Mutation(
        promise="what was sent before the end of a connection is received",
        path="engine/live/wire.py",
        old="lines = [bytes(self._taken) + found[0], *found[1:]]",
        new="lines = [] if rest else [bytes(self._taken) + found[0], *found[1:]]",
        test=f"{_WIRE}::test_what_was_sent_before_the_end_is_received",
    ),
    Mutation(
        promise="a side that reads nothing is given up",
        path="engine/live/wire.py",
        old="            self._num_kept += len(line)\n",
        new="            self._num_kept = len(line)\n",
        test=f"{_WIRE}::test_a_side_that_asks_and_does_not_read_is_given_up",
    ),
    # Calls and devices ---------------------------------------------------------------------
    Mutation(
        promise="an error of one process is the error of all",
        path="engine/collectives.py",
        old="        if failed:\n",
        new="        if len(failed) == len(outcomes):\n",
        test=f"{_ENGINE}/test_collectives.py::"
        "test_an_error_of_one_is_the_error_of_all_and_travels_as_text",
    ),
    Mutation(
        promise="the largest number of all processes is found",
        path="engine/collectives.py",
        old='"max": dist.ReduceOp.MAX',
        new='"max": dist.ReduceOp.SUM',
        test=f"{_ENGINE}/test_collectives.py::test_reductions",
    ),
    Mutation(
        promise="a state is written when the device has made its copy",
        path="engine/devices.py",
        old="            else:\n                event.synchronize()",
        new="            else:\n                event.query()",
        test=f"{_ENGINE}/test_devices.py::test_state_is_copied_when_the_device_has_done_its_part",
    ),
    Mutation(
        promise="numbers of a device are read when it has passed their event",
        path="engine/devices.py",
        old="if self._event is not None and not self._event.query():",
        new="if self._event is not None and self._event.query():",
        test=f"{_ENGINE}/test_devices.py::"
        "test_fetched_numbers_arrive_when_the_device_has_passed_their_event",
    ),
    Mutation(
        promise="runs without a name are told apart",
        path="engine/torchrun.py",
        old='return f"agent-{self._agent}" if run_id == NO_RUN_ID else run_id',
        new="return run_id",
        test="tests/training/state/test_settings.py::"
        "test_runs_without_a_name_are_told_apart_by_their_agents",
    ),
    Mutation(
        promise="replicas stop if one of them was asked to",
        path="engine/base.py",
        old="return votes > 0",
        new="return votes > 1",
        test="tests/training/state/test_recovery.py::test_a_signal_saves_and_ends_behind_the_step",
    ),
]
