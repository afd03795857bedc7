"""Frameworks: Transformers, Accelerate, Lightning, Keras, Ray; and the names of other packages."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = [
    Mutation(
        promise="accumulation by accelerate itself is refused",
        path="integrations/accelerate.py",
        old="    if accelerator.gradient_accumulation_steps != 1:\n",
        new="    if accelerator.gradient_accumulation_steps < 1:\n",
        test="tests/integrations/test_accelerate.py::"
        "test_what_the_accelerator_is_told_and_cannot_be_honoured_is_refused",
    ),
    Mutation(
        promise="accelerate clips the gradient of a step and not of a micro-batch",
        path="integrations/accelerate.py",
        old="    return micro_batch is None or micro_batch.last\n",
        new="    return micro_batch is None or micro_batch.index == 0\n",
        test="tests/integrations/test_accelerate.py::"
        "test_clipping_is_of_the_whole_step_also_without_asking_for_it",
    ),
    Mutation(
        promise="samples that were used are not passed over a second time by accelerate",
        path="integrations/accelerate.py",
        old="isinstance(dataloader, ElasticLoader | AdaptiveDataLoader):",
        new="isinstance(dataloader, AdaptiveDataLoader):",
        test="tests/integrations/test_accelerate.py::"
        "test_what_a_loop_does_to_resume_by_hand_is_refused",
    ),
    Mutation(
        promise="a scheduler of epochs that a clock would step is refused by accelerate",
        path="integrations/accelerate.py",
        old="        if Home().job.loader is None:\n",
        new="        if Home().job.model is None:\n",
        test="tests/integrations/test_accelerate.py::"
        "test_a_scheduler_of_epochs_is_stepped_by_the_loop",
    ),
    Mutation(
        promise="a loss that accelerate scales is unscaled before it is weighed",
        path="integrations/accelerate.py",
        old="        scaler=accelerator.scaler,\n",
        new="",
        test="tests/integrations/test_accelerate.py::"
        "test_a_scaled_loss_weighs_as_much_and_an_overflow_is_no_step",
    ),
    Mutation(
        promise="an actor of ray that has not begun is not taken for frozen",
        path="integrations/ray_crew.py",
        old="each.silent += elapsed if heard else 0.0",
        new="each.silent += elapsed",
        test="tests/integrations/test_ray_live.py::"
        "test_a_worker_that_falls_silent_is_frozen_and_one_that_has_not_begun_is_not",
    ),
    Mutation(
        promise="an authority of ray that was suspended takes nobody for frozen",
        path="integrations/ray_crew.py",
        old="min(now - self._looked, MOST_SEEN), now",
        new="now - self._looked, now",
        test="tests/integrations/test_ray_live.py::"
        "test_an_authority_that_was_stopped_itself_takes_nobody_for_frozen",
    ),
    Mutation(
        promise="a job of ray with a minimum above its maximum is refused",
        path="integrations/ray_live.py",
        old="    if not 1 <= min_workers <= max_workers:\n",
        new="    if min_workers < 1 or max_workers < 1:\n",
        test="tests/integrations/test_ray_live.py::"
        "test_what_cannot_be_honoured_is_refused[min_workers-1]",
    ),
    Mutation(
        promise="a package that fails to import for another reason raises its own error",
        path="compat/names.py",
        old='            if not f"{module}.".startswith(f"{error.name}."):\n',
        new="            if False:\n",
        test="tests/test_compat.py::test_a_module_that_cannot_be_imported_says_why",
    ),
    Mutation(
        promise="a refused feature names the version of torch that has it",
        path="compat/torch_fsdp.py",
        old='raise TORCH.missing(f"torch.distributed.fsdp.FSDPModule.{method}", since)',
        new='raise TORCH.missing(f"torch.distributed.fsdp.FSDPModule.{method}")',
        test="tests/test_compat.py::"
        "test_sharded_models_are_refused_with_the_version_that_takes_them",
    ),
    Mutation(
        promise="`resilin doctor` does not refuse a torch for its number alone",
        path="cli/checks.py",
        old='= "warn" if old else "ok"',
        new='= "fail" if old else "ok"',
        test="tests/cli/test_doctor.py::"
        "test_a_number_below_the_tested_ones_is_a_warning_beside_their_range",
    ),
    Mutation(
        promise="a name of another package that is gone is told in one sentence",
        path="compat/names.py",
        old="getattr(found, part)\n        except AttributeError as error:\n",
        new="getattr(found, part)\n        except KeyError as error:\n",
        test="tests/test_compat.py::test_a_name_that_is_gone_is_missed_in_one_sentence",
    ),
    Mutation(
        promise="a private attribute that another package no longer has is not set",
        path="compat/names.py",
        old="        if not hasattr(owner, self.attribute):\n",
        new="        if owner is None:\n",
        test="tests/test_compat.py::test_an_attribute_that_is_gone_is_missed_in_one_sentence",
    ),
    Mutation(
        promise="the loss that the trainer logs is weighted by tokens",
        path="integrations/transformers.py",
        old="                total += loss * micro.weight\n",
        new="                total += loss\n",
        test="tests/integrations/test_transformers.py::"
        "test_the_gradient_is_the_mean_over_the_tokens_of_the_global_batch",
    ),
    Mutation(
        promise="of the state of the job and a folder of the trainer the newer one counts",
        path="integrations/transformers.py",
        old='state["version"][1] > home.clock.steps',
        new='state["version"][1] < home.clock.steps',
        test="tests/integrations/test_transformers.py::test_of_two_states_the_newer_one_counts",
    ),
    Mutation(
        promise="the steps of the trainer are those of the reference run",
        path="integrations/trainer_progress.py",
        old='pace = model.gain if model.rule.clock == "progress" else model.scale',
        new='pace = model.gain if model.rule.clock == "progress" else 1.0',
        test="tests/integrations/test_transformers.py::"
        "test_max_steps_are_those_of_the_reference_run",
    ),
    Mutation(
        promise="the trainer is told how far an adaptive rule has come",
        path="integrations/trainer_progress.py",
        old="        return job.clock.read(job.model.rule.clock, reference)\n",
        new='        return job.clock.read("samples", reference)\n',
        test="tests/integrations/test_transformers.py::"
        "test_with_an_adaptive_rule_progress_ends_the_run",
    ),
    Mutation(
        promise="a trainer that was resumed logs the learning rate of its last step",
        path="integrations/transformers.py",
        old="        lr = None if self._part is None else self._part.step_lr\n",
        new="        lr = None\n",
        test="tests/integrations/test_transformers.py::"
        "test_max_steps_are_those_of_the_reference_run",
    ),
    Mutation(
        promise="arguments of the trainer that cannot be honoured are refused",
        path="integrations/transformers.py",
        old="        if found != value:\n",
        new="        if found is None:\n",
        test="tests/integrations/test_transformers.py::"
        "test_what_the_arguments_say_and_cannot_be_honoured_is_refused[ignore_data_skip]",
    ),
    Mutation(
        promise="settings of a lightning trainer that cannot be honoured are refused",
        path="integrations/lightning/refusals.py",
        old="        if value != wanted and not (steps or quick):\n",
        new="        if value != wanted and (steps or quick):\n",
        test="tests/integrations/test_lightning.py::"
        "test_settings_that_cannot_be_honoured_are_refused[limit_train_batches-]",
    ),
    Mutation(
        promise="manual optimization of a lightning module is refused",
        path="integrations/lightning/refusals.py",
        old="    if not model.automatic_optimization:\n",
        new="    if model.automatic_optimization is None:\n",
        test="tests/integrations/test_lightning.py::"
        "test_loaders_loops_and_strategies_of_other_kinds_are_refused",
    ),
    Mutation(
        promise="arguments of fit of keras that cannot be honoured are refused",
        path="integrations/keras/refusals.py",
        old='    if (steps := arguments["steps_per_epoch"]) is not None:\n',
        new='    if (steps := arguments["steps_per_epoch"]) == 0:\n',
        test="tests/integrations/test_keras.py::test_what_fit_cannot_honour_is_refused",
    ),
    Mutation(
        promise="a loss of keras that is a sum and not a mean is refused",
        path="integrations/keras/refusals.py",
        old='_MEANS = ("sum_over_batch_size", "mean")\n',
        new='_MEANS = ("sum_over_batch_size", "mean", "sum")\n',
        test="tests/integrations/test_keras.py::"
        "test_what_a_model_is_compiled_with_and_cannot_be_honoured_is_refused",
    ),
    Mutation(
        promise="a call of fit of keras that was under way is resumed and not skipped",
        path="integrations/keras/progress.py",
        old='number < self._restored["fit"]',
        new='number <= self._restored["fit"]',
        test="tests/integrations/test_keras.py::"
        "test_a_second_fit_goes_on_and_a_script_that_is_run_again_finds_its_place",
    ),
    Mutation(
        promise="the loss of an epoch of keras is weighted by samples",
        path="integrations/keras/steps.py",
        old="keras_names.track_loss(model, loss.detach(), weight)",
        new="keras_names.track_loss(model, loss.detach(), 1.0)",
        test="tests/integrations/test_keras.py::"
        "test_batch_sizes_that_change_train_like_stock_keras_that_sees_whole_batches",
    ),
]
