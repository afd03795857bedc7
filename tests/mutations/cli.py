"""The command line: jobs, their failures and signals, options, and what is reported of a run."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        promise="a job whose loop was left is told from one that has finished",
        path="cli/hang.py",
        old="shown.epoch < shown.epochs\n",
        new="shown.epoch > shown.epochs\n",
        test="tests/cli/test_hang.py::test_the_end_of_a_job_says_how_far_it_came",
    ),
    Mutation(
        promise="a process that a script forks in a warm worker ends with its part of it",
        path="cli/warm.py",
        old="        if os.getpid() != process:\n",
        new="        if False:\n",
        test="tests/cli/test_warm.py::"
        "test_a_process_that_a_script_forks_ends_with_its_part_of_the_script",
    ),
    Mutation(
        promise="a script that ends before its training is not taken for a finished job",
        path="cli/live/verdict.py",
        old="    if code == 0 and finished:\n",
        new="    if code == 0:\n",
        test="tests/cli/live/test_verdict.py::test_the_meaning_of_an_exit",
    ),
    Mutation(
        promise="a worker that is killed before the job began is replaced",
        path="cli/live/verdict.py",
        old="    if code > 0 and not ever_formed:\n",
        new="    if code and not ever_formed:\n",
        test="tests/cli/live/test_verdict.py::test_the_meaning_of_an_exit",
    ),
    Mutation(
        promise="a limit of restarts is obeyed exactly",
        path="cli/live/verdict.py",
        old="        if self.used >= self.most:\n",
        new="        if self.used > self.most:\n",
        test="tests/cli/live/test_replacements.py::test_a_limit_of_the_user_is_obeyed_exactly",
    ),
    Mutation(
        promise="a job that is started again and again without a step is given up",
        path="cli/live/verdict.py",
        old="{key: value for key, value in self._lives.items() if key == JOB}",
        new="{}",
        test="tests/cli/live/test_replacements.py::"
        "test_the_job_is_counted_apart_and_a_new_start_clears_its_workers",
    ),
    Mutation(
        promise="the worker that failed first is named and not those that failed by it",
        path="cli/blame.py",
        old="[each for each in failures if not each.follows]",
        new="[each for each in failures if each.follows]",
        test="tests/cli/test_blame.py::test_a_failure_that_follows_from_another_one_is_no_cause",
    ),
    Mutation(
        promise="a worker that asks for a restart is reported as no fault",
        path="cli/blame.py",
        old="        if not each.asked:\n",
        new="        if not each.follows:\n",
        test="tests/cli/test_blame.py::test_a_worker_that_asked_for_a_restart_is_no_fault",
    ),
    Mutation(
        promise="an agent reads the cause of the other agents and not its own",
        path="cli/blame.py",
        old="for each in range(num_agents) if each != rank]",
        new="for each in range(num_agents)]",
        test="tests/cli/test_blame.py::test_agents_read_the_cause_of_the_others_and_not_their_own",
    ),
    Mutation(
        promise="the error of a worker that a signal killed is not named as its end",
        path="cli/blame.py",
        old="if self.error and self.code > 0 else",
        new="if self.error else",
        test="tests/cli/test_blame.py::"
        "test_a_line_names_the_worker_its_process_its_signal_or_its_error",
    ),
    Mutation(
        promise="ctrl-c reaches the workers as a signal that lets them save",
        path="cli/stopping.py",
        old="sent = given if given in SIGNALS else signal.SIGTERM",
        new="sent = given",
        test="tests/cli/test_stopping.py::test_workers_get_a_signal_that_asks_them_to_save",
    ),
    Mutation(
        promise="a signal that is repeated does not kill workers that save",
        path="cli/stopping.py",
        old="        if given is signal.SIGINT and self.kill is not None:\n",
        new="        if self.kill is not None:\n",
        test="tests/cli/test_stopping.py::"
        "test_later_signals_are_ignored_and_a_second_interrupt_kills_once",
    ),
    Mutation(
        promise="a launcher that was suspended takes no worker for frozen",
        path="cli/live/guard.py",
        old="min(now - self._looked, MOST_SEEN), now",
        new="now - self._looked, now",
        test="tests/cli/live/test_guard.py::"
        "test_time_in_which_the_launcher_was_stopped_does_not_count",
    ),
    Mutation(
        promise="a worker that is still starting is not taken for frozen",
        path="cli/live/guard.py",
        old="worker.silent += elapsed if heard else 0.0",
        new="worker.silent += elapsed",
        test="tests/cli/live/test_guard.py::"
        "test_a_worker_freezes_after_its_first_sign_of_life_and_not_before",
    ),
    Mutation(
        promise="signals have their former handlers after a live job",
        path="cli/live/signs.py",
        old="            signal.signal(number, handler)\n",
        new="            signal.getsignal(number)\n",
        test="tests/cli/live/test_signs.py::test_signals_have_their_former_handlers_afterwards",
    ),
    Mutation(
        promise="a secret that others can read is refused",
        path="cli/live/access.py",
        old="path.stat().st_mode & 0o077",
        new="path.stat().st_mode & 0o033",
        test="tests/cli/live/test_access.py::test_a_secret_must_be_private_and_long",
    ),
    Mutation(
        promise="a live option without live is refused",
        path="cli/options.py",
        old="for name in LIVE_OPTIONS if getattr(args, name) is not None]",
        new="for name in LIVE_OPTIONS[:1] if getattr(args, name) is not None]",
        test="tests/cli/test_options.py::"
        "test_options_that_make_no_sense_with_or_without_live_are_refused",
    ),
    Mutation(
        promise="a setting of the rendezvous goes before the one of resilin",
        path="cli/options.py",
        old='f"{defaults},{args.rdzv_conf}".rstrip(",")',
        new='f"{args.rdzv_conf},{defaults}".lstrip(",")',
        test="tests/cli/test_options.py::test_a_setting_of_the_rendezvous_replaces_ours_alone",
    ),
    Mutation(
        promise="the environment of torchrun goes before defaults of resilin",
        path="cli/options.py",
        old="for name in defaults.keys() - asked})",
        new="for name in defaults.keys() | asked})",
        test="tests/cli/test_options.py::test_the_environment_of_torchrun_goes_before_our_defaults",
    ),
    Mutation(
        promise="copies of a sharded model that do not divide the workers are refused",
        path="cli/options.py",
        old="    if workers % size:\n",
        new="    if size > workers:\n",
        test="tests/cli/test_options.py::"
        "test_options_that_make_no_sense_with_or_without_live_are_refused",
    ),
    Mutation(
        promise="all machines of a job have the same id for it",
        path="cli/options.py",
        old='args.rdzv_id or re.sub(r"[^\\w.-]", "-", args.rdzv_endpoint)',
        new="args.rdzv_id or uuid.uuid4().hex[:12]",
        test="tests/cli/test_options.py::test_the_id_of_a_job_is_the_same_on_all_its_machines",
    ),
    Mutation(
        promise="a machine on a port that nobody knows does not keep the rendezvous open",
        path="cli/run.py",
        old='    if port == "0":\n',
        new="    if not port:\n",
        test="tests/cli/test_options.py::test_whether_the_others_meet_here",
    ),
    Mutation(
        promise="a job that a signal stopped has the exit code of that signal",
        path="cli/run.py",
        old="        code = 128 + number\n",
        new="        code = 0\n",
        test="tests/cli/test_stopping.py::"
        "test_a_save_that_is_under_way_is_kept_however_often_the_agent_is_asked[stopped]",
    ),
    Mutation(
        promise="one failed check of the doctor is an exit code",
        path="cli/doctor.py",
        old='int(any(finding.verdict == "fail"',
        new='int(all(finding.verdict == "fail"',
        test="tests/cli/test_doctor.py::test_findings_are_lines_and_a_failed_one_is_an_exit_code",
    ),
    Mutation(
        promise="a package that is missing is found by the doctor",
        path="cli/checks.py",
        old="installed(name)\n        found.append(f\"{name} {version or 'missing'}\")\n",
        new='installed(name) or "99"\n        found.append(f"{name} {version}")\n',
        test="tests/cli/test_doctor.py::"
        "test_a_package_that_is_too_old_fails_with_the_command_that_updates_it",
    ),
    Mutation(
        promise="a batch that cannot be split for any number of replicas is an exit code",
        path="cli/plan.py",
        old='    return int(not any(row["possible"] for row in rows))\n',
        new="    return int(not rows)\n",
        test="tests/cli/test_plan.py::test_what_cannot_be_planned_says_why_in_its_row",
    ),
    Mutation(
        promise="the balance of a plan is the mean share over the largest",
        path="cli/plan.py",
        old='"balance": batch / (replicas * largest)',
        new='"balance": smallest / largest',
        test="tests/cli/test_plan.py::test_the_table_of_256_over_64",
    ),
    Mutation(
        promise="the state of a job whose worker still runs is not cleaned up",
        path="cli/memory.py",
        old="if path.is_dir() and str(path) not in in_use and not _is_held(path)",
        new="if path.is_dir() and path not in in_use and not _is_held(path)",
        test="tests/cli/test_memory.py::"
        "test_a_directory_is_abandoned_when_agent_and_workers_are_gone",
    ),
    Mutation(
        promise="two jobs of one id do not share the memory of a machine",
        path="cli/memory.py",
        old='len(ports) == 1 and ports != {"0"}',
        new="len(ports) == 1",
        test="tests/cli/test_memory.py::test_two_jobs_of_one_id_do_not_share_it",
    ),
    Mutation(
        promise="an interval of confidence counts both of its sides",
        path="lab/intervals.py",
        old="t_quantile((1 + level) / 2, num - 1)",
        new="t_quantile(level, num - 1)",
        test="tests/lab/test_intervals.py::test_an_interval_is_that_of_scipy",
    ),
    Mutation(
        promise="runs of one seed are compared in pairs",
        path="lab/intervals.py",
        old="[value - other for value, other in zip(values, others, strict=True)]",
        new="[value - sum(others) / len(others) for value in values]",
        test="tests/lab/test_intervals.py::test_pairs_cancel_what_they_share",
    ),
]
