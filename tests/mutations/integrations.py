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
        promise="a name of another package that is gone is told in one sentence",
        path="compat/names.py",
        old="        except (AttributeError, ModuleNotFoundError) as error:\n",
        new="        except ModuleNotFoundError as error:\n",
        test="tests/test_compat.py::test_a_name_that_is_gone_is_missed_in_one_sentence",
    ),
    Mutation(
        promise="a private attribute that another package no longer has is not set",
        path="compat/names.py",
        old="        if not hasattr(owner, self.attribute):\n",
        new="        if owner is None:\n",
        test="tests/test_compat.py::test_an_attribute_that_is_gone_is_missed_in_one_sentence",
    ),
]
